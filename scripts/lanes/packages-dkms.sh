#!/bin/bash
# Installs, upgrades, removes and purges the packages of the two kernel modules in a fresh root of Debian 12 with dkms and the
# headers of its kernels, 6.1 and 6.12: dkms builds the modules for both.
#
#   scripts/lanes/packages-dkms.sh OLD NEW      folders with the packages, in two versions
#
# scripts/lanes/packages.sh runs it. The root comes from `scripts/deps.sh packages`. Nothing is installed or loaded here.
# Exit: 0 all checks hold; 1 some do not, and each is named; 2 it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=test-packages-dkms tar=packages-dkms.tar
# shellcheck source=scripts/lib/packages-root.sh
. scripts/lib/packages-root.sh
mkdir "$root/packages"
for deb in "$1" "$2"; do mkdir "$root/packages/${deb##*/}" && cp "$deb"/pageone-*-dkms_*.deb "$root/packages/${deb##*/}/"; done
old=packages/${1##*/} new=packages/${2##*/}
ln -s /proc/self/fd "$root/dev/fd"
versions() { dpkg-deb -f "$root/$1"/pageone-ppr-dkms_*.deb Version; }
# dkms makes its key at the first build, and depmod its tables: they belong to these.
files() { (cd "$root" && find . -path ./proc -prune -o -path ./packages -prune -o -path ./var/log -prune -o -path ./var/cache -prune \
    -o -path './var/lib/dkms/mok.*' -prune -o -path './usr/lib/modules/*/modules.*' -prune -o -path './var/lib/dpkg/*-old' -prune \
    -o -path ./tmp -prune -o -print | LC_ALL=C sort); }
kernels=$(ls "$root/lib/modules")
files > "$work/before"

# built VERSION: both modules, for both kernels.
built() {
    local kernel module
    for kernel in $kernels; do
        for module in pageonefs ppr; do
            holds "$module $1 is installed for $kernel" inside sh -c "dkms status $module/$1 -k $kernel | grep -q ': installed'"
            holds "modinfo finds $module for $kernel" inside modinfo -k "$kernel" -F license "$module"
            holds "it is built for $kernel" inside sh -c "modinfo -k $kernel -F vermagic $module | grep -q '^$kernel '"
            holds "it is signed for $kernel" inside sh -c "modinfo -k $kernel -F signer $module | grep -q DKMS"
        done
        holds "mounting loads it on $kernel" grep -q '^alias fs-pageonefs pageonefs$' "$root/lib/modules/$kernel/modules.alias"
    done
}
holds 'they install' dpkg_inside -i $(cd "$root" && printf '/%s ' "$old"/*.deb)
holds 'both series of kernels are here' test "$(grep -cE '^6\.(1|12)\.' <<< "$kernels")" -eq 2
built "$(versions "$old")"
holds 'what is there is what was packed' inside dpkg --verify pageone-pageonefs-dkms pageone-ppr-dkms
holds 'the tests are left out' not test -e "$root/usr/src/pageonefs-$(versions "$old")/test"
holds 'its licence is there' grep -q 'host/linux/pageonefs' "$root/usr/share/doc/pageone-pageonefs-dkms/copyright"
holds 'its page is there' grep -q pageonefs "$root/usr/share/doc/pageone-pageonefs-dkms/module.md"
holds 'the daemon may manage mounts' grep -q '^CapabilityBoundingSet=CAP_SYS_ADMIN$' "$root/lib/systemd/system/pageone.service.d/pageonefs.conf"

holds 'they upgrade' dpkg_inside -i $(cd "$root" && printf '/%s ' "$new"/*.deb)
# On an upgrade Debian's dkms builds for the kernel that runs and the newest one. For others this does.
for kernel in $kernels; do holds "dkms builds for $kernel" inside dkms autoinstall -k "$kernel"; done
built "$(versions "$new")"
holds 'the older source went' not test -e "$root/usr/src/pageonefs-$(versions "$old")"
holds 'the older modules went' not test -e "$root/var/lib/dkms/pageonefs/$(versions "$old")"

holds 'they go' dpkg_inside -r pageone-pageonefs-dkms pageone-ppr-dkms
holds 'they are purged' dpkg_inside -P pageone-pageonefs-dkms pageone-ppr-dkms
files > "$work/after"
holds 'a purge leaves nothing' diff "$work/before" "$work/after"
holds 'no module is left' not grep -rq 'pageonefs\|ppr\.ko' "$root"/lib/modules/*/modules.dep "$root"/lib/modules/*/modules.alias
echo "modules by dkms, $(tr '\n' ' ' <<< "$kernels"): $passed passed, $failed failed"
[ "$failed" -eq 0 ]
