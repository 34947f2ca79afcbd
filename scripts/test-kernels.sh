#!/bin/bash
# Runs the hazard tests inside a QEMU guest of Debian's 6.12 cloud kernel (and any other kernel of the cache that is
# 6.7 or later): the supported range is tested, not claimed. On an older one, Debian's 6.1, the program must say that it is
# too old. Needs no hardware virtualisation; takes some minutes.
#
#   scripts/test-kernels.sh [BIN-DIR [TEST-NAME...]]
#
# BIN-DIR holds the built programs (default: the debug directory of the cargo target directory). Tests may be chosen by
# parts of their names. PAGEONE_KERNELS_TIMEOUT: seconds for one guest, 2400 if unset.
# Exit: 0 all tests passed on every kernel; 1 otherwise, also when a guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/kernel-guest.sh
. scripts/kernel-guest.sh
pack "${1:-${CARGO_TARGET_DIR:-target}/debug}" "${@:2}"

failed=0 ran=0
for kernel in "$cache"/kernels/*/vmlinuz; do
    [ -e "$kernel" ] || continue
    version=$(basename "$(dirname "$kernel")")
    if [ "$(printf '%s\n' 6.7 "$version" | sort -V | head -n 1)" = 6.7 ]; then ran=$((ran + 1)); fi
    boot "Linux $version" "$kernel" "${PAGEONE_KERNELS_TIMEOUT:-2400}" 'PATIENCE=8 POISON=1' || failed=1
done
[ "$ran" -gt 0 ] || fail "no kernel of 6.7 or later in $cache/kernels: 'scripts/deps.sh kernels' fetches one"
exit "$failed"
