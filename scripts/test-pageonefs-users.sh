#!/bin/bash
# Real users of files of the host's file system, host/linux/pageonefs, in an emulated host with KVM (scripts/kvm-host.sh): two
# equal guests whose RAM lies in it (QEMU's memory-backend-file, share=on), with a directory by virtiofsd and a disk by
# qemu-storage-daemon, which write into that RAM, while what is equal is merged. The guests check memory, files and disk.
# Without virtiofsd or qemu-storage-daemon it says SKIPPED, and tests the rest.
#
#   scripts/test-pageonefs-users.sh [SECONDS]       that the guests work (120)
#
# `scripts/deps.sh module` installs what this needs. Exit: 0 all passed; 1 otherwise, also when a kernel complained.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/kernel-guest.sh
. scripts/kernel-guest.sh
# shellcheck source=scripts/pageonefs-guest.sh
. scripts/pageonefs-guest.sh
# shellcheck source=scripts/guest-modules.sh
. scripts/guest-modules.sh
version=$(ls "$cache/kvm-host/lib/modules" 2>/dev/null) && [ -e "$cache/headers/$version/complete" ] ||
    fail "the emulated host is missing: run 'scripts/deps.sh module'"
work=$(mktemp -d "${TMPDIR:-/var/tmp}/test-users.XXXXXX")
scripts/module.sh pageonefs "$version" "$work"
compile "$work/pageonefs-merge" merger pages
mkdir -p "$work/root"/{bin,proc,sys,dev,modules}
compile "$work/root/pageonefs-guest" guest pages
guest_modules "$cache/kvm-host" "$work/root/modules" virtio_blk
cp "$(command -v busybox)" "$work/root/bin/busybox"
cp "$sources/guest-init" "$work/root/init"
chmod 755 "$work/root/init"
initrd "$work/root"
scripts/kvm-host.sh scripts/test-pageonefs-users-inside.sh WORK="$work" KERNEL="$cache/kvm-host/vmlinuz" DURATION="${1:-120}" |
    tee "$work/said"
if grep '^kernel: ' "$work/said" >&2; then fail "the kernel complained"; fi
