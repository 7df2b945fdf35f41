# For arm64, by Debian's cross compiler (crossbuild-essential-arm64):
#   cmake -B build/arm64 --toolchain cmake/aarch64-linux-gnu.cmake
# The libraries are those of the multiarch packages (libprotobuf-c-dev:arm64 and so on), or those in COX_SYSROOT, a folder that
# `sh tests/arm64/sysroot.sh` fills.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES COX_SYSROOT)
set(libraries ${COX_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${COX_SYSROOT}/usr/share/pkgconfig)
if(COX_SYSROOT)
    set(CMAKE_SYSROOT ${COX_SYSROOT})
    set(ENV{PKG_CONFIG_SYSROOT_DIR} ${COX_SYSROOT})
endif()
set(ENV{PKG_CONFIG_LIBDIR} ${libraries})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
