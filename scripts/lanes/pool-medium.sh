#!/bin/bash
# A pool on devices that fail, in a QEMU guest of Debian's 6.12 kernel: dm-log-writes, done again up to each flush, and dm-flakey,
# under ext4, XFS and btrfs. Needs no hardware virtualisation.
#
#   scripts/lanes/pool-medium.sh [BIN-DIR [NAME=VALUE...]]
#
# BIN-DIR holds the built programs (default: the debug directory of the cargo target directory). Settings, of
# tests/src/bin/medium: fs=ext4,xfs,btrfs steps=40 every=1 rounds=24 seed=1. PAGEONE_MEDIUM_TIMEOUT: seconds, 1800 if unset.
# Exit: 0 nothing was lost; 1 otherwise, also when the guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/lib/kernel-guest.sh
. scripts/lib/kernel-guest.sh
# shellcheck source=scripts/lib/guest-modules.sh
. scripts/lib/guest-modules.sh
program=${1:-${CARGO_TARGET_DIR:-target}/debug}/pageone-pool-medium
kernel=$cache/kvm-host root=$work/root
[ -f "$program" ] || fail "$program is missing: run 'cargo build -p e2e'"
[ -e "$kernel/complete" ] || fail "$kernel is missing: run 'scripts/deps.sh medium'"
mkdir -p "$root"/{bin,proc,sys,dev,tmp,modules,pageone}
tools=()
for name in dmsetup mkfs.ext4 mkfs.xfs mkfs.btrfs; do
    tools+=("$(PATH=$PATH:/usr/sbin:/sbin command -v "$name")") || fail "there is no $name: run 'scripts/deps.sh medium'"
done
cp "$(command -v busybox)" "$root/bin/busybox"
cp -L "${tools[@]}" "$root/bin/"
cp "$program" "$root/pageone/"
strip "$root"/pageone/*
printf '%s\n' "${@:2}" > "$root/pageone/settings"
printf '%s\n' "$unwell" > "$root/pageone/unwell"
cp guest/medium/init "$root/init"
chmod 755 "$root/init"
guest_modules "$kernel" "$root/modules" loop dm-mod dm-log-writes dm-flakey ext4 xfs btrfs
# The emulated processor has no such instruction.
rm -f "$root"/modules/*-crc32c-intel.ko
libraries "$root" "$program" "${tools[@]}"
initrd "$root"
boot "Linux $(ls "$kernel/lib/modules")" "$kernel/vmlinuz" "${PAGEONE_MEDIUM_TIMEOUT:-1800}" ''
