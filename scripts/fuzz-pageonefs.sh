#!/bin/bash
# Fuzzes files of the host's file system, host/linux/pageonefs, in a guest whose kernel checks itself: programs do what they
# can, while pages merge, and a model knows each byte (host/linux/pageonefs/test/fuzz.c).
#
#   scripts/fuzz-pageonefs.sh [6.12|6.1 [kasan]]
#
# Settings: FUZZ_SECONDS (3600), FUZZ_SEED (the clock's; it is printed), FUZZ_FAULTS (0; N: each N-th allocation fails), and for a
# look at one guard FUZZ_OPTIONS, parameters of a module that is built with them (no_compare=1).
# Exit: 0 nothing was found; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/kernel-guest.sh
. scripts/kernel-guest.sh
# shellcheck source=scripts/pageonefs-guest.sh
. scripts/pageonefs-guest.sh
seconds=${FUZZ_SECONDS:-3600}
image=$(scripts/debug-kernel.sh "${1:-6.12}" ${2:+"$2"}) || exit 1
pack_guest "$(readlink -f "${image%/*}/build")" "${FUZZ_OPTIONS:+y}"
parameters="$checks TESTS=none POISON=1 FUZZ=$seconds SEED=${FUZZ_SEED:-} FAULTS=${FUZZ_FAULTS:-0} OPTIONS=${FUZZ_OPTIONS:-}"
boot "Linux $(basename "${image%/vmlinuz}")${2:+ with $2}" "$image" $((900 + 4 * seconds)) "$parameters"
