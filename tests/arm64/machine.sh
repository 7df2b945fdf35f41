#!/bin/sh
# Runs Coxswain on arm64, in a virtual machine: an emulated processor, Debian's kernel and programs for arm64.
#   sh tests/arm64/machine.sh          cross-builds, boots, runs the demo, kills a rank, runs the unit tests
#   sh tests/arm64/machine.sh sysroot  only unpacks the libraries that the test arm64/cross_build needs
# What it prints is in build/arm64/console. It shows that instructions, layouts and system calls are right there. It does not
# show memory order: the emulator's is that of the host, which reorders less. (User-mode emulation lacks CLONE_PIDFD.)
# Exit status 77: it cannot be done here.
set -eu

cd "$(dirname "$0")/../.."
work=$PWD/build/arm64
build=$work/full
root=$work/root

. tests/lib/boot.sh

mkdir -p "$work"
[ -e "$work/sysroot/usr/lib/aarch64-linux-gnu/pkgconfig/cmocka.pc" ] ||
    sh tests/arm64/sysroot.sh "$work/sysroot" arm64 libc6-dev libgcc-12-dev libprotobuf-c-dev libjansson-dev \
        libncurses-dev libcmocka-dev
[ "${1:-}" != sysroot ] || exit 0
sh tools/packages build arm64 || { echo "$0: skipped: packages are missing" >&2; exit 77; }

# The unit tests that are one program and need nothing else.
cmake -S . -B "$build" -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake -D COX_SYSROOT="$work/sysroot" \
    -D CMAKE_BUILD_TYPE=RelWithDebInfo -D COX_WERROR=ON -D COX_TESTING=ON -D COX_BUILD_TESTS=ON -D COX_BUILD_BENCH=OFF \
    -D COX_BUILD_MAN=OFF -D COX_TSAN_RUNS_EXITCODE=1 \
    >"$work/build.log" || fail "see $work/build.log"
programs=$(ninja -C "$build" -t targets all | sed -n 's/^\(test_unit_[a-z0-9_]*\): phony$/\1/p')
[ -n "$programs" ] || fail "no unit test is built: see $work/build.log"
cmake --build "$build" -j "${JOBS:-$(nproc)}" --target coxswain coxswain-worker $programs >>"$work/build.log" ||
    { tail "$work/build.log" >&2; fail "see $work/build.log"; }

# A root of programs that are unpacked, with the tree where the tests look for it.
sh tests/arm64/sysroot.sh "$root" arm64 linux-image-cloud-arm64 bash coreutils dash grep sed findutils procps mount \
    util-linux gawk libprotobuf-c1 libjansson4 libncurses6 libcmocka0 libgcc-s1
mv "$root"/boot/vmlinuz-* "$work/kernel"
rm -rf "$root/boot" "$root/usr/lib/modules" "$root/usr/share" "$root"/usr/lib/*/perl*
mkdir -p "$root$PWD/build/arm64/full" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/tmp" "$root/root" "$root/etc"
echo "root:x:0:0::/root:/bin/sh
nobody:x:65534:65534::/:/bin/false" >"$root/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
lib=$root/usr/lib/aarch64-linux-gnu
cp -a models tests "$root$PWD/"
rm -rf "$root$PWD/tests/bench"
cp -a "$build/bin" "$build/tests" "$root$PWD/build/arm64/full/"
find "$root$PWD/build" \( -name CMakeFiles -o -name '*.a' -o -name '*.ninja' \) -prune -exec rm -rf {} +
find "$root$PWD/build" -type f -perm /100 -exec aarch64-linux-gnu-strip --strip-debug {} + 2>/dev/null || true
ctest --test-dir "$build" --show-only=json-v1 -L '^unit$' >"$work/tests.json"
/usr/bin/python3 tests/arm64/guest.py "$work/tests.json" "$build" >"$root/tests.sh"
cp tests/arm64/guest.sh "$root/init"
cp tests/lib/guest.sh "$root/guest-lib.sh"
chmod +x "$root/init"
echo "$build" >"$root/build-folder"
(cd "$root" && find . -print0 | cpio --null --quiet -o -H newc) >"$work/initrd"
rm -rf "$root"

trap 'rm -f "$work/initrd"' EXIT
boot "$work/console" "${MINUTES:-45}" qemu-system-aarch64 -M virt -cpu cortex-a72 -accel tcg -m 3072 \
    -kernel "$work/kernel" -initrd "$work/initrd" -append "console=ttyAMA0 quiet panic=-1 rdinit=/init"
