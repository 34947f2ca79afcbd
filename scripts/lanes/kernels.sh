#!/bin/bash
# The hazard tests inside QEMU guests of other kernels. Needs no hardware virtualisation. Tests may be chosen by parts of their names.
#
#   scripts/lane test-kernels [TEST-NAME...]
#
# In guests of Debian's 6.12 cloud kernel, and of any other kernel of the cache that is 6.7 or later: the supported range is tested,
# not claimed. On an older one, Debian's 6.1, the program must say that it is too old. Takes some minutes.
#
#   scripts/lane test-debug-kernel [TEST-NAME...]
#
# In a guest of a kernel that checks itself (scripts/lib/debug-kernel.sh builds it), and then the behaviour fuzzer: no test fails, and
# the kernel has nothing to say. Frames are poisoned there as by broken memory. Settings:
#   PAGEONE_FUZZ_SECONDS    how long the fuzzer runs, first as it is, then with failing allocations (300; 0: not at all)
#   PAGEONE_FUZZ_SEED       its seed, as a finding names it (the clock's)
#   PAGEONE_FUZZ_WITHOUT    operations that it leaves out
#   PAGEONE_FAULTS          0: no faults; N: each N-th allocation of the kernel fails, for clients and the daemon of some
#                           tests that then run once more, and for the daemon and agents of the fuzzer (400)
#   PAGEONE_DEADLINE        seconds for one test; it is then ended, and the others run (420)
#
# PAGEONE_KERNELS_TIMEOUT: seconds for one guest (2400; 5400 for the kernel that checks itself).
# Exit: 0 all tests passed on every kernel; 1 otherwise, also when a guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/lib/kernel-guest.sh
. scripts/lib/kernel-guest.sh
what=${1:?tests or debug}
shift
if [ "$what" = debug ]; then
    image=$(scripts/lib/debug-kernel.sh) || exit 1
    pack "${CARGO_TARGET_DIR:-target}/debug" "$@"

    # This kernel has no ACPI: its NUMA nodes are fake ones. SLUB checks what it frees.
    parameters='numa=fake=2 tsc=reliable hung_task_panic=1 slab_debug=FZ page_poison=1'
    # Slabs of two pages at first: where they cannot be had, the kernel tries one. So no mapping fails for its slab (see init).
    parameters+=' slab_min_order=1'
    # Tests of files that do not answer keep threads of the daemon waiting on purpose, for minutes on a busy machine.
    parameters+=' sysctl.kernel.hung_task_timeout_secs=900'
    parameters+=" PATIENCE=6 DEADLINE=${PAGEONE_DEADLINE:-420} POISON=1"
    parameters+=" FUZZ=${PAGEONE_FUZZ_SECONDS:-300} SEED=${PAGEONE_FUZZ_SEED:-} FAULTS=${PAGEONE_FAULTS:-400}"
    parameters+=" WITHOUT=${PAGEONE_FUZZ_WITHOUT:-}"
    boot "Linux $(basename "${image%/vmlinuz}")" "$image" "${PAGEONE_KERNELS_TIMEOUT:-5400}" "$parameters" || exit 1
    exit
fi

pack "${CARGO_TARGET_DIR:-target}/debug" "$@"

failed=0 ran=0
for kernel in "$cache"/kernels/*/vmlinuz; do
    [ -e "$kernel" ] || continue
    version=$(basename "$(dirname "$kernel")")
    if [ "$(printf '%s\n' 6.7 "$version" | sort -V | head -n 1)" = 6.7 ]; then ran=$((ran + 1)); fi
    boot "Linux $version" "$kernel" "${PAGEONE_KERNELS_TIMEOUT:-2400}" 'PATIENCE=8 POISON=1' || failed=1
done
[ "$ran" -gt 0 ] || fail "no kernel of 6.7 or later in $cache/kernels: 'scripts/deps.sh kernels' fetches one"
exit "$failed"
