#!/bin/bash
# Builds the kernels of `make test-debug-kernel`: Debian's source of Linux 6.12, the options of scripts/debug-kernel.config,
# and those of one flavour:
#
#   scripts/debug-kernel.sh [FLAVOUR...]
#
#   locks    lockdep, RCU, poisoned free pages (the default)
#   kasan    each access of the kernel to its memory
#
# `scripts/deps.sh debug-kernel` installs what this needs. A kernel is built once for each version of the source and each
# configuration, in some ten minutes of two cores; the objects stay, so the next build is short:
#   $PAGEONE_CACHE/debug-kernel/src, FLAVOUR     the source, and the objects (1.5 GB; may be removed)
#   $PAGEONE_CACHE/debug-kernel/images/FLAVOUR-VERSION-KEY/vmlinuz
# Prints the images' paths, one on a line. Exit: 0 all are there; 1 otherwise.
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

# configure FLAVOUR: writes the configuration, and sees that nothing of it was dropped.
configure() {
    local build=$cache/$1 line
    mkdir -p "$build"
    cat scripts/debug-kernel.config "scripts/debug-kernel-$1.config" > "$build/wanted"
    make -s -C "$source" O="$build" KCONFIG_ALLCONFIG="$build/wanted" allnoconfig >&2
    while read -r line; do
        grep -qxF "$line" "$build/.config" || fail "$1: the kernel's Kconfig does not take $line: see what it depends on"
    done < <(grep '^CONFIG_.*=y$' "$build/wanted")
}

for flavour in "${@:-locks}"; do
    [ -f "scripts/debug-kernel-$flavour.config" ] || fail "there is no scripts/debug-kernel-$flavour.config"
    key=$(cat scripts/debug-kernel.config "scripts/debug-kernel-$flavour.config" | cksum | cut -d' ' -f1)
    image=$cache/images/$flavour-$version-$key/vmlinuz
    if [ ! -s "$image" ]; then
        unpack
        configure "$flavour"
        say "builds Linux $version, $flavour (the compiler's words: $cache/$flavour/log)"
        nice -n 10 make -s -C "$cache/$flavour" -j"$(nproc)" bzImage > "$cache/$flavour/log" 2>&1 ||
            { tail -n 20 "$cache/$flavour/log" >&2; fail "the $flavour kernel was not built"; }
        rm -rf "$cache/images/$flavour-"*
        mkdir -p "${image%/*}"
        # Renamed into place: an interrupted run leaves no half kernel that looks whole.
        cp "$cache/$flavour/arch/x86/boot/bzImage" "$image.part"
        mv "$image.part" "$image"
    fi
    echo "$image"
done
