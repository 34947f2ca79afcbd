#!/bin/bash
# Installs the packages that PageONE needs on Debian, and names each with its reason first.
#
#   scripts/deps.sh build     what compiling needs
#   scripts/deps.sh demo      what `pageone demo` needs: QEMU, busybox, a guest kernel
#   scripts/deps.sh test      both, and what tests of errors, disks, the screen and the report need: strace, xfsprogs, tmux, Chromium, qemu-guest-agent
#   scripts/deps.sh aarch64   the standard library that `make lint` checks the workspace for aarch64 with; rustup adds it
#   scripts/deps.sh deb       what building the Debian packages needs (`make deb`)
#   scripts/deps.sh packages  that, and roots of Debian 12 in which they are tried, one with dkms (`make test-packages`)
#   scripts/deps.sh bench     rivals in the benches: Debian's ksmtuned, unpacked into the cache and not installed (it would start);
#                             RocksDB's library (for `--features rocksdb`), fio
#   scripts/deps.sh fuzz      what `make fuzz` needs: a nightly toolchain and cargo-fuzz
#   scripts/deps.sh kernels   the guest kernels to test with: Debian's 6.1 and 6.12 cloud kernels
#   scripts/deps.sh kvm-host  the emulated host of scripts/kvm-host.sh: Debian's 6.12 with its modules
#   scripts/deps.sh module    the same, and what building the host's module for it needs (`make test-module`)
#   scripts/deps.sh libvirt   that kernel, and Debian 12 and 13 with libvirt and AppArmor for `make test-libvirt`: images in the cache
#   scripts/deps.sh selinux   the same with Debian 13 and SELinux, for `make test-selinux`
#   scripts/deps.sh medium    that kernel, and what makes its file systems on failing devices (`make test-pool-medium`)
#   scripts/deps.sh debug-kernel   what building the kernels of scripts/debug-kernel.sh needs, with Debian's source of Linux 6.12
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

# ---- packages -----------------------------------------------------------------------------------

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
    DEBIAN_FRONTEND=noninteractive $line || { refresh && DEBIAN_FRONTEND=noninteractive $line; } ||
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
    want fonts-dejavu-core "the page's text, and terminals in pictures" test -e /usr/share/fonts/truetype/dejavu/DejaVuSansMono.ttf
    install_missing
    guest_agent
}

# Debian's qemu-guest-agent with its libraries, as an archive behind a guest's initramfs: $cache/guest-agent.cpio. It is
# not installed, since it would start a service. QEMU needs the same libraries, so they are here.
guest_agent() {
    local archive=$cache/guest-agent.cpio root library without='a test of clones is skipped'
    [ ! -e "$archive" ] || { say "$archive is there"; return; }
    if ! have apt-get >/dev/null || ! have dpkg-deb >/dev/null; then say "there is no apt-get here: $without"; return; fi
    scratch_dir
    root=$scratch/guest-agent
    say "fetches qemu-guest-agent and unpacks it to $archive (nothing is installed)"
    if ! (cd "$scratch" && { apt-get -qq download qemu-guest-agent || { refresh && apt-get -qq download qemu-guest-agent; }; }) ||
        ! dpkg-deb -x "$scratch"/qemu-guest-agent_*.deb "$scratch/unpacked"; then
        say "cannot fetch qemu-guest-agent: $without" && return
    fi
    mkdir -p "$root/usr/sbin" "$cache" && cp "$scratch/unpacked/usr/sbin/qemu-ga" "$root/usr/sbin/"
    if LC_ALL=C ldd "$root/usr/sbin/qemu-ga" | grep 'not found'; then say "qemu-guest-agent lacks these libraries: $without"; return; fi
    for library in $(ldd "$root/usr/sbin/qemu-ga" | grep -o '/[^ ]*'); do
        mkdir -p "$root/${library%/*}" && cp -L "$library" "$root/$library"
    done
    (cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null) > "$archive.part" && mv "$archive.part" "$archive" || fail "cannot write $archive"
}

# ---- guest kernels ------------------------------------------------------------------------------

scratch_dir() {
    [ -z "$scratch" ] || return 0
    scratch=$(mktemp -d /tmp/pageone-deps.XXXXXX)
    # apt downloads as the user _apt where it can.
    chmod 755 "$scratch"
    if [ "$(id -u)" -eq 0 ] && id _apt >/dev/null 2>&1; then chown _apt "$scratch"; fi
}

