#!/bin/bash
# Real users of files of the host's file system, host/linux/pageonefs, in an emulated host with KVM (scripts/lib/kvm-host.sh): two
# equal guests whose RAM lies in it (QEMU's memory-backend-file, share=on), with a directory by virtiofsd and a disk by
# qemu-storage-daemon, which write into that RAM, while what is equal is merged. The guests check memory, files and disk.
# Without virtiofsd or qemu-storage-daemon it says SKIPPED, and tests the rest.
#
#   scripts/lanes/pageonefs-users.sh [SECONDS]       that the guests work (120)
#
# `scripts/deps.sh module` installs what this needs. Exit: 0 all passed; 1 otherwise, also when a kernel complained.
set -uo pipefail

# ---- on this machine -------------------------------------------------------------------------------
if [ -z "${INSIDE:-}" ]; then
    set -e
    cd "$(dirname "$0")/../.."
    # shellcheck source=scripts/lib/kernel-guest.sh
    . scripts/lib/kernel-guest.sh
    # shellcheck source=scripts/lib/pageonefs-guest.sh
    . scripts/lib/pageonefs-guest.sh
    # shellcheck source=scripts/lib/guest-modules.sh
    . scripts/lib/guest-modules.sh
    version=$(ls "$cache/kvm-host/lib/modules" 2>/dev/null) && [ -e "$cache/headers/$version/complete" ] ||
        fail "the emulated host is missing: run 'scripts/deps.sh module'"
    work=$(mktemp -d "${TMPDIR:-/var/tmp}/test-users.XXXXXX")
    scripts/lib/module.sh pageonefs "$version" "$work"
    compile "$work/pageonefs-merge" merger pages
    mkdir -p "$work/root"/{bin,proc,sys,dev,modules}
    compile "$work/root/pageonefs-guest" guest pages
    guest_modules "$cache/kvm-host" "$work/root/modules" virtio_blk
    cp "$(command -v busybox)" "$work/root/bin/busybox"
    cp "$sources/guest-init" "$work/root/init"
    chmod 755 "$work/root/init"
    initrd "$work/root"
    scripts/lib/kvm-host.sh scripts/lanes/pageonefs-users.sh INSIDE=1 WORK="$work" KERNEL="$cache/kvm-host/vmlinuz" DURATION="${1:-120}" |
        tee "$work/said"
    if grep '^kernel: ' "$work/said" >&2; then fail "the kernel complained"; fi
    exit
fi

# ---- on the machine that may load the module -------------------------------------------------------
# Variables: WORK (the module, the programs and the guests' file system), KERNEL (the guests'), DURATION.
work=$(mktemp -d)
failed=0
wrong() { echo "test-pageonefs-users: FAILED: $*"; failed=1; }
insmod "$WORK/pageonefs.ko" && mount -t pageonefs -o domain=users,huge=advise,size=80%,mode=0755 none /mnt || exit 1
virtiofsd=
for program in /usr/libexec/virtiofsd /usr/lib/qemu/virtiofsd; do [ ! -x "$program" ] || { virtiofsd=$program; break; }; done
[ -n "$virtiofsd" ] || echo "test-pageonefs-users: SKIPPED virtiofsd: it is not installed (Debian: package qemu-system-common or virtiofsd)"
storage=$(command -v qemu-storage-daemon) ||
    echo "test-pageonefs-users: SKIPPED vhost-user-blk: there is no qemu-storage-daemon (Debian: package qemu-system-common)"

# wait_for FILE: at most a minute.
wait_for() { for _ in $(seq 600); do [ ! -e "$1" ] || return 0; sleep 0.1; done; wrong "$1 does not come"; }

# How many mappings of 2 MiB KVM has of guests' memory, at most.
count_huge() {
    local now
    now=$(cat /sys/kernel/debug/kvm/pages_2m)
    [ "$now" -le "$huge" ] || huge=$now
}

