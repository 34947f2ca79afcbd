#!/bin/bash
# Tests the host's file system, host/linux/pageonefs, in guests of Debian's 6.1 and 6.12 cloud kernels: files, hazards, and that
# the tests notice each guard that is off. Needs no hardware virtualisation; takes some minutes for a kernel.
#
#   scripts/test-pageonefs.sh [KERNEL-PREFIX [TEST-NAME...]]      e.g. 6.12 lengths; all if nothing is named
#
# Exit: 0 all tests passed on every kernel; 1 otherwise, also when a guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/kernel-guest.sh
. scripts/kernel-guest.sh
prefix=${1:-6.}
tests=$(IFS=,; echo "${*:2}")
sources=host/linux/pageonefs/test

# pack_guest VERSION [y]: makes $work/initrd with the module for this kernel; with y, one whose guards can be off.
pack_guest() {
    local version=$1 root=$work/root
    rm -rf "$root"
    mkdir -p "$root"/{bin,proc,sys,dev,tmp,mnt}
    cp "$(command -v busybox)" "$root/bin/busybox"
    PAGEONEFS_SABOTAGE=${2:-} scripts/module.sh pageonefs "$version" "$root"
    gcc -std=gnu11 -O2 -Wall -Wextra -Werror -static -pthread -o "$root/pageonefs-test" "$sources"/{main,pages,files,hazards,memory,frames}.c
    if [ -z "$tests" ]; then
        cp "$kmem" "$root/kmem-test"
        strip "$root/kmem-test"
        libraries "$root" "$kmem"
    fi
    printf '%s\n' "$unwell" > "$root/unwell"
    cp "$sources/init" "$root/init"
    chmod 755 "$root/init"
    mknod "$root/dev/console" c 5 1 2>/dev/null || true
    initrd "$root"
}

if [ -z "$tests" ]; then
    kmem=$(cargo test --quiet -p kmem --lib --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*kmem[^"]*\)".*/\1/p' | tail -n 1) && [ -x "$kmem" ] || fail "kmem's tests could not be built"
fi

# A slow disk with random content, and one for swap. NVMe is built into these kernels.
head -c 8M /dev/urandom > "$work/slow"
truncate -s 256M "$work/swap"
devices=(
    -drive "file=$work/slow,format=raw,if=none,id=slow,throttling.iops-total=60" -device nvme,serial=slow,drive=slow
    -drive "file=$work/swap,format=raw,if=none,id=swap" -device nvme,serial=swap,drive=swap
)

failed=0 ran=0
for kernel in "$cache"/kernels/"$prefix"*/vmlinuz; do
    [ -e "$kernel" ] || continue
    version=$(basename "$(dirname "$kernel")")
    case $version in 6.1.* | 6.12.*) ;; *) continue ;; esac
    ran=$((ran + 1))
    pack_guest "$version"
    boot "Linux $version" "$kernel" 900 "TESTS=$tests ROUNDS=$([ -z "$tests" ] && echo 10)" || failed=1
    [ -z "$tests" ] || continue
    # Each guard off: the test of its hazard must fail.
    pack_guest "$version" y
    boot "Linux $version, pages that others hold are merged" "$kernel" 300 'OPTIONS=no_pin_check=1 TESTS=held MUST_FAIL=1' || failed=1
    boot "Linux $version, a harvest does not wait" "$kernel" 300 'OPTIONS=no_handshake=1,slow=300 TESTS=dirty MUST_FAIL=1' || failed=1
    boot "Linux $version, contents are not compared" "$kernel" 300 'OPTIONS=no_compare=1 TESTS=hammer MUST_FAIL=1' || failed=1
done
[ "$ran" -gt 0 ] || fail "no kernel of 6.1 or 6.12 in $cache/kernels: 'scripts/deps.sh ppr' fetches them"
exit "$failed"
