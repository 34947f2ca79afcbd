#!/bin/bash
# Guests of libvirt, in an emulated host: Debian 12 or 13 as its packages leave it, Linux 6.12, AppArmor enforcing, KVM. What
# packaging/libvirt has is installed there, two tenants' guests run by virsh and merge, what libvirt does with guests is done to
# merged ones, a rule is taken away, and all is removed. Nothing is installed here.
#
#   scripts/test-libvirt.sh [RELEASE]     bookworm (Debian 12, without an argument) or trixie (Debian 13)
#
# Settings:
#   PAGEONE_LIBVIRT_TIMEOUT   seconds (3600)
#   PAGEONE_LIBVIRT_STEPS     some of the steps, by name: see scripts/test-libvirt-inside.sh
# Exit: 0 every step passed; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
bin=$(realpath "${CARGO_TARGET_DIR:-target}/debug")
release=${1:-bookworm}
kernel=$cache/kvm-host image=$cache/libvirt-$release/root.img
for file in "$kernel/complete" "$image"; do
    [ -e "$file" ] || { echo "test-libvirt: $file is missing: run 'scripts/deps.sh libvirt'" >&2; exit 1; }
done
for file in pageone libpageone_agent.so qemu-system-x86_64-pageone; do
    [ -e "$bin/$file" ] || { echo "test-libvirt: $bin/$file is missing: run 'cargo build'" >&2; exit 1; }
done
work=$(mktemp -d /tmp/pageone-libvirt.XXXXXX)
trap 'rm -rf "$work"' EXIT

# The host's initramfs.
mkdir -p "$work"/image/{bin,proc,sys,dev,system,modules}
cp "$(command -v busybox)" "$work/image/bin/"
cp guest/libvirt-host/init "$work/image/init"
chmod 755 "$work/image/init"
# shellcheck source=scripts/guest-modules.sh
. scripts/guest-modules.sh
guest_modules "$kernel" "$work/image/modules" virtio_pci virtio_blk ext4 9pnet_virtio 9p kvm-amd
(cd "$work/image" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) > "$work/initrd"

# The guests': the demo's, with 16 MiB of this machine's libraries. Each guest has the same.
guest=$work/guest
mkdir -p "$guest"/{bin,data/00,data/01,ref,modules}
cp "$(command -v busybox)" "$guest/bin/"
cp guest/demo/init "$guest/init"
chmod 755 "$guest/init"
cp "$cache"/kernels/6.1.*/modules/virtio*.ko "$guest/modules/"
rm -f "$guest/modules/virtio_net.ko"
bytes=0 number=0
for file in /usr/lib/x86_64-linux-gnu/*.so.*; do
    [ -f "$file" ] && [ ! -L "$file" ] || continue
    size=$(stat -c %s "$file")
    [ "$size" -gt 65536 ] && [ "$size" -lt 4000000 ] || continue
    cp "$file" "$guest/data/0$((number % 2))/$number"
    bytes=$((bytes + size)) number=$((number + 1))
    [ "$bytes" -lt $((16 << 20)) ] || break
done
for slice in 00 01; do (cd "$guest/data" && md5sum "$slice"/* > "$guest/ref/$slice"); done
cat "$guest"/ref/0? > "$guest/ref/all"

# What the host sees of this machine.
share=$work/share
mkdir -p "$share/guest" "$share/packages"
cp "$cache"/kernels/6.1.*/vmlinuz "$share/guest/"
(cd "$guest" && find . | sort | busybox cpio -o -H newc 2>/dev/null) > "$share/guest/initrd"
cp scripts/test-libvirt-inside.sh "$share/inside.sh"
# What users install: packages, of the programs here.
DEB_OUT=$work/debian packaging/deb.sh "$bin" > "$work/deb.log" 2>&1 || { cat "$work/deb.log" >&2; exit 1; }
cp "$work"/debian/{pageone,libpageone-agent,pageone-libvirt}_*.deb "$share/packages/"
printf 'export %s=%q\n' STEPS "${PAGEONE_LIBVIRT_STEPS:-}" > "$share/variables"

# shellcheck source=scripts/emulator.sh
. scripts/emulator.sh
emulator "$work"
# One processor: with two the emulated host has crashed in code that the kernel patches. The disk is a copy that goes.
TMPDIR=$work timeout "${PAGEONE_LIBVIRT_TIMEOUT:-3600}" "${emulator[@]}" -smp 1 -m 6144 -kernel "$kernel/vmlinuz" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off systemd.show_status=0 \
systemd.default_timeout_start_sec=600s systemd.mask=serial-getty@ttyS0.service" \
    -drive "file=$image,if=none,id=disk,format=raw,snapshot=on" -device virtio-blk-pci,drive=disk \
    -fsdev "local,id=test,path=$share,security_model=none,readonly=on" -device virtio-9p-pci,fsdev=test,mount_tag=test \
    -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" < /dev/null &
emulated $! "$work" LIBVIRT-HOST-ENDED
