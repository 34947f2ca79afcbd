#!/bin/bash
# Hours of the host's file system, host/linux/pageonefs, in a guest whose kernel checks itself: programs write and check memory
# that is merged, and are killed; mounts come and go; memory is short; the module is unloaded and loaded. No byte is wrong, the
# kernel has nothing to say, and no memory is lost (host/linux/pageonefs/test/soak).
#
#   scripts/soak-pageonefs.sh [6.12|6.1 [kasan]]
#
# Settings: SOAK_SECONDS (3600), FUZZ_SEED.
# Exit: 0 all well; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/kernel-guest.sh
. scripts/kernel-guest.sh
# shellcheck source=scripts/pageonefs-guest.sh
. scripts/pageonefs-guest.sh
seconds=${SOAK_SECONDS:-3600}
image=$(scripts/debug-kernel.sh "${1:-6.12}" ${2:+"$2"}) || exit 1
pack_guest "$(readlink -f "${image%/*}/build")"
parameters="$checks TESTS=none SOAK=$seconds SEED=${FUZZ_SEED:-}"
boot "Linux $(basename "${image%/vmlinuz}")${2:+ with $2}" "$image" $((1200 + 2 * seconds)) "$parameters"
