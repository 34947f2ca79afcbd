#!/bin/bash
# Builds the kernel of `make test-debug-kernel`: Debian's source of Linux 6.12 with the options of scripts/debug-kernel.config:
# lockdep, DEBUG_VM, checks of page tables, RCU and lists, poisoned free pages, failing allocations, hwpoison.
#
#   scripts/debug-kernel.sh
#
# `scripts/deps.sh debug-kernel` installs what this needs. The kernel is built once for each version of the source and each
# set of options, in some ten minutes of two idle cores; the objects stay, so the next build is short:
#   $PAGEONE_CACHE/debug-kernel/src, build       the source, and the objects (1.5 GB; may be removed)
#   $PAGEONE_CACHE/debug-kernel/images/VERSION-KEY/vmlinuz
# Prints the image's path. Exit: 0 it is there; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}/debug-kernel
archive=/usr/src/linux-source-6.12.tar.xz
source=$cache/src/linux-source-6.12
say() { echo "debug-kernel: $*" >&2; }
fail() { say "$*"; exit 1; }

version=$(dpkg-query -W -f '${Version}' linux-source-6.12 2>/dev/null) && [ -f "$archive" ] ||
    fail "the source of Linux 6.12 is missing: run 'scripts/deps.sh debug-kernel'"

# Without what an x86 guest cannot use; the build reads each Kconfig, so those stay.
unpack() {
    if [ "$(cat "$cache/src/version" 2>/dev/null)" = "$version" ]; then return; fi
    say "unpacks the source of $version to $cache/src"
    rm -rf "$cache"
    mkdir -p "$cache/src"
    tar -C "$cache/src" -xf "$archive" --exclude='*/Documentation/[a-z]*' \
        --exclude='*/drivers/gpu/drm/amd/include/*' || fail "cannot unpack $archive: is the disk full?"
    echo "$version" > "$cache/src/version"
}

# Writes the configuration, and sees that nothing of it was dropped.
configure() {
    local build=$cache/build line
    mkdir -p "$build"
    make -s -C "$source" O="$build" KCONFIG_ALLCONFIG="$PWD/scripts/debug-kernel.config" allnoconfig >&2
    while read -r line; do
        grep -qxF "$line" "$build/.config" || fail "the kernel's Kconfig does not take $line: see what it depends on"
    done < <(grep '^CONFIG_.*=y$' scripts/debug-kernel.config)
}

key=$(grep '^CONFIG_' scripts/debug-kernel.config | cksum | cut -d' ' -f1)
image=$cache/images/$version-$key/vmlinuz
if [ ! -s "$image" ]; then
    unpack
    configure
    say "builds Linux $version (the compiler's words: $cache/build/log)"
    nice -n 10 make -s -C "$cache/build" -j"$(nproc)" bzImage > "$cache/build/log" 2>&1 ||
        { tail -n 20 "$cache/build/log" >&2; fail "the kernel was not built"; }
    rm -rf "$cache/images/"*
    mkdir -p "${image%/*}"
    # Renamed into place: an interrupted run leaves no half kernel that looks whole.
    cp "$cache/build/arch/x86/boot/bzImage" "$image.part"
    mv "$image.part" "$image"
fi
echo "$image"
