#!/bin/bash
# Builds the guest's kernel module, ppr.ko, for a guest kernel of the cache.
#
#   scripts/ppr-module.sh KERNEL-VERSION OUT-DIR      e.g. 6.1.0-56-cloud-amd64 /tmp/ppr
#
# The kernel's headers come from `scripts/deps.sh ppr`; for a kernel that is installed, `make -C guest/linux/ppr` does it.
# Exit: 0 and OUT-DIR/ppr.ko is there; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
fail() { echo "ppr-module: $*" >&2; exit 1; }
[ $# -eq 2 ] || fail "usage: scripts/ppr-module.sh KERNEL-VERSION OUT-DIR"
version=$1 out=$2
headers=$cache/headers/$version/usr/src/linux-headers-$version
[ -e "$headers/Makefile" ] || fail "there are no headers of $version in $cache/headers: run 'scripts/deps.sh ppr'"
build=$(mktemp -d /tmp/ppr-module.XXXXXX)
trap 'rm -rf "$build"' EXIT
cp guest/linux/ppr/{Kbuild,Makefile,*.c,*.h} "$build/"
make -s -C "$build" KDIR="$headers" modules >"$build/log" 2>&1 || { cat "$build/log" >&2; fail "the module does not build for $version"; }
mkdir -p "$out"
strip --strip-debug "$build/ppr.ko"
cp "$build/ppr.ko" "$out/ppr.ko"
