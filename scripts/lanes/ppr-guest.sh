#!/bin/bash
# Tries the recycler's kernel module in a real guest: memory-hungry, checksummed work while a host takes pages back, the module
# loaded and unloaded under load.
#
#   scripts/lanes/ppr-guest.sh KERNEL-VERSION BIN-DIR [SECONDS [CYCLES [MIB [HOST-OPTION...]]]]
#
# BIN-DIR holds ppr-host and ppr-load (static). The guest works for SECONDS (default 60) with the module loaded, then CYCLES (default
# 50) times the module is unloaded and loaded while the work goes on. Exit: 0 no byte was wrong, and no allocation was missed.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
version=$1 bin=$2 seconds=${3:-60} cycles=${4:-50} mib=${5:-512}
shift $(($# < 5 ? $# : 5))
fail() { echo "ppr-guest: $*" >&2; exit 1; }
work=$(mktemp -d /dev/shm/ppr-guest.XXXXXX)
pids=()
cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

scripts/lib/module.sh ppr "$version" "$work/module"
root=$work/root
mkdir -p "$root"/{bin,proc,sys,dev,tmp}
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$work/module/ppr.ko" "$root/ppr.ko"
cp "$bin/ppr-load" "$root/ppr-load"
strip "$root/ppr-load"
cat > "$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev; mount -t debugfs debugfs /sys/kernel/debug
mount -t tmpfs -o size=80% tmpfs /tmp
stats() { tr '\n' ' ' < /sys/kernel/debug/ppr/stats; echo; }
echo "PPR-BOOTED $(uname -r)"
PPR_MIB=$(awk '/MemAvailable/ { print int($2 * 3 / 4096) }' /proc/meminfo)
if insmod /ppr.ko check=1 cycles=1; then
    stats
    # Processors come and go meanwhile.
    while [ ! -e /patching ]; do
        echo 0 > /sys/devices/system/cpu/cpu1/online && echo 1 > /sys/devices/system/cpu/cpu1/online || echo "PPR-FAILED cpu"
        sleep 4
    done &
    toggler=$!
    /ppr-load $PPR_SECONDS $PPR_MIB
    sleep 3
    stats
    grep -E 'compact_(stall|success|fail|migrate_scanned|isolated)' /proc/vmstat | tr '\n' ' '; echo
    # QEMU 7.2 and 8.0 may run a stale int3 when one processor executes what another patches, as tracepoints are: from here on there is one.
    touch /patching
    wait $toggler
    echo 0 > /sys/devices/system/cpu/cpu1/online
    n=0
    while [ ! -e /stop ]; do /ppr-load 15 $PPR_MIB || echo "PPR-FAILED load"; done &
    load=$!
    missed=0
    while [ $n -lt $PPR_CYCLES ]; do
        sleep 1
        missed=$((missed + $(sed -n 's/^missed //p' /sys/kernel/debug/ppr/stats)))
        rmmod ppr || { echo "PPR-FAILED rmmod $n"; break; }
        insmod /ppr.ko check=1 || { echo "PPR-FAILED insmod $n"; break; }
        n=$((n + 1))
    done
    echo "PPR-CYCLES $n missed=$missed"
    touch /stop
    wait $load
    stats
    rmmod ppr
fi
dmesg | grep -iE 'ppr:|BUG|WARN|Oops|stall|hung|panic' | tail -n 12
echo PPR-DONE
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) > "$work/initramfs"
"$bin/ppr-host" "$work/pool" "$work/ram" "$mib" "$@" > "$work/host.log" 2>&1 &
pids+=($!)
for _ in $(seq 50); do pool=$(sed -n 's/^POOL //p' "$work/host.log") && [ -n "$pool" ] && break; sleep 0.1; done
[ -n "$pool" ] || fail "the host did not start: $(cat "$work/host.log")"
# A guest that loses a page may hang.
timeout $((seconds * 3 + cycles * 15 + 300)) qemu-system-x86_64 -accel tcg,thread=multi -cpu qemu64,-cx16 -smp 2 -m "$mib" -nographic -no-reboot -nodefaults -serial file:"$work/console" \
    -machine memory-backend=ram \
    -object "memory-backend-file,id=ram,size=${mib}M,mem-path=$work/ram,share=on" \
    -object "memory-backend-file,id=pool,size=$pool,mem-path=$work/pool,share=on" -device ivshmem-plain,memdev=pool \
    -kernel "$cache/kernels/$version/vmlinuz" -initrd "$work/initramfs" \
    -append "console=ttyS0 panic=-1 quiet no_timer_check mitigations=off PPR_SECONDS=$seconds PPR_CYCLES=$cycles" &
qemu=$!
pids+=("$qemu")
wait "$qemu" || true
grep -a 'PPR-\|compact_\|ppr:\|marked\|BUG\|Oops\|WARN\|stall' "$work/console" || tail -n 20 "$work/console"
tail -n 1 "$work/host.log"
[ "$(grep -ac 'PPR-LOAD PASS' "$work/console")" -ge 2 ] && ! grep -aq 'PPR-FAILED\|PPR-LOAD FAILED\|CORRUPT\|BUG:\|Oops\|WARNING:' "$work/console" &&
    grep -aq "PPR-CYCLES $cycles missed=0" "$work/console" || fail "failed on $version: $(tail -n 30 "$work/console")"
echo "ppr-guest: $version passed"
