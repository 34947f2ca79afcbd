#!/bin/bash
# Makes what the guests of the recycler's end-to-end tests and benches boot: busybox, the `load` program, the balloon's modules and
# the recycler's module, as one archive for each kernel.
#
#   scripts/lib/ppr-archive.sh            for every kernel of the cache whose headers are there
#
# Prints a line `KERNEL ARCHIVE` for each. Exit: 0 and at least one; 1 otherwise, saying what is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
fail() { echo "ppr-archive: $*" >&2; exit 1; }
for tool in gcc make busybox; do
    command -v "$tool" >/dev/null || fail "$tool is missing: run 'scripts/deps.sh demo' and 'scripts/deps.sh ppr'"
done
busybox=$(command -v busybox)
root=$(mktemp -d /tmp/ppr-archive.XXXXXX)
trap 'rm -rf "$root"' EXIT
# Whatever goes in; an archive that is there under this name is up to date.
inputs=$(cat guest/load/* guest/linux/ppr/* scripts/lib/ppr-archive.sh scripts/lib/module.sh "$busybox" | cksum | tr -d ' ')
found=0
for kernel in "$cache"/kernels/*/vmlinuz; do
    version=$(basename "$(dirname "$kernel")")
    [ -e "$cache/headers/$version/complete" ] || continue
    out=$cache/ppr/$version-$inputs.cpio
    if [ ! -e "$out" ]; then
        rm -rf "${root:?}"/*
        mkdir -p "$root/bin" "$root/modules" "$root/dev" "$cache/ppr"
        cp "$busybox" "$root/bin/busybox"
        gcc -O2 -static -o "$root/bin/load" guest/load/load.c || fail "guest/load/load.c does not build (libc6-dev?)"
        strip "$root/bin/load"
        cp guest/load/init "$root/init"
        chmod 755 "$root/init"
        cp "$cache/kernels/$version/modules/virtio"*.ko "$root/modules/"
        scripts/lib/module.sh ppr "$version" "$root/modules" || fail "no module for $version"
        # `pageone demo --ppr` takes it from there.
        cp "$root/modules/ppr.ko" "$cache/kernels/$version/modules/ppr.ko"
        mknod "$root/dev/console" c 5 1
        rm -f "$cache/ppr/$version-"*.cpio
        (cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null) >"$out.part"
        mv "$out.part" "$out"
    fi
    echo "$kernel $out"
    found=1
done
[ "$found" = 1 ] || fail "no kernel in $cache/kernels has its headers in $cache/headers: run 'scripts/deps.sh ppr'"
