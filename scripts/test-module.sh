#!/bin/bash
# Tests the daemon with the host's module, host/linux/pageonefs, in an emulated host with KVM (scripts/kvm-host.sh): guests whose
# RAM lies in a mount are merged, and check their memory. Nothing is installed.
#
#   scripts/test-module.sh [TEST-NAME...]
#
# Exit: 0 all tests passed; 1 otherwise, also when the host's kernel complained.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
version=$(ls "$cache/kvm-host/lib/modules" 2>/dev/null) || { echo "test-module: run 'scripts/deps.sh module' first" >&2; exit 1; }
work=$(mktemp -d "${TMPDIR:-/var/tmp}/test-module.XXXXXX")
trap 'rm -rf "$work"' EXIT
scripts/module.sh pageonefs "$version" "$work"
# Guests that mark their free pages; there, no archive can be made.
scripts/ppr-archive.sh > "$work/archives"
functional=$(cargo test --quiet -p e2e --test functional --no-run --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\/functional-[^"]*\)".*/\1/p' | tail -n 1)
bin=$(realpath "${CARGO_TARGET_DIR:-target}/debug")
scripts/kvm-host.sh scripts/test-module-inside.sh BIN="$bin" CACHE="$cache" FUNCTIONAL="$functional" MODULE="$work/pageonefs.ko" \
    FILTERS="${*:-module::}" PAGEONE_TEST_PATIENCE=10 | tee "$work/said"
if grep '^kernel: ' "$work/said" >&2; then echo "test-module: the kernel complained" >&2; exit 1; fi
