#!/bin/bash
# A host with KVM on a machine that has none: QEMU emulates an AMD processor with virtualisation and nested paging, and
# Debian's 6.12 runs on it with this machine's root file system, read-only. Times there are distorted: judge by counts, and
# by ratios to a control in the same boot.
#
#   scripts/kvm-host.sh SCRIPT [NAME=VALUE...]
#
# SCRIPT (bash) runs there as root, with these variables. /tmp, /run and /dev/shm are empty and may be written. Its output is
# this program's, with the kernel's complaints, which begin with "kernel: ".
# Settings: PAGEONE_KVM_MEMORY (MiB, 6144), PAGEONE_KVM_CPUS (2), PAGEONE_KVM_TIMEOUT (seconds, 5400).
# Exit: that of SCRIPT; 1 also when the host crashed, or was not done in time.
set -euo pipefail
cd "$(dirname "$0")/.."
script=${1:?a script that runs in the host}
shift
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
root=$cache/kvm-host
[ -e "$root/complete" ] || { echo "kvm-host: $root is missing: run 'scripts/deps.sh kvm-host'" >&2; exit 1; }
version=$(ls "$root/lib/modules")
work=$(mktemp -d /tmp/pageone-kvm-host.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/image/{bin,proc,sys,dev,host,modules}
cp "$(command -v busybox)" "$work/image/bin/"
cp guest/kvm-host/init "$work/image/init"
cp "$script" "$work/image/script"
printf 'export %q\n' "$@" > "$work/image/variables"
number=10
for module in virtio_pci 9pnet_virtio 9p kvm-amd vhost_net tun; do
    modprobe -d "$root" -S "$version" --show-depends "$module"
done | awk '/^insmod/ && !seen[$2]++ { print $2 }' | while read -r file; do
    number=$((number + 1))
    case $file in
        *.xz) xz -dc "$file" > "$work/image/modules/$number-$(basename "$file" .xz)" ;;
        *) cp "$file" "$work/image/modules/$number-$(basename "$file")" ;;
    esac
done
chmod 755 "$work/image/init"
(cd "$work/image" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) > "$work/initrd"
# Without cmpxchg16b, which QEMU 7.2 emulates with wrong flags.
timeout "${PAGEONE_KVM_TIMEOUT:-5400}" qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu max,-cx16,+svm \
    -smp "${PAGEONE_KVM_CPUS:-2}" -m "${PAGEONE_KVM_MEMORY:-6144}" -kernel "$root/vmlinuz" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off" \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" -monitor none < /dev/null &
qemu=$!
trap 'kill "$qemu" 2>/dev/null || true; wait "$qemu" 2>/dev/null || true; rm -rf "$work"' EXIT
tail -n +1 -s 0.2 -F --pid="$qemu" "$work/console" 2>/dev/null | tr -d '\r' &
shown=$!
wait "$qemu" || echo "kvm-host: QEMU ended with $?" >&2
wait "$shown" || true
code=$(tr -d '\r' < "$work/console" | sed -n 's/^KVM-HOST-ENDED //p' | tail -n 1)
if [ -z "$code" ]; then
    echo "kvm-host: the host ended before the script did" >&2
    exit 1
fi
exit "$code"
