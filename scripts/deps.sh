#!/bin/bash
# Installs the packages that PageONE needs on Debian, and names each with its reason first.
#
#   scripts/deps.sh build     what compiling needs
#   scripts/deps.sh demo      what `pageone demo` needs: QEMU, busybox, a guest kernel
#   scripts/deps.sh test      both, and what tests of errors, disks, the screen and the report need: strace, xfsprogs, tmux, Chromium, qemu-guest-agent
#   scripts/deps.sh aarch64   what `make lint-aarch64` needs: a C compiler for the crate ring, and the standard library, which rustup adds
#   scripts/deps.sh deb       what building the Debian packages needs (`make deb`)
#   scripts/deps.sh packages  that, and roots of Debian 12 in which they are tried, one with dkms (`make test-packages`)
#   scripts/deps.sh bench     rivals in the benches: Debian's ksmtuned, unpacked into the cache and not installed (it would start), and fio
#   scripts/deps.sh fuzz      what `make fuzz` needs: a nightly toolchain and cargo-fuzz
#   scripts/deps.sh kernels   the guest kernels to test with: Debian's 6.1 and 6.12 cloud kernels
#   scripts/deps.sh kvm-host  the emulated host of scripts/lib/kvm-host.sh: Debian's 6.12 with its modules
#   scripts/deps.sh module    the same, and what building the host's module for it needs (`make test-module`)
#   scripts/deps.sh libvirt   that kernel, and Debian 12 and 13 with libvirt and AppArmor for `make test-libvirt`: images in the cache
#   scripts/deps.sh selinux   the same with Debian 13 and SELinux, for `make test-selinux`
#   scripts/deps.sh medium    that kernel, and what makes its file systems on failing devices (`make test-pool-medium`)
#   scripts/deps.sh debug-kernel   what building the kernels of scripts/lib/debug-kernel.sh needs, with Debian's source of Linux 6.12
#   scripts/deps.sh book      mdbook, for `make book`
#   scripts/deps.sh alerts    promtool, for `make test-alerts`
#   scripts/deps.sh ppr       those, and what building the guest's recycler module for them needs
#
# Guest kernels are unpacked from Debian's packages into the cache and never installed on the host:
#   $PAGEONE_CACHE/kernels/VERSION/vmlinuz      (PAGEONE_CACHE: ${XDG_CACHE_HOME:-~/.cache}/pageone)
# The demo's guests need no modules; the tests load a balloon driver from
#   $PAGEONE_CACHE/kernels/VERSION/modules/*.ko
#
# The kernels' headers are unpacked to $PAGEONE_CACHE/headers/VERSION.
#
# Exit: 0 all is there; 1 something failed; 2 something is for you to do (the command is printed).
set -euo pipefail
here=$(dirname "$(realpath "$0")")/deps

min_rust=1.88
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
sudo_prefix=
[ "$(id -u)" -eq 0 ] || sudo_prefix='sudo '

say() { printf 'deps: %s\n' "$*"; }
fail() { printf 'deps: error: %s\n' "$*" >&2; exit 1; }
yours() { printf 'deps: for you to do: %s\n' "$*" >&2; exit 2; }

scratch=
trap '[ -z "$scratch" ] || rm -rf "$scratch"' EXIT

missing=()

# want PACKAGE WHY CHECK...: notes PACKAGE as missing unless the command CHECK... succeeds.
want() {
    local package=$1 why=$2
    shift 2
    if "$@" >/dev/null 2>&1; then return; fi
    missing+=("$package")
    say "needs $package: $why"
}

have() { command -v "$1"; }

# A new machine has no package lists, or old ones. One update a run, and only as root.
refreshed=
refresh() {
    [ -z "$refreshed" ] && [ "$(id -u)" -eq 0 ] || return 1
    refreshed=yes
    say 'runs: apt-get update'
    apt-get -qq update
}

# Guests run busybox with no libraries beside it.
static_busybox() { have busybox && ! LC_ALL=C ldd "$(command -v busybox)"; }

