#!/bin/bash
# What scripts/lanes/libvirt.sh does in its host with SELinux: the policy module is built and loaded, SELinux enforces, and a guest
# that libvirt confines is merged. Then without the module: a guest runs, and its log says what is denied, and by whom.
#
# Each line that begins with "LIBVIRT " is a result.
set -uo pipefail
# shellcheck source=scripts/lib/libvirt-guests.sh
. /run/pageone-test/common.sh

echo "LIBVIRT-HOST $(. /etc/os-release && echo "$PRETTY_NAME"), Linux $(uname -r), $(virsh --version), $(qemu-system-x86_64 --version | head -n 1), SELinux $(cat /sys/fs/selinux/enforce), policy $(dpkg-query -Wf '${Version}' selinux-policy-default)"
# While there is a virtual CPU the kernel patches none of its code; see guest/kvm-host/init.
qemu-system-x86_64 -accel kvm -S -m 16 -nodefaults -no-user-config -display none > /dev/null 2>&1 < /dev/null &
holds 'libvirtd answers' eventually 120 virsh -q list
# avcs TYPE: what was denied to a domain, once each.
avcs() { dmesg | grep -a 'avc:  denied' | grep "scontext=[^ ]*:$1:" | sed -E 's/.*avc:/avc:/; s/ (pid|ino)=[0-9]+//g; s/:c[0-9]+,c[0-9]+//g' | sort | uniq -c; }
# Both start guests with svirt_t, whose categories are the guest's own.
context() { cat "/proc/$(process "$1")/attr/current"; }
has_type() { [ "$(tr '\0' '\n' < "/proc/$1/attr/current" | cut -d: -f3)" = "$2" ]; }
pid_of() { systemctl show -P MainPID "$1"; }

holds 'packages install' dpkg -i "$share"/packages/*.deb
printf 'merge_period = 2.0\ndirect_io_seconds = 0.0\n' > /etc/pageone/pageone.toml
# As the guide says.
mkdir /tmp/policy
cp /usr/share/pageone/selinux/* /tmp/policy/
holds 'the module is built against the reference policy' make -C /tmp/policy -f /usr/share/selinux/devel/Makefile pageone.pp
# Debian's policy does not let its libvirt 11 start any guest: libvirtd may not unmount what it mounts for guests, and guests may
# not map the kernel that they boot. Both are put right for the test; guests stay confined.
cat > /tmp/policy/test.cil << 'CIL'
(typepermissive virtd_t)
(allow svirt_t virt_content_t (file (map)))
CIL
holds 'it is loaded: no neverallow, no missing type' semodule -i /tmp/policy/pageone.pp /tmp/policy/test.cil
restorecon -RF /usr/bin/pageone /run/pageone
systemctl restart pageone
holds 'the daemon has its type' has_type "$(pid_of pageone)" pageone_t
holds 'the device has a type of its own' sh -c 'ls -Z /dev/userfaultfd | grep -q userfaultfd_device_t'

dmesg -C
holds 'SELinux enforces' setenforce 1
# An administrator: virsh of a script of init's would be confined itself.
admin() { runcon unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023 sh -c '"$@"' sh "$@"; }
virsh() { admin virsh "$@"; }
define s1 tenanta $wrapper
holds 'virsh start' virsh -q start s1
holds 'the guest is confined' has_type "$(process s1)" svirt_t
context s1
holds 'it works' works s1
holds 'it is merged' eventually 240 is_merged s1 20
holds 'it works on' works s1
holds 'wrapper and agent say nothing' sh -c "! grep -ahE '^pageone' $log/s1.log"
pageone status
avcs svirt_t > /tmp/denied
cat /tmp/denied
# A plain guest is denied the same: what the agent needs is all permitted.
forget s1
dmesg -C
define p1 tenanta /usr/bin/qemu-system-x86_64
holds 'a guest without the wrapper starts' virsh -q start p1
holds 'it works' works p1
avcs svirt_t > /tmp/plain
forget p1
without_counts() { sed -E 's/^ *[0-9]+ //' "$1" | sed -E 's/comm="[^"]*"//' | sort -u; }
holds "nothing of the agent's is denied" sh -c "[ -z \"\$(comm -23 '$(without_counts /tmp/denied > /tmp/a; echo /tmp/a)' '$(without_counts /tmp/plain > /tmp/b; echo /tmp/b)')\" ]"
comm -23 /tmp/a /tmp/b

# ---- without the module --------------------------------------------------------------------------

setenforce 0
holds 'the module is taken away' semodule -r pageone
restorecon -RF /usr/bin/pageone /run/pageone
systemctl restart pageone
setenforce 1
define d1 tenanta $wrapper
holds 'without it a guest starts' virsh -q start d1
holds 'its log says what is denied' eventually 120 grep -aE '^pageone.*denied' $log/d1.log
said d1
holds 'it works, unmerged' works d1
forget d1
echo "LIBVIRT-STEPS: $ran ran, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
