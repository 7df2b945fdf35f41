#!/bin/sh
# Tries what only a whole machine has: logind and its logouts, tmpfiles, control groups, a disk that hangs, Yama, Linux 6.1.
#   sh tests/vm/machine.sh
# Boots a new Debian 12 in which what build/test has is installed, and runs guest.sh there. By hand: it takes half an
# hour, since the processor is emulated (TCG), so that no right and no /dev/kvm is needed; QEMU_ACCEL=kvm is faster where
# that works. Its lines, and all that the machine prints, are in build/vm/console. Needs root to make the system. Exit
# status 77: it cannot be done here.
set -eu

cd "$(dirname "$0")/../.."
build=$PWD/build/test
work=$PWD/build/vm
root=$work/root

. tests/lib/boot.sh

sh tools/packages service || { echo "$0: skipped: packages are missing" >&2; exit 77; }
[ -x "$build/bin/coxswain" ] || fail "first: cmake --preset test && ninja -C build/test"
mkdir -p "$work"
sh tools/root "$root" systemd systemd-sysv udev dbus
chroot "$root" sh -euc 'export DEBIAN_FRONTEND=noninteractive
    apt-get -q update
    apt-get -q install -y --no-install-recommends libpam-systemd openssh-server openssh-client initramfs-tools \
        linux-image-cloud-"$(dpkg --print-architecture)" libjansson4 libncurses6 libprotobuf-c1 libdw1 procps \
        dmsetup e2fsprogs python3 python3-cffi' >"$work/install.log" 2>&1 ||
    { tail "$work/install.log" >&2; fail "the packages in the machine"; }

DESTDIR=$root cmake --install "$build" --prefix /usr >>"$work/install.log"
cp tests/vm/guest.sh "$root/usr/local/sbin/guest"
cp tests/lib/guest.sh tests/vm/forked_host.py tests/vm/reading_rank.py "$root/usr/local/lib/"
cat >"$root/etc/systemd/system/guest.service" <<'END'
[Unit]
Description=The test
After=multi-user.target
[Service]
Type=oneshot
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
ExecStart=sh /usr/local/sbin/guest
ExecStopPost=systemctl poweroff --force
[Install]
WantedBy=graphical.target
END
chroot "$root" sh -euc '
    ln -sf /lib/systemd/system/graphical.target /etc/systemd/system/default.target
    systemctl enable guest.service
    systemctl mask getty@.service serial-getty@.service
    useradd -m -s /bin/sh alice
    passwd -d alice
    mkdir -p /root/.ssh /home/alice/.ssh
    ssh-keygen -q -t ed25519 -N "" -f /root/.ssh/id_ed25519
    cp /root/.ssh/id_ed25519.pub /home/alice/.ssh/authorized_keys
    printf "Host localhost\n    StrictHostKeyChecking no\n    LogLevel ERROR\n" >/root/.ssh/config
    echo "127.0.0.1 localhost coxswain" >/etc/hosts
    echo coxswain >/etc/hostname' >>"$work/install.log" 2>&1 || { tail "$work/install.log" >&2; fail "the machine"; }
mv "$root"/boot/vmlinuz-* "$work/kernel"
mv "$root"/boot/initrd.img-* "$work/initrd"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
rm -f "$work/disk"
mke2fs -q -t ext4 -d "$root" "$work/disk" 2500M
rm -rf --one-file-system "$root"

trap 'rm -f "$work/disk"' EXIT
boot "$work/console" "${MINUTES:-90}" qemu-system-x86_64 -accel "${QEMU_ACCEL:-tcg}" -cpu max -m 3072 \
    -kernel "$work/kernel" -initrd "$work/initrd" -drive file="$work/disk",format=raw,if=virtio \
    -append "root=/dev/vda rw console=ttyS0 quiet panic=-1 systemd.show_status=0"