guests=() backs=()
for k in 1 2; do
    devices=()
    if [ -n "$virtiofsd" ]; then
        mkdir -p "$work/share$k"
        touch "$work/share$k/here"
        case $virtiofsd in
            /usr/libexec/*) "$virtiofsd" --socket-path="$work/fs$k" --shared-dir "$work/share$k" --sandbox none > "$work/fs$k.log" 2>&1 & ;;
            *) "$virtiofsd" --socket-path="$work/fs$k" -o source="$work/share$k" -o sandbox=chroot > "$work/fs$k.log" 2>&1 & ;;
        esac
        backs+=($!)
        wait_for "$work/fs$k"
        devices+=(-chardev "socket,id=fs,path=$work/fs$k" -device vhost-user-fs-pci,chardev=fs,tag=shared)
    fi
    if [ -n "$storage" ]; then
        truncate -s 16M "$work/disk$k"
        "$storage" --blockdev "driver=file,node-name=disk,filename=$work/disk$k" \
            --export "type=vhost-user-blk,id=disk,node-name=disk,writable=on,addr.type=unix,addr.path=$work/blk$k" > "$work/blk$k.log" 2>&1 &
        backs+=($!)
        wait_for "$work/blk$k"
        devices+=(-chardev "socket,id=blk,path=$work/blk$k" -device vhost-user-blk-pci,chardev=blk)
    fi
    qemu-system-x86_64 -accel kvm -m 256 -machine pc,memory-backend=ram \
        -object "memory-backend-file,id=ram,size=256M,mem-path=/mnt,share=on,align=2M" -kernel "$KERNEL" -initrd "$WORK/initrd" \
        -append "console=ttyS0 quiet panic=-1 DURATION=$DURATION NUMBER=$k" \
        -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console$k" "${devices[@]}" < /dev/null &
    guests+=($!)
done
"$WORK/pageonefs-merge" > "$work/merger" 2>&1 &
merger=$!
mount -t debugfs none /sys/kernel/debug 2>/dev/null
huge=0
for guest in "${guests[@]}"; do
    # A guest that hangs is ended.
    for _ in $(seq $((DURATION + 900))); do kill -0 "$guest" 2>/dev/null || break; count_huge; sleep 1; done
    if kill -9 "$guest" 2>/dev/null; then wrong "a guest was not done"; fi
done
kill -TERM "$merger"
wait "$merger" || wrong "the merger"
cat "$work/merger"
for k in 1 2; do
    tr -d '\r' < "$work/console$k" | grep '^GUEST\|FAILED\|panic'
    grep -q "^GUEST $k: .* 0 wrong" "$work/console$k" || wrong "guest $k"
    if grep -q GUEST-KERNEL "$work/console$k"; then wrong "the kernel of guest $k"; fi
    if [ -n "$virtiofsd" ] && grep -q ' 0 parts of files' "$work/console$k"; then wrong "guest $k had no shared directory"; cat "$work/fs$k.log"; fi
    if [ -n "$storage" ] && grep -q ' 0 parts of the disk' "$work/console$k"; then wrong "guest $k had no disk"; cat "$work/blk$k.log"; fi
done
merged=$(sed -n 's/^MERGER .*, \([0-9]*\) at most.*/\1/p' "$work/merger")
[ "${merged:-0}" -gt 10000 ] || wrong "only ${merged:-0} pages were merged"
echo "test-pageonefs-users: $huge mappings of 2 MiB at most"
[ "$huge" -gt 0 ] || wrong "no memory of guests was mapped by 2 MiB"
for back in "${backs[@]}"; do kill "$back" 2>/dev/null; wait "$back" 2>/dev/null; done
umount /mnt && rmmod pageonefs || wrong "the module does not go: something uses it still"
[ "$failed" = 1 ] || echo "test-pageonefs-users: passed"
rm -rf "$work"
exit "$failed"
