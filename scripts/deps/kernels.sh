# shellcheck shell=bash
# Sourced by scripts/deps.sh: kernels of guests and of emulated hosts, their headers, and the source of those that check themselves.

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
    mkdir -p "$cache/kernels/$version/modules" || fail "cannot create $cache/kernels/$version: set PAGEONE_CACHE"
    # Newer packages compress their modules; the guest's busybox loads plain ones.
    find "$scratch/root" \( -path '*/drivers/virtio/*.ko*' -o -name 'virtio_net.ko*' -o -name 'virtio_blk.ko*' -o -name '*failover.ko*' \) \
        -exec cp {} "$cache/kernels/$version/modules/" \;
    find "$cache/kernels/$version/modules" -name '*.ko.xz' -exec xz -df {} + && : > "$cache/kernels/$version/modules/complete"
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
        [ -s "$image" ] && [ -e "${image%/*}/modules/complete" ] && [ -e "${image%/*}/modules/virtio_blk.ko" ] && { say "$image is there"; return 0; }
    done
    return 1
}

kernel_6_1() {
    if cached 6.1.; then return; fi
    need_debian_amd64
    scratch_dir
    fetch_kernel "this system's package sources"
}

kernel_6_12() {
    if cached 6.12.; then return; fi
    backports
    fetch_kernel bookworm-backports "${private[@]}"
}

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
