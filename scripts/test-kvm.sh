#!/bin/bash
# Tests on KVM guests. Where a guest boots with KVM they run here, and elsewhere in an emulated host (scripts/kvm-host.sh).
# Nothing is installed.
#
#   scripts/test-kvm.sh [TEST-NAME...]
#
# Tests may be chosen by parts of their names. Settings:
#   PAGEONE_SOAK_SECONDS   length of the soak (120; 0: none)
#   PAGEONE_KVM_RUNS       instead of the tests guests boot, work and are checked, ten at a time: a list of SUBJECT=TIMES, where
#                          the subject is pageone, ksm or nothing
#   PAGEONE_KVM            host (the emulated one) or here; unset: as a probe shows
# Exit: 0 all tests passed; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
built() {
    cargo test --quiet -p e2e --test "$1" --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\/'"$1"'-[^"]*\)".*/\1/p' | tail -n 1
}
bin=$(realpath "${CARGO_TARGET_DIR:-target}/debug")
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
variables=(BIN="$bin" CACHE="$cache" FUNCTIONAL="$(built functional)" SOAK="$(built soak)" HAZARDS="$(built hazards)"
    FILTERS="$*" PAGEONE_SOAK_SECONDS="${PAGEONE_SOAK_SECONDS:-120}" PAGEONE_KVM_RUNS="${PAGEONE_KVM_RUNS:-}")
how=${PAGEONE_KVM:-}
if [ -z "$how" ]; then
    if why=$("$bin/pageone" demo --probe 2>&1); then how=here; else how=host; fi
    echo "test-kvm: ${why##*$'\n'}"
fi
case $how in
    here) env "${variables[@]}" PAGEONE_TEST_PATIENCE=1 bash scripts/test-kvm-inside.sh ;;
    host) scripts/kvm-host.sh scripts/test-kvm-inside.sh "${variables[@]}" PAGEONE_TEST_PATIENCE=10 ;;
    *) echo "test-kvm: PAGEONE_KVM=$how: host or here" >&2; exit 1 ;;
esac
