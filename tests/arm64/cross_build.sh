#!/bin/sh
# Builds the library for arm64, without optimizing: cross_build.sh CMAKE SOURCE FOLDER
# Exit status 77: without the cross compiler, or without its protobuf-c.
set -eu
cmake=$1 source=$2 folder=$3

command -v aarch64-linux-gnu-gcc >/dev/null ||
    { echo "SKIP: no aarch64-linux-gnu-gcc (sh tools/packages arm64)"; exit 77; }
sysroot=
if [ ! -e /usr/lib/aarch64-linux-gnu/pkgconfig/libprotobuf-c.pc ]; then
    # In this checkout's build folder, whatever build this is.
    sysroot=$source/build/arm64/sysroot
    [ -e "$sysroot/usr/lib/aarch64-linux-gnu/pkgconfig/libprotobuf-c.pc" ] ||
        { echo "SKIP: no libprotobuf-c-dev:arm64 (sh tests/arm64/machine.sh sysroot)"; exit 77; }
fi
# Anew, so that what it finds is of this source alone.
rm -rf "$folder"
"$cmake" -S "$source" -B "$folder" -G Ninja --toolchain "$source/cmake/aarch64-linux-gnu.cmake" \
    -D COX_SYSROOT="$sysroot" -D CMAKE_BUILD_TYPE=None -D CMAKE_C_FLAGS=-O0 -D COX_WERROR=ON -D COX_BUILD_TESTS=OFF \
    -D COX_BUILD_BENCH=OFF -D COX_BUILD_COMMANDS=OFF -D COX_BUILD_MAN=OFF
"$cmake" --build "$folder" --target coxswain_shared coxswain_memory_shared coxswain_proto_shared
for name in coxswain coxswain-memory coxswain-proto; do
    aarch64-linux-gnu-readelf -h "$folder/lib/lib$name.so" | grep -q 'Machine: *AArch64' ||
        { echo "FAIL: lib$name.so is not for arm64"; exit 1; }
done
rm -rf "$folder"