need_debian_amd64() {
    local tool
    for tool in apt-get apt-cache dpkg-deb; do
        have "$tool" >/dev/null ||
            fail "$tool is missing, so Debian's kernels cannot be fetched: give 'pageone demo --kernel FILE'"
    done
    [ "$(dpkg --print-architecture)" = amd64 ] ||
        fail "the guests are x86-64: on $(dpkg --print-architecture) give 'pageone demo --kernel FILE'"
}

# fetch_kernel SOURCE [APT-OPTION...]: unpacks what linux-image-cloud-amd64 depends on.
fetch_kernel() {
    local source=$1 package version
    shift
    newest() {
        # An empty answer is no error here.
        apt-cache "$@" depends linux-image-cloud-amd64 2>/dev/null |
            sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1 || true
    }
    package=$(newest "$@")
    if [ -z "$package" ] && refresh; then package=$(newest "$@"); fi
    [ -n "$package" ] ||
        fail "apt knows no linux-image-cloud-amd64 in $source: run '${sudo_prefix}apt-get update', or give 'pageone demo --kernel FILE'"
    version=${package#linux-image-}
    if cached "$version"; then return; fi
    say "fetches $package from $source and unpacks its vmlinuz and virtio modules to $cache/kernels/$version (guests boot it; nothing is installed)"
    (cd "$scratch" && apt-get -qq "$@" download "$package") ||
        fail "cannot download $package: run '${sudo_prefix}apt-get update' and check the network"
    mkdir "$scratch/root"
    dpkg-deb -x "$scratch/$package"_*.deb "$scratch/root" || fail "cannot unpack $package"
    mkdir -p "$cache/kernels/$version" || fail "cannot create $cache/kernels/$version: set PAGEONE_CACHE"
    mkdir -p "$cache/kernels/$version/modules"
    # Newer packages compress their modules; the guest's busybox loads plain ones.
    find "$scratch/root" \( -path '*/drivers/virtio/*.ko*' -o -name 'virtio_net.ko*' -o -name '*failover.ko*' \) \
        -exec cp {} "$cache/kernels/$version/modules/" \;
    find "$cache/kernels/$version/modules" -name '*.ko.xz' -exec xz -df {} +
    : > "$cache/kernels/$version/modules/complete"
    # Renamed into place: an interrupted run leaves no half kernel that looks whole.
    cp "$scratch/root/boot/vmlinuz-$version" "$cache/kernels/$version/vmlinuz.part" &&
        mv "$cache/kernels/$version/vmlinuz.part" "$cache/kernels/$version/vmlinuz" ||
        fail "cannot write $cache/kernels/$version/vmlinuz: is the disk full?"
    rm -rf "$scratch/root" "$scratch/$package"_*.deb
}

# cached PREFIX: whether some kernel whose version starts with PREFIX is in the cache.
cached() {
    local image
    for image in "$cache"/kernels/"$1"*/vmlinuz; do
        [ -s "$image" ] && [ -e "${image%/*}/modules/complete" ] && { say "$image is there"; return 0; }
    done
    return 1
}

kernel_6_1() {
    if cached 6.1.; then return; fi
    need_debian_amd64
    scratch_dir
    fetch_kernel "this system's package sources"
}

# debian_mirror: sets `mirror` to the one that apt is set to use for Debian's own packages.
debian_mirror() {
    [ -e "$keyring" ] || fail "$keyring is missing, so packages cannot be verified: install debian-archive-keyring"
    # shellcheck disable=SC2016  # apt expands these
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        sed -n 's/^Debian \(.*\)/\1/p' | grep -v security | head -n 1) || true
    [ -n "$mirror" ] ||
        yours "name a mirror of Debian in /etc/apt/sources.list (apt has no source of Debian's packages, so there is none to" \
            "take them from), run '${sudo_prefix}apt-get update', and run this again"
}

