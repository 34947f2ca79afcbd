#!/bin/bash
# Tests on KVM guests. Where a guest boots with KVM they run here, and elsewhere in an emulated host (scripts/lib/kvm-host.sh).
# Nothing is installed.
#
#   scripts/lane test-kvm [TEST-NAME...]
#
# Tests may be chosen by parts of their names. Settings:
#   PAGEONE_SOAK_SECONDS   length of the soak (120; 0: none)
#   PAGEONE_KVM_RUNS       instead of the tests guests boot, work and are checked, ten at a time: a list of SUBJECT=TIMES, where
#                          the subject is pageone, ksm or nothing
#   PAGEONE_KVM            host (the emulated one) or here; unset: as a probe shows
# Exit: 0 all tests passed; 1 otherwise.
set -uo pipefail

# ---- on this machine: the tests are built, and run where KVM is ------------------------------------
if [ -z "${INSIDE:-}" ]; then
    set -e
    cd "$(dirname "$0")/../.."
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
        here) env "${variables[@]}" INSIDE=1 PAGEONE_TEST_PATIENCE=1 bash scripts/lanes/kvm.sh ;;
        host) scripts/lib/kvm-host.sh scripts/lanes/kvm.sh "${variables[@]}" INSIDE=1 PAGEONE_TEST_PATIENCE=10 ;;
        *) echo "test-kvm: PAGEONE_KVM=$how: host or here" >&2; exit 1 ;;
    esac
    exit
fi

# ---- on the machine with KVM -----------------------------------------------------------------------
# Variables: BIN (the built programs), CACHE (kernels of guests), FUNCTIONAL, SOAK, HAZARDS (test programs), FILTERS, and the
# settings above.
work=$(mktemp -d)
mkdir -p "$work/cache/kernels"
# Guests boot 6.1: under emulation that is the quickest.
ln -s "$CACHE"/kernels/6.1.* "$work/cache/kernels/"
ln -s "$CACHE/headers" "$CACHE/ppr" "$work/cache/"
cp "$CACHE"/initramfs-* "$work/cache/" 2>/dev/null
export PAGEONE_CACHE=$work/cache PAGEONE_TEST_ACCEL=kvm PAGEONE_BIN_DIR=$BIN PAGEONE_TEST_PATIENCE PAGEONE_TEST_SYSCTL=1
# KVM's counts go with their guests: they are added up each second, so that a guest's last one is missing.
faults=$work/faults
echo 0 > "$faults"
{
    last=0 sum=0
    while sleep 1; do
        now=$(cat /sys/kernel/debug/kvm/pf_taken 2>/dev/null || echo 0)
        [ "$now" -ge "$last" ] && sum=$((sum + now - last))
        last=$now
        echo "$sum" > "$faults"
    done
} &
trap "kill $!; rm -rf $work" EXIT
echo "test-kvm: Linux $(uname -r), $(nproc) processors, $(sed -n 's/^flags.* \(svm\|vmx\) .*/\1/p' /proc/cpuinfo | head -n 1)"
failed=0 ran=0
# lane NAME PROGRAM OPTION...
lane() {
    local name=$1 begin=$SECONDS before
    shift
    before=$(cat "$faults")
    ran=$((ran + 1))
    if "$@"; then
        echo "KVM-LANE $name: passed, $((SECONDS - begin)) s, $(($(cat "$faults") - before)) stage-2 faults"
    else
        echo "KVM-LANE $name: FAILED, $((SECONDS - begin)) s"
        failed=1
    fi
}
# tests NAME PROGRAM OPTION...: runs tests one by one.
tests() { lane "$@" --test-threads=1 --nocapture; }
# guests SUBJECT ROUNDS: in each round ten guests boot, work under the subject, and check their files. One that dies is an error;
# the trace ends there, at its shutdown.
guests() {
    lane "ten guests, $2 times, $1" "$BIN/pageone-bench" kvm --only "$1" --guests 10 --rounds "$2" --memory 256 --seconds 10
    if [ "$(cat "$trace/tracing_on")" = 0 ]; then tail -n 40 "$trace/trace"; fi
}
# trace_guests: notes what virtual CPUs do, until one shuts down.
trace_guests() {
    trace=/sys/kernel/tracing
    [ -e "$trace/events" ] || mount -t tracefs none "$trace"
    local event
    for event in kvm_exit kvm_entry kvm_inj_virq kvm_inj_exception; do echo 1 > "$trace/events/kvm/$event/enable"; done
    # SVM_EXIT_SHUTDOWN, and EXIT_REASON_TRIPLE_FAULT of VMX.
    local shutdown=0x7f
    grep -q ' svm ' /proc/cpuinfo || shutdown=2
    echo "traceoff if exit_reason == $shutdown" > "$trace/events/kvm/kvm_exit/trigger"
    echo 1 > "$trace/tracing_on"
}
read -ra filters <<< "${FILTERS:-}"
if [ -n "${PAGEONE_KVM_RUNS:-}" ]; then
    trace_guests
    for run in $PAGEONE_KVM_RUNS; do guests "${run%=*}" "${run#*=}"; done
elif [ ${#filters[@]} -gt 0 ]; then
    tests "chosen tests" "$FUNCTIONAL" "${filters[@]}"
else
    tests guests "$FUNCTIONAL" guests::
    tests checkpoints "$FUNCTIONAL" checkpoint
    tests recycling "$FUNCTIONAL" recycling
    tests clones "$FUNCTIONAL" snapshot::merged snapshot::attached snapshot::template snapshot::clones::a_guest_is_stored snapshot::clones::clones_wait
    tests "memory of clones" "$FUNCTIONAL" snapshot_figures_of_a_clones_memory --ignored
    tests hazards "$HAZARDS"
    if [ "${PAGEONE_SOAK_SECONDS:-0}" -gt 0 ]; then tests soak "$SOAK"; fi
fi
echo "KVM-LANES: $ran ran, $([ "$failed" -eq 0 ] && echo all passed || echo some FAILED)"
exit "$failed"
