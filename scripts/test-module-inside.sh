#!/bin/bash
# The tests of scripts/test-module.sh, on a machine that may load the module. Its variables: BIN (the built programs), CACHE (kernels
# of guests), FUNCTIONAL (the test program), MODULE, FILTERS, PAGEONE_TEST_PATIENCE.
set -uo pipefail
work=$(mktemp -d)
mkdir -p "$work/cache/kernels"
# Guests boot 6.1: under emulation that is the quickest.
ln -s "$CACHE"/kernels/6.1.* "$work/cache/kernels/"
ln -s "$CACHE/headers" "$CACHE/ppr" "$work/cache/"
cp "$CACHE"/initramfs-* "$work/cache/" 2>/dev/null
export PAGEONE_CACHE=$work/cache PAGEONE_TEST_ACCEL=kvm PAGEONE_BIN_DIR=$BIN PAGEONE_TEST_PATIENCE
# What lies in this host's root cannot be written.
mount -t tmpfs none /mnt && insmod "$MODULE" && mkdir -p /mnt/pageone &&
    mount -t pageonefs -o domain=test,huge=advise,size=90%,mode=0700,uid=0 none /mnt/pageone || exit 1
read -ra filters <<< "$FILTERS"
"$FUNCTIONAL" "${filters[@]}" --test-threads=1 --nocapture
code=$?
umount /mnt/pageone && rmmod pageonefs || { echo "the module does not go: something uses it still"; code=1; }
rm -rf "$work"
exit "$code"
