#!/bin/bash
# The test of scripts/test-pageonefs-users.sh, on a machine that may load the module. Its variables: WORK (the module, the programs
# and the guests' file system), KERNEL (the guests'), DURATION.
set -uo pipefail
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
