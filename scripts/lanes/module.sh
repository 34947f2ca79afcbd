#!/bin/bash
# The daemon with the host's module, host/linux/pageonefs, in an emulated host with KVM (scripts/lib/kvm-host.sh): guests whose RAM
# lies in a mount are merged. Nothing is installed.
#
#   scripts/lane test-module [TEST-NAME...]                        they check their memory
#   scripts/lane bench-module [OPTION-OF-pageone-bench-module...]  what they get done, beside guests under nothing and under KSM
#
# Settings of the bench:
#   HUGE   the mount's huge=: advise, or nothing (advise)
#   THP    always or never: the host's huge pages for ordinary memory (always)
#
# Exit: 0 all tests passed, or it was measured; 1 otherwise, also when the host's kernel complained.
set -uo pipefail

# ---- on this machine -------------------------------------------------------------------------------
if [ -z "${INSIDE:-}" ]; then
    set -e
    cd "$(dirname "$0")/../.."
    what=${1:?tests or bench}
    shift
    cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
    version=$(ls "$cache/kvm-host/lib/modules" 2>/dev/null) || { echo "module: run 'scripts/deps.sh module' first" >&2; exit 1; }
    work=$(mktemp -d "${TMPDIR:-/var/tmp}/lane-module.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    scripts/lib/module.sh pageonefs "$version" "$work"
    # Guests that mark their free pages; there, no archive can be made.
    scripts/lib/ppr-archive.sh > "$work/archives"
    variables=(INSIDE="$what" CACHE="$cache" MODULE="$work/pageonefs.ko")
    if [ "$what" = tests ]; then
        functional=$(cargo test --quiet -p e2e --test functional --no-run --message-format=json-render-diagnostics |
            sed -n 's/.*"executable":"\([^"]*\/functional-[^"]*\)".*/\1/p' | tail -n 1)
        variables+=(BIN="$(realpath "${CARGO_TARGET_DIR:-target}/debug")" FUNCTIONAL="$functional" WORDS="${*:-module::}" PAGEONE_TEST_PATIENCE=10)
    else
        export PAGEONE_KVM_CPUS=${PAGEONE_KVM_CPUS:-3}
        variables+=(BIN="$(realpath "${CARGO_TARGET_DIR:-target}/release")" HUGE="${HUGE-advise}" THP="${THP:-always}" WORDS="$*")
    fi
    scripts/lib/kvm-host.sh scripts/lanes/module.sh "${variables[@]}" | tee "$work/said"
    if grep '^kernel: ' "$work/said" >&2; then echo "module: the kernel complained" >&2; exit 1; fi
    exit
fi

# ---- on the machine that may load the module -------------------------------------------------------
# What lies in this host's root cannot be written.
mount -t tmpfs none /mnt && insmod "$MODULE" && mkdir -p /mnt/pageone || exit 1
read -ra words <<< "$WORDS"
if [ "$INSIDE" = tests ]; then
    mount -t pageonefs -o domain=test,huge=advise,size=90%,mode=0700,uid=0 none /mnt/pageone || exit 1
    work=$(mktemp -d)
    mkdir -p "$work/cache/kernels"
    # Guests boot 6.1: under emulation that is the quickest.
    ln -s "$CACHE"/kernels/6.1.* "$work/cache/kernels/"
    ln -s "$CACHE/headers" "$CACHE/ppr" "$work/cache/"
    cp "$CACHE"/initramfs-* "$work/cache/" 2>/dev/null
    export PAGEONE_CACHE=$work/cache PAGEONE_TEST_ACCEL=kvm PAGEONE_BIN_DIR=$BIN PAGEONE_TEST_PATIENCE
    "$FUNCTIONAL" "${words[@]}" --test-threads=1 --nocapture
    code=$?
    rm -rf "$work"
else
    mount -t pageonefs -o "domain=bench,size=90%,mode=0700,uid=0${HUGE:+,huge=$HUGE}" none /mnt/pageone || exit 1
    echo "$THP" > /sys/kernel/mm/transparent_hugepage/enabled
    "$BIN/pageone-bench" module "${words[@]}"
    code=$?
fi
umount /mnt/pageone && rmmod pageonefs || { echo "the module does not go: something uses it still"; code=1; }
exit "$code"
