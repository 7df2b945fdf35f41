#!/bin/sh
# What a newcomer meets before anything runs: configuring with what is there, make, and what install says.
#   configure_test.sh SOURCE BUILD CMAKE CC
set -eu
export LC_ALL=C
source=$1 build=$2 cmake=$3 cc=$4

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM

fail() {
    cat "$scratch/output" >&2
    echo "FAIL: $*" >&2
    exit 1
}
says() {
    for part in "$@"; do
        grep -q -e "$part" "$scratch/output" || fail "it does not say '$part'"
    done
}
says_not() {
    for part in "$@"; do
        ! grep -q -e "$part" "$scratch/output" || fail "it says '$part'"
    done
}
configure() {
    rm -rf "$scratch/build"
    "$cmake" -S "$source" -B "$scratch/build" -D CMAKE_C_COMPILER="$cc" "$@" >"$scratch/output" 2>&1
}

# Everything that is missing is told at once, with the packages; cmocka only where tests are wanted.
PKG_CONFIG_LIBDIR=/nonexistent configure && fail "it configures without libraries"
says "These are missing" libprotobuf-c-dev libjansson-dev "apt-get install"
says_not cmocka
PKG_CONFIG_LIBDIR=/nonexistent configure -D COX_BUILD_TESTS=ON && fail "it configures without libraries"
says libprotobuf-c-dev libjansson-dev libcmocka-dev

# Of the package for Python what is missing is named, and no more: pip brings cffi itself.
configure -D COX_BUILD_PYTHON=ON -D COX_PYTHON_INCLUDE=/nonexistent && fail "it configures without Python.h"
says "Python.h for " python3-dev "sh tools/packages build python"
says_not cffi
awk '$1 == "python" { print $2 }' "$source/tools/packages.txt" >"$scratch/output"
says python3-dev

# Without cmocka and options the product is configured, and no test.
mkdir "$scratch/pc"
for folder in $(pkg-config --variable pc_path pkg-config | tr : ' '); do
    for file in "$folder"/*.pc; do
        [ ! -e "$file" ] || ln -sf "$file" "$scratch/pc/"
    done
done
rm -f "$scratch/pc/cmocka.pc"
PKG_CONFIG_LIBDIR=$scratch/pc configure || fail "it does not configure without cmocka"
"$cmake" --build "$scratch/build" --target help >"$scratch/output"
says coxswain-worker coxswain_shared
says_not test_unit_ coxswain-bench

# Archives in the programs, for machines that have only libc.
PKG_CONFIG_LIBDIR=$scratch/pc configure -G "Unix Makefiles" -D COX_STATIC_DEPENDENCIES=ON || fail "it does not configure"
cat "$scratch/build/program/CMakeFiles/coxswain.dir/link.txt" "$scratch/build/engine/rank/CMakeFiles"/*/link.txt >"$scratch/output"
says libprotobuf-c.a libjansson.a libncurses.a libtinfo.a
says_not "lib[a-z-]*\.so" "-l\(protobuf-c\|jansson\|ncurses\|tinfo\)"

# make installs no package unasked. These stand in for the tools of the system and write down their calls.
mkdir "$scratch/bin"
for tool in apt-get sudo cmake; do
    printf '#!/bin/sh\necho "%s $*" >>"%s/calls"\n' $tool "$scratch" >"$scratch/bin/$tool"
done
printf '#!/bin/sh\nexit 1\n' >"$scratch/bin/dpkg-query"
chmod +x "$scratch/bin"/*
make() {
    : >"$scratch/calls"
    env -u COXSWAIN_PACKAGES -u MAKEFLAGS PATH="$scratch/bin:$PATH" make -C "$source" "$@" >"$scratch/output" 2>&1
}
make || fail "make fails"
says "not installed as Debian packages: build-essential" "make packages"
if grep -q -e apt-get -e sudo "$scratch/calls"; then fail "make installs packages"; fi
grep -q "cmake --build --preset release" "$scratch/calls" || fail "make does not build"
make packages || fail "make packages fails"
grep -q "install -y" "$scratch/calls" || fail "make packages installs nothing"
make help || fail "make help fails"
says "make packages" "make install" "cmake -B build && cmake --build build -j"

# How programs find the library is said, but not to who makes a package.
"$cmake" --install "$build" --prefix "$scratch/prefix" >"$scratch/output"
says "Run ldconfig as root"
DESTDIR="$scratch/root" "$cmake" --install "$build" --prefix /usr >"$scratch/output"
says_not ldconfig
