#!/bin/bash
# Builds the kernel of `make test-debug-kernel` and `make test-pageonefs-debug`: Debian's source of Linux 6.12 or 6.1 with the
# options of scripts/lib/debug-kernel.config: lockdep, DEBUG_VM, checks of page tables, RCU and lists, poisoned free pages, failing
# allocations, hwpoison, kmemleak.
#
#   scripts/lib/debug-kernel.sh [6.12|6.1 [kasan]]
#
# With kasan, every access to memory is checked, which makes a guest several times slower. `scripts/deps.sh debug-kernel`
# installs what this needs, with the source of 6.12; that of 6.1 is Debian's package linux-source-6.1. A kernel is built once
# for each version of the source and each set of options, in some ten minutes of two idle cores; the objects stay, so that the
# next build is short and modules are built against them:
#   $PAGEONE_CACHE/debug-kernel/src, build-SERIES[-kasan]    the sources, and the objects (1.5 GB each; may be removed)
#   $PAGEONE_CACHE/debug-kernel/images/SERIES[-kasan]/VERSION-KEY/vmlinuz, build
# Prints the image's path. Exit: 0 it is there; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/../.."
series=${1:-6.12} kind=${2:+-$2}
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}/debug-kernel
archive=/usr/src/linux-source-$series.tar.xz
source=$cache/src/linux-source-$series
build=$cache/build-$series$kind
say() { echo "debug-kernel: $*" >&2; }
fail() { say "$*"; exit 1; }
case $series$kind in 6.12 | 6.1 | 6.12-kasan | 6.1-kasan) ;; *) fail "usage: scripts/lib/debug-kernel.sh [6.12|6.1 [kasan]]" ;; esac

version=$(dpkg-query -W -f '${Version}' "linux-source-$series" 2>/dev/null) && [ -f "$archive" ] ||
    fail "the source of Linux $series is missing: run 'scripts/deps.sh debug-kernel', or for 6.1 'apt-get install linux-source-6.1'"

# Without what an x86 guest cannot use; the build reads each Kconfig, so those stay.
unpack() {
    if [ "$(cat "$source/version" 2>/dev/null)" = "$version" ]; then return; fi
    say "unpacks the source of $version to $source"
    rm -rf "$source" "$cache/build-$series" "$cache/build-$series-kasan"
    mkdir -p "$cache/src"
    tar -C "$cache/src" -xf "$archive" --exclude='*/Documentation/[a-z]*' \
        --exclude='*/drivers/gpu/drm/amd/include/*' || fail "cannot unpack $archive: is the disk full?"
    echo "$version" > "$source/version"
}

options() {
    cat scripts/lib/debug-kernel.config
    if [ -z "$kind" ]; then return; fi
    # Shadows of memory in the way that costs least here; quarantined objects are the tests' memory, too.
    printf '%s\n' CONFIG_KASAN=y CONFIG_KASAN_GENERIC=y CONFIG_KASAN_INLINE=y CONFIG_KASAN_VMALLOC=y CONFIG_STACKTRACE=y
}

# Writes the configuration, and sees that nothing of it was dropped.
configure() {
    local line lacks=
    mkdir -p "$build"
    options > "$build/options"
    # What one of them does not have, or has under another name.
    case $series in
        6.1) lacks='CONFIG_CPU_MITIGATIONS|CONFIG_BASE_SMALL|CONFIG_SLUB_TINY' ;;
        6.12) lacks=CONFIG_BASE_FULL ;;
    esac
    make -s -C "$source" O="$build" KCONFIG_ALLCONFIG="$build/options" allnoconfig >&2
    while read -r line; do
        if [ -n "$lacks" ] && [[ ${line%=y} =~ ^($lacks)$ ]]; then continue; fi
        grep -qxF "$line" "$build/.config" || fail "the kernel's Kconfig does not take $line: see what it depends on"
    done < <(grep '^CONFIG_.*=y$' "$build/options")
}

key=$(options | grep '^CONFIG_' | cksum | cut -d' ' -f1)
image=$cache/images/$series$kind/$version-$key/vmlinuz
if [ ! -s "$image" ] || [ ! -e "$build/Module.symvers" ]; then
    unpack
    configure
    say "builds Linux $version${kind:+ with KASAN} (the compiler's words: $build/log)"
    nice -n 10 make -s -C "$build" -j"$(nproc)" bzImage modules > "$build/log" 2>&1 ||
        { tail -n 20 "$build/log" >&2; fail "the kernel was not built"; }
    rm -rf "$cache/images/$series$kind/"*
    mkdir -p "${image%/*}"
    ln -s "$build" "${image%/*}/build"
    # Renamed into place: an interrupted run leaves no half kernel that looks whole.
    cp "$build/arch/x86/boot/bzImage" "$image.part"
    mv "$image.part" "$image"
fi
echo "$image"
