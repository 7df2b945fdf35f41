# What has to be installed. All of it is looked for before any of it is reported, so that one run tells everything.
#
# PkgConfig::PROTOBUF_C, PkgConfig::JANSSON, PkgConfig::NCURSES and, for the tests, PkgConfig::CMOCKA; PROTOC_C_EXECUTABLE.

set(cox_missing "")
set(cox_missing_debian "")

# cox_package(name package): `name` is missing; Debian has it in `package`.
macro(cox_package name package)
    list(APPEND cox_missing "  ${name} (Debian: ${package})")
    list(APPEND cox_missing_debian ${package})
endmacro()

# cox_module(prefix module header package): PkgConfig::<prefix>. Without pkg-config the header says whether it is there.
macro(cox_module prefix module header package)
    if(PKG_CONFIG_FOUND)
        pkg_check_modules(${prefix} QUIET IMPORTED_TARGET ${module})
        set(found ${${prefix}_FOUND})
    else()
        find_path(${prefix}_HEADER ${header})
        mark_as_advanced(${prefix}_HEADER)
        set(found ${${prefix}_HEADER})
    endif()
    if(NOT found)
        cox_package(${module} ${package})
    endif()
endmacro()

set(THREADS_PREFER_PTHREAD_FLAG OFF)
find_package(Threads REQUIRED)
find_package(PkgConfig QUIET)
if(NOT PKG_CONFIG_FOUND)
    cox_package(pkg-config pkg-config)
endif()
find_program(PROTOC_C_EXECUTABLE protoc-c)
if(NOT PROTOC_C_EXECUTABLE)
    cox_package(protoc-c protobuf-c-compiler)
endif()
cox_module(PROTOBUF_C libprotobuf-c protobuf-c/protobuf-c.h libprotobuf-c-dev)
if(COX_BUILD_COMMANDS)
    cox_module(JANSSON jansson jansson.h libjansson-dev)
    cox_module(NCURSES ncurses curses.h libncurses-dev)
endif()
# Groups over several machines: optional, and built where both are there.
option(COX_NODES "Build libcoxswain-nodes (needs libnats, OpenSSL and jansson)" ON)
if(COX_NODES AND PKG_CONFIG_FOUND)
    pkg_check_modules(NATS QUIET IMPORTED_TARGET libnats)
    pkg_check_modules(OPENSSL QUIET IMPORTED_TARGET openssl)
    pkg_check_modules(JANSSON QUIET IMPORTED_TARGET jansson)
endif()
if(COX_NODES AND NOT (NATS_FOUND AND OPENSSL_FOUND AND JANSSON_FOUND))
    message(STATUS "libcoxswain-nodes is left out: Debian's libnats-dev, libssl-dev and libjansson-dev are needed")
    set(COX_NODES OFF)
endif()
# USDT probes: without the header the build has none.
include(CheckIncludeFile)
check_include_file(sys/sdt.h COX_HAVE_SDT_H)
if(COX_HAVE_SDT_H AND COX_PROBES)
    add_compile_definitions(COX_HAVE_SDT=1)
else()
    add_compile_definitions(COX_HAVE_SDT=0)
endif()
if(COX_BUILD_TESTS)
    cox_module(CMOCKA cmocka cmocka.h libcmocka-dev)
endif()

# For what runs where these libraries are not installed, as from a wheel: the two programs need libc and libm alone,
# libcoxswain and libcoxswain-proto libc. libcoxswain-nodes keeps libnats, OpenSSL and jansson, whose archive in Debian
# cannot be part of a shared library.
option(COX_STATIC_DEPENDENCIES "Link protobuf-c, jansson and ncurses from their archives" OFF)
if(COX_STATIC_DEPENDENCIES)
    foreach(module PROTOBUF_C JANSSON NCURSES)
        set(archives "")
        foreach(name IN LISTS ${module}_LIBRARIES)
            find_library(archive_${name} lib${name}.a HINTS ${${module}_LIBRARY_DIRS})
            mark_as_advanced(archive_${name})
            if(NOT archive_${name})
                message(FATAL_ERROR "COX_STATIC_DEPENDENCIES=ON: there is no lib${name}.a; Debian's -dev packages have archives")
            endif()
            list(APPEND archives ${archive_${name}})
        endforeach()
        if(TARGET PkgConfig::${module})
            set_target_properties(PkgConfig::${module} PROPERTIES INTERFACE_LINK_LIBRARIES "${archives}")
        endif()
    endforeach()
endif()

if(COX_BUILD_PYTHON)
    execute_process(COMMAND ${COX_PYTHON} -c "import cffi, os, sysconfig
assert os.path.exists(('${COX_PYTHON_INCLUDE}' or sysconfig.get_path('include')) + '/Python.h')"
        OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE result)
    if(result)
        cox_package("cffi or Python.h for ${COX_PYTHON}" "python3-cffi python3-dev")
    endif()
endif()

if(cox_missing)
    list(JOIN cox_missing "\n" lines)
    list(JOIN cox_missing_debian " " packages)
    message(FATAL_ERROR "These are missing:\n${lines}\n"
        "On Debian, as root:  apt-get install ${packages}\n"
        "(or sh tools/packages build, which installs all that a build needs)")
endif()
