#!/bin/bash
# checkpatch.pl and sparse on the host's file system, host/linux/pageonefs: both have nothing to say. Says SKIPPED and why where
# the kernel's source, its headers or sparse are missing.
#
#   scripts/lanes/pageonefs-lint.sh
#
# Exit: 0 nothing was found, or skipped; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
failed=0

checkpatch=
for source in "$cache"/debug-kernel/src/linux-source-*/; do
    if [ -e "$source/scripts/checkpatch.pl" ]; then checkpatch=$source/scripts/checkpatch.pl; fi
done
if [ -n "$checkpatch" ]; then
    # Left out: operations that are tmpfs's with some replaced cannot be const; the module is for several versions of the kernel.
    # An argument that one version's macro does not need is the other's.
    perl "$checkpatch" --no-tree --file --terse --no-summary --max-line-length=120 \
        --ignore CONST_STRUCT,LINUX_VERSION_CODE,NEW_TYPEDEFS,MACRO_ARG_UNUSED host/linux/pageonefs/*.[ch] || failed=1
else
    echo "lint-pageonefs: SKIPPED checkpatch: there is no source of Linux: 'make debug-kernel' unpacks it"
fi

if ! command -v sparse > /dev/null; then
    echo "lint-pageonefs: SKIPPED sparse: it is not installed (Debian: package sparse)"
    exit "$failed"
fi
work=$(mktemp -d /tmp/pageone-lint.XXXXXX)
trap 'rm -rf "$work"' EXIT
ran=0
for headers in "$cache"/headers/*/usr/src/linux-headers-*-amd64 "$cache"/debug-kernel/build-*/; do
    if [ ! -e "$headers/Module.symvers" ]; then continue; fi
    rm -rf "$work/pageonefs"
    mkdir "$work/pageonefs"
    cp host/linux/pageonefs/{Kbuild,Makefile,*.c,*.h} "$work/pageonefs/"
    ran=$((ran + 1))
    make -s -C "$work/pageonefs" KDIR="$headers" C=2 modules > "$work/log" 2>&1 || { cat "$work/log"; failed=1; }
    # What sparse says of the kernel's own headers is not ours.
    if grep -E "^$work/pageonefs/.*(warning|error):" "$work/log"; then failed=1; fi
done
if [ "$ran" = 0 ]; then echo "lint-pageonefs: SKIPPED sparse: there are no kernel headers: run 'scripts/deps.sh ppr'"; fi
exit "$failed"
