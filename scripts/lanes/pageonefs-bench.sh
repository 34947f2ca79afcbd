#!/bin/bash
# Compares the host's file system, host/linux/pageonefs, with KSM, in one boot of a guest of Debian's 6.12 cloud kernel: instructions
# for a page, counted by QEMU (-icount), and the ratios that the file system is to reach.
#
#   scripts/lanes/pageonefs-bench.sh [time] [PAGES-OF-A-PROCESS [PROCESSES [KIND...]]]   default: 12800 4 random clones zero
#
# time: nanoseconds instead of instructions, with two processors, and how much faster two threads merge than one. The emulator's
# time says nothing about a processor's; the ratios are of one boot, on a machine that has two processors to spare.
#
# Exit: 0 it was measured; 1 something failed, or a page was wrong.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/lib/kernel-guest.sh
. scripts/lib/kernel-guest.sh
unit=instructions
if [ "${1:-}" = time ]; then unit=nanoseconds; shift; fi
pages=${1:-12800} processes=${2:-4}
shift $(($# < 2 ? $# : 2))
kinds=${*:-random clones zero}
kernel=$(ls -d "$cache"/kernels/6.12.* 2>/dev/null | head -n 1) || true
[ -n "$kernel" ] || fail "no kernel of 6.12 in $cache/kernels: 'scripts/deps.sh ppr' fetches it"
root=$work/root
sources=host/linux/pageonefs/test
mkdir -p "$root"/{bin,proc,sys,dev,tmp,mnt}
cp "$(command -v busybox)" "$root/bin/busybox"
scripts/lib/module.sh pageonefs "$(basename "$kernel")" "$root"
gcc -std=gnu11 -O2 -Wall -Wextra -Werror -static -o "$root/bench" "$sources"/{bench,pages}.c
gcc -std=gnu11 -O2 -Wall -Wextra -Werror -static -pthread -o "$root/bench-threads" "$sources"/{bench-threads,pages}.c
gcc -std=gnu11 -O2 -Wall -Wextra -Werror -static -o "$root/bench-huge" "$sources"/{bench-huge,pages}.c
cat > "$root/init" << INIT
#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
dmesg -n 1
insmod /pageonefs.ko && mount -t pageonefs -o size=90%,mode=755 none /mnt
for kind in $kinds; do
    for who in ksm pageonefs; do /bench \$who \$kind $pages $processes || echo BENCH-FAILED; done
done
/bench-huge || echo BENCH-FAILED
if [ $unit = nanoseconds ]; then /bench-threads $pages 11 || echo BENCH-FAILED; fi
dmesg | grep -E "$unwell" | sed 's/^/kernel: /'
echo BENCH-ENDED
reboot -f
INIT
chmod 755 "$root/init"
initrd "$root"
# One processor, whose clock is the count of its instructions. slab_nomerge: slabs are counted by name.
machine=(-accel tcg,thread=single -icount shift=0,sleep=off -smp 1)
if [ $unit = nanoseconds ]; then machine=(-accel tcg,thread=multi -smp 2); fi
timeout "${PAGEONEFS_BENCH_TIMEOUT:-1800}" qemu-system-x86_64 "${machine[@]}" \
    -cpu qemu64,-cx16,+xsave,+xsaveopt,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2 -m $((pages * processes / 256 * 5 / 4 + 700)) -kernel "$kernel/vmlinuz" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off slab_nomerge" -nodefaults -no-user-config -no-reboot \
    -display none -serial stdio -monitor none < /dev/null | tr -d '\r' | tee "$work/console" | grep -v '^COST' || true
awk -v unit="$unit" '
    $1 == "COST" { v[$3, $4, $2] = $5; if (!(($3, $4) in seen)) { seen[$3, $4] = 1; order[++n] = $3 " " $4 } }
    END {
        printf "%-8s %-18s %10s %10s %8s  %s\n", "contents", unit, "KSM", "pageonefs", "ratio", "to reach"
        for (i = 1; i <= n; i++) {
            split(order[i], k, " ")
            a = v[k[1], k[2], "ksm"]; b = v[k[1], k[2], "pageonefs"]; want = ""
            if (k[2] == "merge") want = k[1] == "random" ? "0.30" : k[1] == "clones" ? "0.10" : k[1] == "zero" ? "0.20" : ""
            if (k[2] == "write") want = "1.10"
            if (k[2] == "first-read") want = "at most 300"
            if (k[2] == "harvest-clean") want = "at most 1"
            if (unit == "nanoseconds") want = k[2] == "merge" && k[1] == "random" ? "0.35" : ""
            if (k[2] == "kernel-bytes") want = "at most 24, with the daemon"
            printf "%-8s %-18s %10s %10s %8s  %s\n", k[1], k[2], a, b, (a > 0 && b != "") ? sprintf("%.2f", b / a) : "", want
        }
    }' "$work/console"
grep -q BENCH-ENDED "$work/console" && ! grep -q 'BENCH-FAILED\|^kernel:' "$work/console" || fail "the bench failed"
