#!/bin/sh
# Starts coxswain@.service for real: in a virtual machine, a new Debian 12 with systemd as process 1.
#   sh tests/service/vm.sh
# The packages of build/packages are installed in it (tests/packages/packages.sh makes them, where they are missing), and
# guest.sh runs there. Its lines, and all that the machine prints, are in build/service/console. The processor is
# emulated (TCG), so that no right and no /dev/kvm is needed; QEMU_ACCEL=kvm is faster where that works. Needs root to
# make the system. Exit status 77: it cannot be done here.
set -eu

cd "$(dirname "$0")/../.."
work=$PWD/build/service
root=$work/root

. tests/lib/boot.sh

sh tools/packages service || { echo "$0: skipped: packages are missing" >&2; exit 77; }
ls build/packages/coxswain_*.deb >/dev/null 2>&1 || sh tests/packages/packages.sh build
mkdir -p "$work"
sh tools/root "$root" systemd systemd-sysv udev linux-image-cloud-"$(dpkg --print-architecture)" initramfs-tools \
    libjansson4 libncurses6 libprotobuf-c1 procps

cp build/packages/coxswain_*.deb "$root/tmp/"
cp build/packages/coxswain_*.deb "$root/root/" # guest.sh installs it once more
cp tests/service/guest.sh "$root/usr/local/sbin/guest"
cp tests/lib/guest.sh "$root/usr/local/lib/guest.sh"
cat >"$root/etc/systemd/system/guest.service" <<'END'
[Unit]
Description=The test
After=multi-user.target
FailureAction=poweroff-force
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
    dpkg -i /tmp/coxswain_*.deb
    ln -sf /lib/systemd/system/graphical.target /etc/systemd/system/default.target
    systemctl enable guest.service
    systemctl mask getty@.service serial-getty@.service systemd-networkd-wait-online.service
    echo coxswain >/etc/hostname
    echo "tmpfs /tmp tmpfs mode=1777 0 0" >/etc/fstab
    passwd -d root' >"$work/install.log" 2>&1 || { tail "$work/install.log" >&2; fail "the packages in the machine"; }
mv "$root"/boot/vmlinuz-* "$work/kernel"
mv "$root"/boot/initrd.img-* "$work/initrd"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
rm -f "$work/disk"
mke2fs -q -t ext4 -d "$root" "$work/disk" 1500M
rm -rf --one-file-system "$root"

trap 'rm -f "$work/disk"' EXIT
boot "$work/console" "${MINUTES:-40}" qemu-system-x86_64 -accel "${QEMU_ACCEL:-tcg}" -cpu max -m 1024 \
    -kernel "$work/kernel" -initrd "$work/initrd" -drive file="$work/disk",format=raw,if=virtio \
    -append "root=/dev/vda rw console=ttyS0 quiet panic=-1 systemd.show_status=0"
