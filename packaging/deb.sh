#!/bin/bash
# Builds the Debian packages from programs that are built: target/debian/*.deb.
#
#   packaging/deb.sh [DIRECTORY]      DIRECTORY: where the programs are (default: target/release)
#
# Plain dpkg-deb on a folder for each package: it is on every Debian machine, and cargo-deb would be one more tool to fetch
# whose packages are the same. Depends comes from dpkg-shlibdeps, so that no library and no newer version of glibc is needed
# than the programs have.
#
# DEB_VERSION, DEB_OUT: another version than the workspace's, another place than target/debian (the test of upgrades).
# Exit: 0 all packages are there; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
programs=${1:-$target/release}
out=${DEB_OUT:-$target/debian}
fail() { echo "deb: $*" >&2; exit 1; }
version=${DEB_VERSION:-$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)}
arch=$(dpkg --print-architecture)
triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH)
date=$(git log -1 --format=%aD 2> /dev/null || date -R)
SOURCE_DATE_EPOCH=$(date -d "$date" +%s)
export SOURCE_DATE_EPOCH
for program in pageone libpageone_agent.so libpageone_template.so; do
    [ -e "$programs/$program" ] || fail "$programs/$program is missing: build it first (make build)"
done
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
chmod 755 "$stage"
mkdir -p "$out" "$stage/debian"
rm -f "$out"/*.deb
printf 'Source: pageone\n\nPackage: pageone\nArchitecture: any\n' > "$stage/debian/control"

# put MODE FILE PATH: a file of the package in $root.
put() { install -D -m "$1" "$2" "$root/$3"; }
# Links of these lead to each other: a test looks.
documents=(README.md SECURITY.md CONTRIBUTING.md CHANGELOG.md MAINTAINERS docs)
# page FILE PATH: one of them in another package; its links lead to where package pageone has the others.
page() {
    put 644 "$1" "$2"
    sed -i -E "s,\\]\\(([^):#]+)(#[^)]*)?\\),](/usr/share/doc/pageone/$(dirname "$1")/\\1\\2),g" "$root/$2"
}
# begin PACKAGE: its folder, with what every package has.
begin() {
    package=$1 root=$stage/$1
    mkdir -p "$root/DEBIAN"
    chmod 755 "$root"
    put 644 packaging/debian/copyright "usr/share/doc/$package/copyright"
    printf 'pageone (%s) unstable; urgency=medium\n\n  * /usr/share/doc/pageone/CHANGELOG.md says what changed.\n\n -- PageONE <maintainers@pageone.invalid>  %s\n' \
        "$version" "$date" | gzip -9n > "$root/usr/share/doc/$package/changelog.gz"
    local script
    for script in postinst prerm postrm; do
        [ ! -e "packaging/debian/$package.$script" ] || maintainer "packaging/debian/$package.$script" "$script"
    done
}
# maintainer FILE NAME: a maintainer script.
maintainer() {
    sed "s/@VERSION@/$version/; /^#DEBHELPER#\$/d" "$1" > "$root/DEBIAN/$2"
    chmod 755 "$root/DEBIAN/$2"
}
# libraries FILE...: what these need, as Depends names it.
libraries() { (cd "$stage" && dpkg-shlibdeps -O --ignore-missing-info "${@/#/-e}" 2> /dev/null | sed 's/^shlibs:Depends=//'); }
# end ARCHITECTURE DEPENDS SUMMARY [FIELD...]: writes the package; its description comes in.
end() {
    local architecture=$1 depends=$2 summary=$3
    shift 3
    {
        printf 'Package: %s\nSource: pageone\nVersion: %s\nArchitecture: %s\n' "$package" "$version" "$architecture"
        printf 'Maintainer: PageONE <maintainers@pageone.invalid>\nPriority: optional\n'
        [[ $* = *Section:* ]] || echo 'Section: admin'
        printf 'Installed-Size: %s\n' "$(du -sk --exclude=DEBIAN "$root" | cut -f1)"
        [ -z "$depends" ] || printf 'Depends: %s\n' "$depends"
        [ $# -eq 0 ] || printf '%s\n' "$@"
        printf 'Description: %s\n' "$summary"
        sed 's/^/ /'
    } > "$root/DEBIAN/control"
    (cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\n' | LC_ALL=C sort | xargs -r md5sum) > "$root/DEBIAN/md5sums"
    # Everybody reads them, whatever the umask here.
    find "$root" -type d -exec chmod 755 {} +
    chmod 644 "$root"/DEBIAN/{control,md5sums}
    dpkg-deb --root-owner-group -Zxz --build "$root" "$out/${package}_${version}_$architecture.deb"
}

begin pageone
put 755 "$programs/pageone" usr/bin/pageone
strip "$root/usr/bin/pageone"
put 644 "$programs/libpageone_template.so" usr/lib/pageone/libpageone_template.so
strip --strip-unneeded "$root/usr/lib/pageone/libpageone_template.so"
put 644 packaging/pageone.service lib/systemd/system/pageone.service
put 644 packaging/pageone-metrics.service lib/systemd/system/pageone-metrics.service
put 644 packaging/prometheus/alerts.yml usr/share/pageone/prometheus/alerts.yml
put 644 packaging/grafana/pageone.json usr/share/pageone/grafana/pageone.json
mkdir -p "$root/etc/pageone"
"$programs/pageone" config sample > "$root/etc/pageone/pageone.toml"
chmod 644 "$root/etc/pageone/pageone.toml"
echo /etc/pageone/pageone.toml > "$root/DEBIAN/conffiles"
"$programs/pageone" generate "$stage/pages"
for page in "$stage"/pages/man1/*; do
    gzip -9n "$page"
    put 644 "$page.gz" "usr/share/man/man1/${page##*/}.gz"
