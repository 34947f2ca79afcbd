#!/bin/bash
# The tests of scripts/test-kvm.sh, on a machine that has KVM. Its variables: BIN (the built programs), CACHE (kernels of
# guests), FUNCTIONAL, SOAK, HAZARDS (test programs), FILTERS, PAGEONE_SOAK_SECONDS, PAGEONE_TEST_PATIENCE.
set -uo pipefail
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
# lane NAME PROGRAM OPTION...: runs tests one by one.
lane() {
    local name=$1 program=$2 begin=$SECONDS before
    shift 2
    before=$(cat "$faults")
    ran=$((ran + 1))
    if "$program" --test-threads=1 --nocapture "$@"; then
        echo "KVM-LANE $name: passed, $((SECONDS - begin)) s, $(($(cat "$faults") - before)) stage-2 faults"
    else
        echo "KVM-LANE $name: FAILED, $((SECONDS - begin)) s"
        failed=1
    fi
}
read -ra filters <<< "${FILTERS:-}"
if [ ${#filters[@]} -gt 0 ]; then
    lane "chosen tests" "$FUNCTIONAL" "${filters[@]}"
else
    lane guests "$FUNCTIONAL" guests::
    lane checkpoints "$FUNCTIONAL" checkpoint
    lane recycling "$FUNCTIONAL" recycling
    lane hazards "$HAZARDS"
    if [ "${PAGEONE_SOAK_SECONDS:-0}" -gt 0 ]; then lane soak "$SOAK"; fi
fi
echo "KVM-LANES: $ran ran, $([ "$failed" -eq 0 ] && echo all passed || echo some FAILED)"
exit "$failed"
