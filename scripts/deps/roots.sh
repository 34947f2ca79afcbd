# shellcheck shell=bash
# Sourced by scripts/deps.sh: root file systems of Debian in which packages and libvirt are tried.

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