done
put 644 "$stage/pages/completions/pageone.bash" usr/share/bash-completion/completions/pageone
put 644 "$stage/pages/completions/_pageone" usr/share/zsh/vendor-completions/_pageone
put 644 "$stage/pages/completions/pageone.fish" usr/share/fish/vendor_completions.d/pageone.fish
for file in $(find "${documents[@]}" -type f); do put 644 "$file" "usr/share/doc/pageone/$file"; done
end "$arch" "libpageone-agent (= $version), init-system-helpers (>= 1.52), $(libraries "$root/usr/bin/pageone" "$root/usr/lib/pageone/libpageone_template.so")" \
    'merges identical pages of virtual machines' 'Suggests: pageone-libvirt' << 'TEXT'
Finds identical pages of memory in running guests and makes them share one
copy that nobody can write. It loads a library into QEMU, and needs no kernel
patch and nothing inside the guests.
.
This package has the daemon, its systemd unit and the command line.
TEXT

begin libpageone-agent
put 644 "$programs/libpageone_agent.so" usr/lib/pageone/libpageone_agent.so
strip --strip-unneeded "$root/usr/lib/pageone/libpageone_agent.so"
# For programs that are linked with it. It has no soname: its interface in C may change until 1.0.
mkdir -p "$root/usr/lib/$triplet"
ln -s ../pageone/libpageone_agent.so "$root/usr/lib/$triplet/libpageone_agent.so"
end "$arch" "$(libraries "$root/usr/lib/pageone/libpageone_agent.so")" 'agent of PageONE inside virtual machine monitors' << 'TEXT'
The library that PageONE loads into programs whose memory is to be merged. It
changes their mappings, safely, as the daemon of package pageone asks.
TEXT

begin libpageone-dev
put 644 include/pageone.h usr/include/pageone.h
put 644 examples/vmm.c usr/share/doc/libpageone-dev/examples/vmm.c
page docs/guide/vmm.md usr/share/doc/libpageone-dev/vmm.md
mkdir -p "$root/usr/lib/$triplet/pkgconfig"
printf 'Name: pageone\nDescription: Merging of guest memory for virtual machine monitors\nVersion: %s\nLibs: -lpageone_agent\nCflags:\n' \
    "$version" > "$root/usr/lib/$triplet/pkgconfig/pageone.pc"
end "$arch" "libpageone-agent (= $version)" 'merging for virtual machine monitors of your own' 'Section: libdevel' << 'TEXT'
The header and the example for programs that register guest memory with
PageONE themselves, without being started by it.
TEXT

