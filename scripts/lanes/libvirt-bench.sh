#!/bin/bash
# From nothing to merged guests: how long the guide's three commands take under libvirt, on this machine's processors.
#
#   scripts/lanes/libvirt-bench.sh [RELEASE]     bookworm (Debian 12, without an argument) or trixie (Debian 13)
#
# Two guests run in a container of Debian as its packages leave it, with systemd and libvirt; nobody has prepared them. Then:
# the packages are installed, the guests are attached (libvirt 11 on) or started again, and `pageone status` is asked until it
# shows memory of both as merged, with the configuration of the packages. Guests run without KVM, in QEMU's emulator, so that
# they boot slower than a user's. Nothing is installed here. Exit: 0 it was measured; 1 a step failed; 2 it cannot run here.
set -uo pipefail

# ---- in the container ------------------------------------------------------------------------------
if [ -n "${INSIDE:-}" ]; then
    # shellcheck source=scripts/lib/libvirt-guests.sh
    . /run/pageone-test/common.sh
    export TYPE=qemu
    # A host's /dev/userfaultfd, as udev gives it to the group of the packages' rule: in a container nobody makes devices.
    mknod -m 660 /dev/userfaultfd c 10 "$(awk '$2 == "userfaultfd" { print $1 }' /proc/misc)" && chgrp kvm /dev/userfaultfd
    echo "LIBVIRT-HOST $(. /etc/os-release && echo "$PRETTY_NAME"), Linux $(uname -r), $(virsh --version), $(qemu-system-x86_64 --version | head -n 1), $(nproc) CPUs"
    holds 'libvirtd answers' eventually 60 virsh -q list
    quick
    exit
fi

# ---- on this machine -------------------------------------------------------------------------------
set -e
cd "$(dirname "$0")/../.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
bin=$(realpath "${CARGO_TARGET_DIR:-target}/release")
image=$cache/libvirt-${1:-bookworm}/root.img
[ "$(id -u)" -eq 0 ] || { echo 'bench-libvirt: SKIPPED: only root can start a container' >&2; exit 2; }
command -v systemd-nspawn > /dev/null || { echo 'bench-libvirt: SKIPPED: there is no systemd-nspawn (package systemd-container)' >&2; exit 2; }
[ -e "$image" ] || { echo "bench-libvirt: $image is missing: run 'scripts/deps.sh libvirt'" >&2; exit 2; }
for file in pageone libpageone_agent.so libpageone_template.so qemu-system-x86_64-pageone; do
    [ -e "$bin/$file" ] || { echo "bench-libvirt: $bin/$file is missing: run 'make build'" >&2; exit 2; }
done
work=$(mktemp -d /tmp/pageone-libvirt.XXXXXX)
cleanup() {
    ! mountpoint -q "$work/root" || umount "$work/root"
    rm -rf "$work"
}
trap cleanup EXIT
# shellcheck source=scripts/lib/libvirt-share.sh
. scripts/lib/libvirt-share.sh
libvirt_share scripts/lanes/libvirt-bench.sh "$bin"
cp --sparse=always "$image" "$work/root.img"
mkdir "$work/root"
mount -o loop "$work/root.img" "$work/root"
# A container may not make control groups of the first version.
echo 'cgroup_controllers = []' >> "$work/root/etc/libvirt/qemu.conf"
cat > "$work/root/etc/systemd/system/bench.service" << 'UNIT'
[Unit]
After=libvirtd.service virtlogd.service
Wants=libvirtd.service
[Service]
Type=oneshot
ExecStart=/bin/bash -c 'INSIDE=1 bash /run/pageone-test/inside.sh > /result 2>&1'
ExecStopPost=/bin/systemctl poweroff --no-block
TimeoutStartSec=900
UNIT
mkdir -p "$work/root/etc/systemd/system/multi-user.target.wants"
ln -s ../bench.service "$work/root/etc/systemd/system/multi-user.target.wants/"
# Nobody has to answer for the container's name or its network: it has none of them.
timeout 1200 systemd-nspawn -q -D "$work/root" --register=no --keep-unit --capability=all --bind-ro="$work/share:/run/pageone-test" \
    --boot --console=pipe < /dev/null > "$work/container" 2>&1 || true
[ -e "$work/root/result" ] || { echo "bench-libvirt: the container has said nothing:"; tail -n 20 "$work/container"; exit 1; }
cat "$work/root/result"
grep -q '^LIBVIRT-QUICK' "$work/root/result" && ! grep -q '^LIBVIRT .*FAILED' "$work/root/result"
