#!/bin/bash
# A host with KVM on a machine that has none: QEMU emulates an AMD processor with virtualisation and nested paging, and
# Debian's 6.12 runs on it with this machine's root file system, read-only. Times there are distorted: judge by counts, and
# by ratios to a control in the same boot.
#
#   scripts/lib/kvm-host.sh SCRIPT [NAME=VALUE...]
#
# SCRIPT (bash) runs there as root, with these variables. /tmp, /run and /dev/shm are empty and may be written. Its output is
# this program's, with the kernel's complaints, which begin with "kernel: ". PAGEONE_CACHE is a directory with links to what the
# cache has here. Programs among the variables, and those in the directory BIN, are copied first: one that is built anew meanwhile
# would there be a mixture of both, which ends by a signal.
# Settings:
#   PAGEONE_KVM_MEMORY   MiB (6144)
#   PAGEONE_KVM_CPUS     (2)
#   PAGEONE_KVM_TIMEOUT  seconds (5400)
#   PAGEONE_KVM_STOCK    1: the emulator as it is installed, with its faults (see below)
#   PAGEONE_KVM_STOPS    1: the emulator stops and goes on 20 times a second, which shows the first of them
# Exit: that of SCRIPT; 1 also when the host crashed, or was not done in time.
set -euo pipefail
cd "$(dirname "$0")/../.."
script=${1:?a script that runs in the host}
shift
case $PWD/ in
    /tmp/* | /run/* | /dev/shm/*)
        echo "kvm-host: the host has a /tmp, /run and /dev/shm of its own, so that $PWD is not there: move the sources" >&2
        exit 1 ;;
esac
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
root=$cache/kvm-host
[ -e "$root/complete" ] || { echo "kvm-host: $root is missing: run 'scripts/deps.sh kvm-host'" >&2; exit 1; }
version=$(ls "$root/lib/modules")
work=$(mktemp -d /var/tmp/pageone-kvm-host.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{programs,image/{bin,proc,sys,dev,host,modules}}
cp "$(command -v busybox)" "$work/image/bin/"
cp guest/kvm-host/init "$work/image/init"
cp "$script" "$work/image/script"
# The cache can be written there, since guests' archives are made in it; the kernels are this machine's.
printf '%s\n' 'mkdir -p /run/cache' "ln -s $(printf %q "$cache")/* /run/cache/" 'export PAGEONE_CACHE=/run/cache' > "$work/image/variables"
for variable; do
    name=${variable%%=*} value=${variable#*=}
    if [ "$name" = BIN ]; then
        find "$value" -maxdepth 1 -type f -perm -100 -exec cp -t "$work/programs" {} +
        value=$work/programs
    elif [ -f "$value" ] && [ -x "$value" ]; then
        cp "$value" "$work/programs/"
        value=$work/programs/${value##*/}
    fi
    printf 'export %q\n' "$name=$value" >> "$work/image/variables"
done
# shellcheck source=scripts/lib/guest-modules.sh
. scripts/lib/guest-modules.sh
guest_modules "$root" "$work/image/modules" virtio_pci 9pnet_virtio 9p kvm-amd vhost_net tun
chmod 755 "$work/image/init"
(cd "$work/image" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) > "$work/initrd"
# shellcheck source=scripts/lib/emulator.sh
. scripts/lib/emulator.sh
emulator "$work"
# stops: commands for the emulator's monitor.
stops() {
    [ "${PAGEONE_KVM_STOPS:-0}" = 1 ] || return 0
    sleep 20
    while printf 'stop\ncont\n'; do sleep 0.05; done
}
timeout "${PAGEONE_KVM_TIMEOUT:-5400}" "${emulator[@]}" \
    -smp "${PAGEONE_KVM_CPUS:-2}" -m "${PAGEONE_KVM_MEMORY:-6144}" -kernel "$root/vmlinuz" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off" \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" -monitor stdio < <(stops) > /dev/null &
emulated $! "$work" KVM-HOST-ENDED