install_missing() {
    [ ${#missing[@]} -gt 0 ] || return 0
    local line="apt-get install -y --no-install-recommends ${missing[*]}"
    have apt-get >/dev/null ||
        fail "there is no apt-get here: install your system's equivalents of ${missing[*]} yourself"
    [ -z "$sudo_prefix" ] || yours "$sudo_prefix$line"
    say "runs: $line"
    # Another apt, such as unattended-upgrades, may hold the lock: we wait for it.
    export DEBIAN_FRONTEND=noninteractive
    $line -o DPkg::Lock::Timeout=600 || { refresh && $line -o DPkg::Lock::Timeout=600; } ||
        fail "apt-get could not install ${missing[*]}: run 'apt-get update', then this again"
}

want_rust() {
    local found
    if ! have cargo >/dev/null; then
        found='there is no cargo'
    else
        # "cargo 1.95.0 (...)"; one that cannot say its version is no cargo to build with.
        found=$(cargo --version 2>/dev/null | cut -d' ' -f2) || found=unknown
        if [[ $found =~ ^[0-9]+\.[0-9]+ ]] &&
            [ "$(printf '%s\n' "$min_rust" "$found" | sort -V | head -n 1)" = "$min_rust" ]; then
            return
        fi
        found="cargo is ${found:-unknown}"
    fi
    yours "$found, and PageONE needs $min_rust or newer. Debian 12's package is too old:" \
        "install the stable toolchain with rustup, as https://rustup.rs says, and run this again"
}

deps_build() {
    want gcc 'Rust links its programs with it' have gcc
    want libc6-dev "the C library's headers and start files, for linking" \
        test -e /usr/include/stdio.h
    install_missing
    want_rust
}

deps_demo() {
    want qemu-system-x86 'runs the guests' have qemu-system-x86_64
    want busybox-static 'is all that a guest runs' static_busybox
    install_missing
    kernel_6_1
}

deps_tests() {
    want strace 'tests of errors make system calls fail' have strace
    want tmux 'tests of `pageone top` type keys on its terminals' have tmux
    want chromium 'tests of `pageone report` open the page in it' have chromium
    want xfsprogs 'tests of raw disks make a file system whose files can share blocks' test -x /usr/sbin/mkfs.xfs
    want curl 'scrapes the exporter in tests' have curl
    want openssl 'makes certificates for that' have openssl
    want sqlite3 'runs in a guest with databases, in tests of snapshots' have sqlite3
    want e2fsprogs "makes that guest's file systems" test -x /usr/sbin/mkfs.ext4
    want fonts-dejavu-core "the page's text, and terminals in pictures" test -e /usr/share/fonts/truetype/dejavu/DejaVuSansMono.ttf
    install_missing
    guest_agent
}

# shellcheck source=scripts/deps/debian.sh
. "$here/debian.sh"
# shellcheck source=scripts/deps/kernels.sh
. "$here/kernels.sh"
# shellcheck source=scripts/deps/roots.sh
. "$here/roots.sh"
# shellcheck source=scripts/deps/tools.sh
. "$here/tools.sh"

case ${1:-} in
    build) deps_build ;;
    demo) deps_demo ;;
    test) deps_build; deps_demo; deps_tests ;;
    aarch64) deps_aarch64 ;;
    bench) deps_build; deps_bench ;;
    fuzz) deps_build; deps_fuzz ;;
    kernels) kernel_6_1; kernel_6_12 ;;
    ppr) deps_ppr ;;
    deb) deps_build; deps_deb ;;
    packages) deps_packages ;;
    kvm-host) deps_demo; deps_kvm_host ;;
    module) deps_demo; deps_module ;;
    libvirt) deps_demo; kernel_6_1; deps_libvirt bookworm trixie ;;
    selinux) deps_demo; kernel_6_1; deps_libvirt 'trixie selinux' ;;
    book) deps_build; deps_book ;;
    alerts) deps_alerts ;;
    medium) deps_demo; deps_medium ;;
    debug-kernel) deps_debug_kernel ;;
    *) sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
say "$1: all is there"
