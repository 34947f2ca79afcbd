#!/bin/bash
# Guests of libvirt, in an emulated host: Debian 12 or 13 as its packages leave it, Linux 6.12, AppArmor enforcing, KVM. What
# packaging/libvirt has is installed there, two tenants' guests run by virsh and merge, what libvirt does with guests is done to
# merged ones, a rule is taken away, and all is removed. Nothing is installed here.
#
#   scripts/lanes/libvirt.sh [RELEASE]     bookworm (Debian 12, without an argument) or trixie (Debian 13)
#   scripts/lanes/libvirt.sh selinux       Debian 13 with SELinux in AppArmor's place, and scripts/lanes/selinux-steps.sh
#
# Settings:
#   PAGEONE_LIBVIRT_TIMEOUT   seconds (3600)
#   PAGEONE_LIBVIRT_STEPS     some of the steps, by name: see scripts/lanes/libvirt-steps.sh
# Exit: 0 every step passed; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
bin=$(realpath "${CARGO_TARGET_DIR:-target}/debug")
release=${1:-bookworm} inside=scripts/lanes/libvirt-steps.sh append=''
[ "$release" != selinux ] || { release=trixie-selinux inside=scripts/lanes/selinux-steps.sh append=security=selinux; }
kernel=$cache/kvm-host image=$cache/libvirt-$release/root.img
for file in "$kernel/complete" "$image"; do
    [ -e "$file" ] || { echo "test-libvirt: $file is missing: run 'scripts/deps.sh libvirt' ('selinux' for that)" >&2; exit 1; }
done
for file in pageone libpageone_agent.so libpageone_template.so qemu-system-x86_64-pageone; do
    [ -e "$bin/$file" ] || { echo "test-libvirt: $bin/$file is missing: run 'cargo build'" >&2; exit 1; }
done
work=$(mktemp -d /tmp/pageone-libvirt.XXXXXX)
trap 'rm -rf "$work"' EXIT

# The host's initramfs.
mkdir -p "$work"/image/{bin,proc,sys,dev,system,modules}
cp "$(command -v busybox)" "$work/image/bin/"
cp guest/libvirt-host/init "$work/image/init"
chmod 755 "$work/image/init"
# shellcheck source=scripts/lib/guest-modules.sh
. scripts/lib/guest-modules.sh
guest_modules "$kernel" "$work/image/modules" virtio_pci virtio_blk ext4 9pnet_virtio 9p kvm-amd
(cd "$work/image" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) > "$work/initrd"

# What the host sees of this machine.
share=$work/share
# shellcheck source=scripts/lib/libvirt-share.sh
. scripts/lib/libvirt-share.sh
libvirt_share "$inside" "$bin"
cp packaging/pageonefs.conf "$share/"
version=$(ls "$kernel/lib/modules")
[ ! -e "$cache/headers/$version/complete" ] || scripts/lib/module.sh pageonefs "$version" "$share"
# Guests with the recycler's module, of the kernel that libvirt's guests have.
archive=$(scripts/lib/ppr-archive.sh 2> /dev/null | awk '$1 ~ /\/6\.1\./ { print $2; exit }') || true
[ -z "$archive" ] || cp "$archive" "$share/guest/ppr.cpio"

# shellcheck source=scripts/lib/emulator.sh
. scripts/lib/emulator.sh
emulator "$work"
# One processor: with two the emulated host has crashed in code that the kernel patches. The disk is a copy that goes.
TMPDIR=$work timeout "${PAGEONE_LIBVIRT_TIMEOUT:-3600}" "${emulator[@]}" -smp 1 -m 6144 -kernel "$kernel/vmlinuz" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off systemd.show_status=0 \
systemd.default_timeout_start_sec=600s systemd.mask=serial-getty@ttyS0.service $append" \
    -drive "file=$image,if=none,id=disk,format=raw,snapshot=on" -device virtio-blk-pci,drive=disk \
    -fsdev "local,id=test,path=$share,security_model=none,readonly=on" -device virtio-9p-pci,fsdev=test,mount_tag=test \
    -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" < /dev/null &
emulated $! "$work" LIBVIRT-HOST-ENDED