# Debian 12 has 6.12 in bookworm-backports. The host's own apt configuration stays as it is: lists
# and sources are private to this run. Sets `private` to apt's options for it.
private=()
backports() {
    [ ${#private[@]} -eq 0 ] || return 0
    need_debian_amd64
    scratch_dir
    debian_mirror
    mkdir -p "$scratch/lists/partial" "$scratch/archives/partial"
    if [ "$(id -u)" -eq 0 ] && id _apt >/dev/null 2>&1; then
        chown -R _apt "$scratch/lists" "$scratch/archives"
    fi
    echo "deb [signed-by=$keyring] $mirror bookworm-backports main" > "$scratch/sources.list"
    private=(
        -o "Dir::Etc::sourcelist=$scratch/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::Lists=$scratch/lists" -o "Dir::Cache=$scratch"
        -o "Dir::Cache::archives=$scratch/archives" -o Acquire::Languages=none
    )
    say "reads the package list of bookworm-backports from $mirror (into a private, temporary place)"
    apt-get -qq "${private[@]}" update ||
        fail "cannot read bookworm-backports from $mirror: check the network, or that the mirror has it"
}

kernel_6_12() {
    if cached 6.12.; then return; fi
    backports
    fetch_kernel bookworm-backports "${private[@]}"
}

# ---- headers, for the guest's module ------------------------------------------------------------

deps_ppr() {
    want gcc-12 'Debian built its kernels with it, and modules are built alike' have gcc-12
    want make 'builds the module' have make
    install_missing
    kernel_6_1
    kernel_6_12
    local image version
    for image in "$cache"/kernels/*/vmlinuz; do
        version=$(basename "${image%/vmlinuz}")
        case $version in 6.1.* | 6.12.*) headers "$version" ;; esac
    done
}

# headers VERSION: unpacks the headers of a cached kernel, what all its flavours share, and the build tools.
headers() {
    local version=$1 root=$cache/headers/$1 package part packages=() options=()
    local common=${version%-amd64}
    common=linux-headers-${common%-cloud}-common
    if [ -e "$root/complete" ]; then say "$root is there"; return; fi
    need_debian_amd64
    scratch_dir
    case $version in 6.12.*) backports; options=("${private[@]}") ;; esac
    # linux-kbuild's name follows the series in one release and the version in the other.
    part=$(apt-cache "${options[@]}" depends "linux-headers-$version" 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-kbuild-[0-9].*\)$/\1/p' | head -n 1) || true
    [ -n "$part" ] ||
        fail "apt has no headers for the cached kernel $version any more: remove $cache/kernels/$version, run '${sudo_prefix}apt-get update', and run this again"
    packages=("linux-headers-$version" "$common" "$part")
    say "fetches ${packages[*]} and unpacks them to $root (nothing is installed)"
    for package in "${packages[@]}"; do
        (cd "$scratch" && apt-get -qq "${options[@]}" download "$package") || fail "cannot download $package"
        mkdir -p "$root" && dpkg-deb -x "$scratch/$package"_*.deb "$root" || fail "cannot unpack $package to $root"
        rm -f "$scratch/$package"_*.deb
    done
    # They name each other as if they were installed.
    sed -i "s#^include /usr/src/#include $root/usr/src/#" "$root/usr/src/linux-headers-$version/Makefile"
    touch "$root/complete"
}

# ---- a host with KVM ------------------------------------------------------------------------------

# The kernel and its modules, as the package has them: $cache/kvm-host/{vmlinuz,lib/modules/VERSION}.
deps_kvm_host() {
    want kmod 'the host loads KVM and the file system that it shares with this machine' have depmod
    install_missing
    local root=$cache/kvm-host package version
    if [ -e "$root/complete" ]; then say "$root is there"; return; fi
    backports
    package=$(apt-cache "${private[@]}" depends linux-image-amd64 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1) || true
    [ -n "$package" ] || fail "apt knows no linux-image-amd64 in bookworm-backports"
    version=${package#linux-image-}
    say "fetches $package from bookworm-backports and unpacks it to $root (nothing is installed)"
    (cd "$scratch" && apt-get -qq "${private[@]}" download "$package") || fail "cannot download $package"
    rm -rf "$root" && mkdir -p "$root" && dpkg-deb -x "$scratch/$package"_*.deb "$scratch/kvm-host" &&
        mv "$scratch/kvm-host/lib" "$root/lib" && mv "$scratch/kvm-host/boot/vmlinuz-$version" "$root/vmlinuz" &&
        depmod -b "$root" "$version" || fail "cannot unpack $package to $root"
    touch "$root/complete"
}

# The same, and what building the host's module for it needs.
deps_module() {
    deps_ppr
    deps_kvm_host
    headers "$(ls "$cache/kvm-host/lib/modules")"
}

# ---- a host with libvirt --------------------------------------------------------------------------

# libvirt_host RELEASE [selinux]: Debian as its packages leave it: $cache/libvirt-RELEASE/root.img, ext4. The emulated host writes
# to a copy. With `selinux` it is $cache/libvirt-RELEASE-selinux, whose files have the labels of Debian's policy.
libvirt_host() {
    local root=$cache/libvirt-$1${2:+-$2} tree mirror packages hook=()
    packages=systemd-sysv,udev,dbus,kmod,procps,apparmor,libvirt-daemon-system,libvirt-clients,libvirt-daemon-driver-qemu,qemu-system-x86
    if [ "${2:-}" = selinux ]; then
        packages+=,selinux-policy-default,selinux-policy-dev,policycoreutils,semodule-utils,checkpolicy,selinux-utils,make,m4
        # shellcheck disable=SC2016  # mmdebstrap sets it
        hook=(--customize-hook='chroot "$1" setfiles -F /etc/selinux/default/contexts/files/file_contexts /')
    fi
    if [ -e "$root/complete" ]; then say "$root is there"; return; fi
    [ "$(id -u)" -eq 0 ] || yours "run 'sudo scripts/deps.sh libvirt' (the image has files of several users)"
    need_debian_amd64
    scratch_dir
    debian_mirror
    tree=$scratch/${root##*/}
    say "installs $packages from $mirror into an image, $root/root.img (nothing is installed here)"
    mmdebstrap --quiet --variant=minbase --include="$packages" --dpkgopt=path-exclude=/usr/share/doc/* \
        --dpkgopt=path-exclude=/usr/share/locale/* --dpkgopt=path-exclude=/usr/share/man/* "${hook[@]}" \
        "$1" "$tree" "deb [signed-by=$keyring] $mirror $1 main" ||
        fail "cannot install libvirt from $mirror"
    mkdir -p "$root" && /usr/sbin/mke2fs -q -t ext4 -F -d "$tree" "$root/root.img" 4G ||
        fail "cannot write $root/root.img: is the disk full?"
    rm -rf "$tree"
    touch "$root/complete"
}

deps_libvirt() {
    want mmdebstrap 'makes the root file system of the host with libvirt' have mmdebstrap
    want e2fsprogs 'makes an image of it' test -x /usr/sbin/mke2fs
    install_missing
    deps_kvm_host
    for release in "$@"; do libvirt_host $release; done
}

# ---- devices that fail ----------------------------------------------------------------------------

deps_medium() {
    want dmsetup 'sets up devices that log what is written, and devices that fail' test -x /usr/sbin/dmsetup
    want e2fsprogs 'makes ext4 in the guest' test -x /usr/sbin/mkfs.ext4
    want xfsprogs 'makes XFS in the guest' test -x /usr/sbin/mkfs.xfs
    want btrfs-progs 'makes btrfs in the guest' test -x /usr/sbin/mkfs.btrfs
    install_missing
    deps_kvm_host
}

# ---- packages -------------------------------------------------------------------------------------

deps_deb() {
    want dpkg-dev 'finds the libraries that the packages depend on' have dpkg-shlibdeps
    want binutils 'strips the programs' have strip
    install_missing
}

# A root with what every Debian 12 has, and systemd for its tools: $cache/packages-root.tar. And one with dkms, and the headers of
# the two kernels that the modules are for: $cache/packages-dkms.tar.
deps_packages() {
    want systemd-container 'runs the service in that root, under systemd' have systemd-nspawn
    deps_deb
    packages_root packages-root systemd
    [ -e "$cache/packages-dkms.tar" ] && { say "$cache/packages-dkms.tar is there"; return; }
    backports
    local newer
    newer=$(apt-cache "${private[@]}" depends linux-headers-amd64 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-headers-[0-9].*\)$/\1/p' | head -n 1) || true
    [ -n "$newer" ] || fail "apt knows no linux-headers-amd64 in bookworm-backports"
    # With openssl dkms signs what it builds.
    packages_root packages-dkms "dkms,openssl,linux-headers-amd64,$newer" bookworm-backports
}

# packages_root NAME PACKAGES [SUITE]: a root of Debian 12 with these, also from another suite: $cache/NAME.tar.
packages_root() {
    local root=$cache/$1.tar suite sources=()
    if [ -e "$root" ]; then say "$root is there"; return; fi
    need_debian_amd64
    want mmdebstrap 'makes a root of Debian 12, in which the packages are installed' have mmdebstrap
    install_missing
    refresh || true
    debian_mirror
    mkdir -p "$cache"
    for suite in bookworm ${3:-}; do sources+=("deb [signed-by=$keyring] $mirror $suite main"); done
    say "makes a root of Debian 12 with $2 from $mirror: $root (nothing is installed here)"
    mmdebstrap --quiet --format=tar --variant=essential --include="$2" bookworm "$root.part" "${sources[@]}" ||
        fail "cannot make a root of Debian 12 from $mirror"
    mv "$root.part" "$root"
}

# ---- kernels that check themselves ---------------------------------------------------------------

deps_debug_kernel() {
    want gcc "compiles the kernel" have gcc
    want make "builds the kernel" have make
    want flex "the kernel's Kconfig is made with it" have flex
    want bison "the kernel's Kconfig is made with it" have bison
    want bc "computes the kernel's time constants" have bc
    want libelf-dev "the kernel's objtool reads objects with it" test -e /usr/include/libelf.h
    want linux-source-6.12 "the kernel's source (Debian 12 has it among its security updates)" test -e /usr/src/linux-source-6.12.tar.xz
    install_missing
}

# ---- rivals -------------------------------------------------------------------------------------

deps_bench() {
    want librocksdb-dev "RocksDB as a rival of mpool: cargo build --release -p bench-structures --features rocksdb" test -e /usr/include/rocksdb/c.h
    want fio "mpool's sequential bench compares with it" have fio
    install_missing
    if [ -e /usr/sbin/ksmtuned ] || [ -e "$cache/ksmtuned/usr/sbin/ksmtuned" ]; then return; fi
    have apt-get >/dev/null || fail "there is no apt-get here: the benches run without ksmtuned, and say so"
    scratch_dir
    say "fetches ksmtuned and unpacks it to $cache/ksmtuned"
    (cd "$scratch" && apt-get -qq download ksmtuned) || fail "cannot download ksmtuned: run '${sudo_prefix}apt-get update'"
    mkdir -p "$cache/ksmtuned" && dpkg-deb -x "$scratch"/ksmtuned_*.deb "$cache/ksmtuned" ||
        fail "cannot unpack ksmtuned to $cache/ksmtuned"
}

# ---- another architecture -----------------------------------------------------------------------

deps_aarch64() {
    local target=aarch64-unknown-linux-gnu
    [ ! -d "$(rustc --print target-libdir --target "$target")" ] || return 0
    have rustup >/dev/null ||
        yours "install the standard library of Rust for $target (rustup is not here, which would add it)"
    say "runs: rustup target add $target (150 MB in this toolchain)"
    rustup target add "$target" || fail "rustup could not add $target: check the network"
}

# ---- alerts ---------------------------------------------------------------------------------------

# Debian's promtool, unpacked: $cache/promtool. The package would start a Prometheus here.
deps_alerts() {
    if [ -x "$cache/promtool" ]; then say "$cache/promtool is there"; return; fi
    need_debian_amd64
    scratch_dir
    say "fetches prometheus and unpacks its promtool to $cache/promtool (nothing is installed)"
    (cd "$scratch" && { apt-get -qq download prometheus || { refresh && apt-get -qq download prometheus; }; }) ||
        fail "cannot download prometheus: run '${sudo_prefix}apt-get update' and check the network"
    dpkg-deb --fsys-tarfile "$scratch"/prometheus_*.deb | tar -xO ./usr/bin/promtool > "$scratch/promtool" &&
        chmod 755 "$scratch/promtool" && mkdir -p "$cache" && mv "$scratch/promtool" "$cache/promtool" ||
        fail "cannot write $cache/promtool: is the disk full?"
}

# ---- fuzzing ------------------------------------------------------------------------------------

# Debian packages neither, and both go into the user's home directory, so the user decides.
deps_fuzz() {
    rustc +nightly --version >/dev/null 2>&1 ||
        yours "rustup toolchain install nightly    (fuzzing needs a nightly compiler's sanitizers)"
    have cargo-fuzz >/dev/null || yours "cargo install cargo-fuzz    (it drives libFuzzer)"
}

# -------------------------------------------------------------------------------------------------

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
    alerts) deps_alerts ;;
    medium) deps_demo; deps_medium ;;
    debug-kernel) deps_debug_kernel ;;
    *) sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
say "$1: all is there"