begin pageone-ppr-dkms
for file in guest/linux/ppr/{Kbuild,Makefile,*.c,*.h}; do put 644 "$file" "usr/src/ppr-$version/${file##*/}"; done
sed "s/^PACKAGE_VERSION=.*/PACKAGE_VERSION=\"$version\"/" guest/linux/ppr/dkms.conf > "$root/usr/src/ppr-$version/dkms.conf"
end all 'dkms (>= 3.0)' 'kernel module for guests: memory that they free returns to the host' << 'TEXT'
Install this inside a guest. The module marks the guest's free pages, so that
the host takes them back within one period. It is built for the kernels 6.1
and 6.12; others are left alone.
TEXT

begin pageone-pageonefs-dkms
for file in host/linux/pageonefs/{Kbuild,Makefile,*.c,*.h}; do put 644 "$file" "usr/src/pageonefs-$version/${file##*/}"; done
sed "s/^PACKAGE_VERSION=.*/PACKAGE_VERSION=\"$version\"/" host/linux/pageonefs/dkms.conf > "$root/usr/src/pageonefs-$version/dkms.conf"
put 644 packaging/pageonefs.conf lib/systemd/system/pageone.service.d/pageonefs.conf
page docs/guide/module.md usr/share/doc/pageone-pageonefs-dkms/module.md
end all 'dkms (>= 3.0)' 'kernel module for hosts: memory that merges below its mappings' "Recommends: pageone (= $version)" << 'TEXT'
Install this on a host whose guests share their memory with other processes
(vhost-user, virtiofsd). The module is a file system for memory, pageonefs,
whose pages the daemon of package pageone merges, and whose mounts it may
manage with this package. It is built for the kernels 6.1 and 6.12; others
are left alone.
TEXT

if [ -e packaging/libvirt/setup ] && [ -e "$programs/qemu-system-x86_64-pageone" ]; then
    begin pageone-libvirt
    put 755 "$programs/qemu-system-x86_64-pageone" usr/bin/qemu-system-x86_64-pageone
    strip "$root/usr/bin/qemu-system-x86_64-pageone"
    put 644 packaging/libvirt/60-pageone-userfaultfd.rules usr/lib/udev/rules.d/60-pageone-userfaultfd.rules
    put 644 packaging/libvirt/apparmor usr/share/pageone/libvirt/apparmor
    put 644 packaging/libvirt/qemu.conf usr/share/pageone/libvirt/qemu.conf
    put 755 packaging/libvirt/setup usr/lib/pageone/libvirt-setup
    for file in pageone.te pageone.fc; do put 644 "packaging/libvirt/selinux/$file" "usr/share/pageone/selinux/$file"; done
    put 644 packaging/libvirt/README.md usr/share/doc/pageone-libvirt/README.md
    for script in postinst prerm postrm; do
        [ ! -e "packaging/libvirt/debian/$script" ] || maintainer "packaging/libvirt/debian/$script" "$script"
    done
    [ ! -e packaging/libvirt/debian/triggers ] || install -m 644 packaging/libvirt/debian/triggers "$root/DEBIAN/triggers"
    end "$arch" "libpageone-agent (= $version), $(libraries "$root/usr/bin/qemu-system-x86_64-pageone")" \
        "merging for libvirt's guests" "Recommends: pageone (= $version), libvirt-daemon-system, qemu-system-x86" << 'TEXT'
An emulator for libvirt that loads PageONE's agent into QEMU, and what
AppArmor, udev and libvirt must permit for it. Removing the package takes
these permissions back.
TEXT
    begin pageone-proxmox
    put 755 "$programs/qemu-system-x86_64-pageone" usr/bin/kvm
    strip "$root/usr/bin/kvm"
    page docs/guide/proxmox.md usr/share/doc/pageone-proxmox/proxmox.md
    for script in preinst postrm; do maintainer "packaging/proxmox/$script" "$script"; done
    end "$arch" "libpageone-agent (= $version), $(libraries "$root/usr/bin/kvm")" 'merging for guests of Proxmox VE' \
        "Recommends: pageone (= $version), pve-qemu-kvm" << 'TEXT'
Takes the place of /usr/bin/kvm, which Proxmox VE starts each guest with, and
becomes its QEMU with PageONE's agent in it. Removing the package puts the
link to QEMU back.
TEXT
else
    echo 'deb: SKIPPED: pageone-libvirt, pageone-proxmox (their program, qemu-system-x86_64-pageone, is not here)'
fi
