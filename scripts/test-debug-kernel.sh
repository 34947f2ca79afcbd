#!/bin/bash
# Runs the hazard tests, and then the behaviour fuzzer, inside a QEMU guest of a kernel that checks itself
# (scripts/debug-kernel.sh builds it): no test fails, and the kernel has nothing to say. Frames are poisoned there as by
# broken memory.
#
#   scripts/test-debug-kernel.sh [BIN-DIR [TEST-NAME...]]
#
# BIN-DIR holds the built programs (default: the debug directory of the cargo target directory). Tests may be chosen by
# parts of their names. Settings:
#   PAGEONE_FUZZ_SECONDS    how long the fuzzer runs, first as it is, then with failing allocations (300; 0: not at all)
#   PAGEONE_FUZZ_SEED       its seed, as a finding names it (the clock's)
#   PAGEONE_FUZZ_WITHOUT    operations that it leaves out
#   PAGEONE_FAULTS          0: no faults; N: each N-th allocation of the kernel fails, for clients and the daemon of some
#                           tests that then run once more, and for the daemon and agents of the fuzzer (400)
#   PAGEONE_DEADLINE        seconds for one test; it is then ended, and the others run (420)
#   PAGEONE_KERNELS_TIMEOUT seconds for one guest (5400)
# Exit: 0 all tests passed; 1 otherwise, also when the guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/kernel-guest.sh
. scripts/kernel-guest.sh
image=$(scripts/debug-kernel.sh) || exit 1
pack "${1:-${CARGO_TARGET_DIR:-target}/debug}" "${@:2}"

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
