#!/bin/bash
# What guests get done whose RAM lies in the file system of the host's module, beside guests under
# nothing, and the same under KSM, in an emulated host with KVM (scripts/kvm-host.sh). Nothing is
# installed.
#
#   scripts/bench-module.sh [OPTION-OF-pageone-bench-module...]
#
# Settings:
#   HUGE   the mount's huge=: advise, or nothing (nothing)
#   THP    always or never: the host's huge pages for ordinary memory (always)
#
# Exit: 0 it was measured; 1 otherwise, also when the host's kernel complained.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
version=$(ls "$cache/kvm-host/lib/modules" 2>/dev/null) || { echo "bench-module: run 'scripts/deps.sh module' first" >&2; exit 1; }
work=$(mktemp -d "${TMPDIR:-/var/tmp}/bench-module.XXXXXX")
trap 'rm -rf "$work"' EXIT
scripts/module.sh pageonefs "$version" "$work"
# There, no archive can be made.
scripts/ppr-archive.sh > "$work/archives"
export PAGEONE_KVM_CPUS=${PAGEONE_KVM_CPUS:-3}
scripts/kvm-host.sh scripts/bench-module-inside.sh BIN="$(realpath "${CARGO_TARGET_DIR:-target}/release")" MODULE="$work/pageonefs.ko" \
    HUGE="${HUGE:-}" THP="${THP:-always}" WORDS="$*" | tee "$work/said"
if grep '^kernel: ' "$work/said" >&2; then echo "bench-module: the kernel complained" >&2; exit 1; fi
