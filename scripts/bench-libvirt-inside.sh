#!/bin/bash
# What scripts/bench-libvirt.sh does in its container.
set -uo pipefail
# shellcheck source=scripts/test-libvirt-common.sh
. /run/pageone-test/common.sh
export TYPE=qemu
# A host's /dev/userfaultfd, as udev gives it to the group of the packages' rule: in a container nobody makes devices.
mknod -m 660 /dev/userfaultfd c 10 "$(awk '$2 == "userfaultfd" { print $1 }' /proc/misc)" && chgrp kvm /dev/userfaultfd
echo "LIBVIRT-HOST $(. /etc/os-release && echo "$PRETTY_NAME"), Linux $(uname -r), $(virsh --version), $(qemu-system-x86_64 --version | head -n 1), $(nproc) CPUs"
holds 'libvirtd answers' eventually 60 virsh -q list
quick
