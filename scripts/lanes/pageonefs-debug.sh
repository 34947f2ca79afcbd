#!/bin/bash
# The host's file system, host/linux/pageonefs, in guests whose kernels check themselves (scripts/lib/debug-kernel.sh builds them).
# Needs no hardware virtualisation.
#
#   scripts/lane test-pageonefs-debug [6.12|6.1 [kasan]]     both kernels if none is named
#
# All its tests; both fuzzers, and again where allocations fail; unloading; and what has leaked. The kernel has nothing to say. Then
# once more for each guard that is off, which a fuzzer must notice, or the test of its hazard. Settings:
#   PAGEONE_FUZZ_SECONDS    how long each fuzzer runs, each time (300; 0: not at all, nor with guards off)
#   PAGEONE_FAULTS          each N-th allocation fails (400)
#
#   scripts/lane fuzz-pageonefs [6.12|6.1 [kasan]]
#
# Programs do what they can, while pages merge, and a model knows each byte (host/linux/pageonefs/test/fuzz.c); and tenants do, while
# accounts say who pays for what (fuzz-accounts.c). Each for half of the time, and that half with failing allocations. Settings:
# FUZZ_SECONDS (3600), FUZZ_SEED (the clock's; it is printed), FUZZ_FAULTS (400; N: each N-th allocation fails; 0: none), FUZZ_ONLY
# (fuzz or accounts), and for a look at one guard FUZZ_OPTIONS, parameters of a module that is built with them (no_compare=1).
#
#   scripts/lane soak-pageonefs [6.12|6.1 [kasan]]
#
# Programs write and check memory that is merged, and are killed; mounts come and go; memory is short; the module is unloaded and
# loaded. No byte is wrong, and no memory is lost (host/linux/pageonefs/test/soak). Settings: SOAK_SECONDS (3600), FUZZ_SEED.
#
# The kernels are preempted wherever they can be (CONFIG_PREEMPT). PROCESSORS (8) says how many a guest of a fuzzer has.
#
# Exit: 0 all passed, or skipped; 1 otherwise, also when a guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/lib/kernel-guest.sh
. scripts/lib/kernel-guest.sh
# shellcheck source=scripts/lib/pageonefs-guest.sh
. scripts/lib/pageonefs-guest.sh
what=${1:?tests, fuzz or soak}
shift
# one SERIES [kasan]: sets `image`, `build` and `name` of a kernel.
one() {
    image=$(scripts/lib/debug-kernel.sh "$1" ${2:+"$2"}) || exit 1
    build=$(readlink -f "${image%/*}/build")
    name="Linux $(basename "${image%/vmlinuz}")${2:+ with $2}"
}
if [ "$what" = fuzz ]; then
    seconds=${FUZZ_SECONDS:-3600} faults=${FUZZ_FAULTS:-400} fuzz=1 accounts=1 processors=${PROCESSORS:-8}
    case ${FUZZ_ONLY:-} in fuzz) accounts=0 ;; accounts) fuzz=0 ;; esac
    each=$((seconds / (fuzz + accounts) / (faults > 0 ? 2 : 1)))
    one "${1:-6.12}" ${2:+"$2"}
    pack_guest "$build" "${FUZZ_OPTIONS:+y}"
    boot "$name" "$image" $((900 + 4 * seconds)) \
        "$checks TESTS=none POISON=1 FUZZ=$((fuzz * each)) ACCOUNTS=$((accounts * each)) SEED=${FUZZ_SEED:-} FAULTS=$faults OPTIONS=${FUZZ_OPTIONS:-}"
    exit
elif [ "$what" = soak ]; then
    seconds=${SOAK_SECONDS:-3600}
    one "${1:-6.12}" ${2:+"$2"}
    pack_guest "$build"
    boot "$name" "$image" $((1200 + 2 * seconds)) "$checks TESTS=none SOAK=$seconds SEED=${FUZZ_SEED:-}"
    exit
fi
fuzz=${PAGEONE_FUZZ_SECONDS:-300}

kmem_tests
failed=0
for series in ${1:-6.12 6.1}; do
    if [ ! -e "/usr/src/linux-source-$series.tar.xz" ]; then
        echo "$lane: SKIPPED Linux $series: its source is missing: 'apt-get install linux-source-$series'"
        continue
    fi
    one "$series" ${2:+"$2"}
    pack_guest "$build"
    boot "$name" "$image" $((2400 + 12 * fuzz)) "$checks ROUNDS=10 POISON=1 FUZZ=$fuzz ACCOUNTS=$fuzz FAULTS=${PAGEONE_FAULTS:-400}" || failed=1
    if [ "$fuzz" -eq 0 ]; then continue; fi
    pack_guest "$build" y
    for guard in no_pin_check=1 no_handshake=1,no_pin_bits=1,slow=300 no_compare=1; do
        boot "$name, $guard" "$image" $((600 + 2 * fuzz)) "${checks/LEAKS=1/} TESTS=none OPTIONS=$guard MUST_FAIL=1 FUZZ=$fuzz" || failed=1
    done
    # What a test of its own shows.
    for off in no_cut_bits=1,slow=3000:dirty_cuts no_punch_check=1:punch_pins no_huge_bits=1:huge_mapped; do
        boot "$name, ${off%:*}" "$image" 900 "${checks/LEAKS=1/} TESTS=${off#*:} OPTIONS=${off%:*} MUST_FAIL=1" || failed=1
    done
done
exit "$failed"
