#!/bin/bash
# Builds a kernel module of this tree for a kernel of the cache: ppr (the guest's) or pageonefs (the host's).
#
#   scripts/lib/module.sh ppr|pageonefs KERNEL-VERSION OUT-DIR      e.g. ppr 6.1.0-56-cloud-amd64 /tmp/ppr
#
# Instead of a version, the directory that a kernel was built in (scripts/lib/debug-kernel.sh).
# The kernel's headers come from `scripts/deps.sh ppr`; for a kernel that is installed, `make` in the module's folder does
# it. PAGEONEFS_SABOTAGE=y builds pageonefs with parameters that switch guards off, for the tests.
# Exit: 0 and OUT-DIR/NAME.ko is there; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
fail() { echo "module: $*" >&2; exit 1; }
[ $# -eq 3 ] || fail "usage: scripts/lib/module.sh ppr|pageonefs KERNEL-VERSION OUT-DIR"
name=$1 version=$2 out=$3
case $name in
    ppr) source=guest/linux/ppr ;;
    pageonefs) source=host/linux/pageonefs ;;
    *) fail "$name: ppr or pageonefs" ;;
esac
headers=$cache/headers/$version/usr/src/linux-headers-$version
case $version in /*) headers=$version ;; esac
[ -e "$headers/Makefile" ] || fail "there are no headers of $version in $cache/headers: run 'scripts/deps.sh ppr'"
build=$(mktemp -d "/tmp/module-$name.XXXXXX")
trap 'rm -rf "$build"' EXIT
cp "$source"/{Kbuild,Makefile,*.c,*.h} "$build/"
make -s -C "$build" KDIR="$headers" PAGEONEFS_SABOTAGE="${PAGEONEFS_SABOTAGE:-}" modules > "$build/log" 2>&1 \
    || { cat "$build/log" >&2; fail "$name does not build for $version"; }
# A compiler's warning is an error of this project.
if grep -E 'module-.*(warning|error):' "$build/log" >&2; then fail "the compiler warns, for $version"; fi
mkdir -p "$out"
strip --strip-debug "$build/$name.ko"
cp "$build/$name.ko" "$out/$name.ko"
