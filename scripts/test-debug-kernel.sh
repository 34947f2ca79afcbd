#!/bin/bash
# Runs the hazard tests, and then the behaviour fuzzer, inside QEMU guests of kernels that check themselves
# (scripts/debug-kernel.sh builds them): no test fails, and the kernel has nothing to say. Frames are poisoned there as by
# broken memory.
#
#   scripts/test-debug-kernel.sh [BIN-DIR [TEST-NAME...]]
#
# BIN-DIR holds the built programs (default: the debug directory of the cargo target directory). Tests may be chosen by
# parts of their names. Settings:
#   PAGEONE_DEBUG_KERNELS   flavours of scripts/debug-kernel.sh (locks)
#   PAGEONE_FUZZ_SECONDS    how long the fuzzer runs (180; 0: not at all)
#   PAGEONE_FUZZ_WITHOUT    operations that it leaves out
#   PAGEONE_FAULTS          0: no faults; N: each N-th allocation of the kernel fails for clients of some tests that then
#                           run once more (400)
#   PAGEONE_KERNELS_TIMEOUT seconds for one guest (3600)
# Exit: 0 all tests passed on every kernel; 1 otherwise, also when a guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/kernel-guest.sh
. scripts/kernel-guest.sh
read -ra flavours <<< "${PAGEONE_DEBUG_KERNELS:-locks}"
images=$(scripts/debug-kernel.sh "${flavours[@]}") || exit 1
pack "${1:-${CARGO_TARGET_DIR:-target}/debug}" "${@:2}"

# These kernels have no ACPI: their NUMA nodes are fake ones. SLUB checks what it frees.
parameters='numa=fake=2 tsc=reliable hung_task_panic=1 slab_debug=FZ page_poison=1'
parameters+=" PATIENCE=20 POISON=1 FUZZ=${PAGEONE_FUZZ_SECONDS:-180} FAULTS=${PAGEONE_FAULTS:-400}"
parameters+=" WITHOUT=${PAGEONE_FUZZ_WITHOUT:-}"
failed=0
for image in $images; do
    boot "$(basename "${image%/vmlinuz}")" "$image" "${PAGEONE_KERNELS_TIMEOUT:-3600}" "$parameters" || failed=1
done
exit "$failed"
