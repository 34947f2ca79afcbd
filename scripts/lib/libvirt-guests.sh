# shellcheck shell=bash
# What scripts/lanes/libvirt-steps.sh and scripts/lanes/selinux-steps.sh share: to say results, and guests of libvirt.
share=/run/pageone-test
# shellcheck disable=SC1091
. "$share/variables"
plain=/usr/bin/qemu-system-x86_64
wrapper=/usr/bin/qemu-system-x86_64-pageone
rules=/etc/apparmor.d/local/abstractions/libvirt-qemu
log=/var/log/libvirt/qemu
failed=0 ran=0 skipped=0

passed() { ran=$((ran + 1)); echo "LIBVIRT $*: passed ($SECONDS s)"; }
failed() {
    ran=$((ran + 1)) failed=$((failed + 1))
    echo "LIBVIRT $*: FAILED ($SECONDS s)"
}
skipped() { skipped=$((skipped + 1)); echo "LIBVIRT SKIPPED $*"; }
# holds NAME COMMAND...: the command succeeds; what it says is shown if it does not.
holds() {
    local name=$1 said
    shift
    if said=$("$@" 2>&1); then passed "$name"; else failed "$name"; printf '%s\n' "$said" | tail -n 20; fi
}
# eventually SECONDS COMMAND...: the command succeeds within that time.
eventually() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || { echo "not in time: $*"; return 1; }
        sleep 1
    done
}
wants() { [ -z "$STEPS" ] || [[ " $STEPS " == *" $1 "* ]]; }

# ---- guests --------------------------------------------------------------------------------------

# define NAME TENANT EMULATOR [XML]: a guest of a tenant, which has a partition of its own. All guests run as libvirt's one user.
# TYPE=qemu: without KVM, and without a partition.
define() {
    local type=${TYPE:-kvm} cpu='<cpu mode="host-passthrough"/>' partition="<resource><partition>/machine/$2</partition></resource>"
    [ "$type" = kvm ] || cpu='<cpu mode="maximum"/>' partition=''
    cp "$share/guest/vmlinuz" "/var/lib/libvirt/images/$1.kernel"
    cp "$share/guest/initrd" "/var/lib/libvirt/images/$1.initrd"
    cat > "/tmp/$1.xml" << XML
<domain type='$type'><name>$1</name><memory unit='MiB'>192</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type><kernel>/var/lib/libvirt/images/$1.kernel</kernel>
<initrd>/var/lib/libvirt/images/$1.initrd</initrd><cmdline>console=ttyS0 quiet panic=-1 PAGEONE_PAUSE=5</cmdline></os>
<features><acpi/></features>$cpu<on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>
$partition${4:-}
<devices><emulator>$3</emulator><controller type='usb' model='none'/>
<serial type='file'><source path='$log/$1.console'/></serial><memballoon model='virtio'/></devices></domain>
XML
    virsh -q define "/tmp/$1.xml"
}
forget() {
    virsh -q destroy "$1" 2> /dev/null
    virsh -q undefine --managed-save --snapshots-metadata "$1"
    rm -f "/var/lib/libvirt/images/$1".* "$log/$1".* "/tmp/$1.xml"
}
process() { cat "/run/libvirt/qemu/$1.pid"; }
rounds() { grep -ac 'PAGEONE-ROUND .* PASS' "$log/$1.console" 2> /dev/null || true; }
is_round() { [ "$(rounds "$1")" -gt "$2" ]; }
# works NAME: the guest checks all of its files, and finds them right.
works() { process "$1" > /dev/null && eventually 240 is_round "$1" "$(rounds "$1")" && ! grep -a CORRUPT "$log/$1.console"; }
# merged NAME: MiB that the daemon says are merged.
merged() {
    pageone status --json | awk -v pid="$(process "$1")," '
        $1 == "\"pid\":" { asked = $2 == pid }
        asked && $1 == "\"pages_merged\":" { print int($2 / 256); exit }'
}
# domain NAME: its domain, as `pageone status` shows it.
domain() { pageone status | awk -v pid="$(process "$1")" '$1 == "domain" { name = $2 } $1 == pid { print name; exit }'; }
is_merged() { [ "$(merged "$1")" -ge "$2" ] 2> /dev/null; }
# frames NAME: the stores that a guest maps.
frames() { awk '/memfd:pageone:/ && !/memfd:pageone:control/ { print $5 }' "/proc/$(process "$1")/maps" | sort -u; }
# said NAME: what wrapper and agent have written to QEMU's log.
said() { grep -aE '^pageone' "$log/$1.log"; }
denials() { dmesg | grep -a 'apparmor="DENIED"' | grep -c 'profile="libvirt-'; }
# memory NAME FILE: what is in the guest's memory; the guest is suspended.
memory() { rm -f "$2" && virsh -q dump --memory-only "$1" "$2"; }
# same FILE FILE PAGES: whether at most PAGES pages differ, behind the headers and the registers.
same() {
    [ "$(stat -c %s "$1")" = "$(stat -c %s "$2")" ] || { echo 'of different lengths'; return 1; }
    local pages
    pages=$(cmp -l "$1" "$2" | awk '{ page[int($1 / 4096)] = 1 } END { print length(page) }')
    echo "$pages of $(($(stat -c %s "$1") / 4096)) pages differ"
    [ "$pages" -le "$3" ]
}

# ---- from nothing to merged guests ----------------------------------------------------------------

# merge_running: guests q1 and q2, which run, are attached or started again: the second of the guide's three commands.
merge_running() {
    local guest
    for guest in q1 q2; do
        if [ -e "/proc/$(process $guest)/root"/dev/userfaultfd ]; then
            pageone attach "$(process $guest)" --timeout 60 || return 1
        else
            # The emulator is set as the guide says.
            virsh dumpxml --inactive --security-info $guest | sed "s,$plain<,$wrapper<," | virsh -q define /dev/stdin &&
                virsh -q destroy $guest && virsh -q start $guest || return 1
        fi
    done
}
install_packages() { holds 'packages install' apt-get -qq install -y "$share"/packages/*.deb; }
# quick: what the guide promises. Two guests run, that nobody prepared; three commands later they are merged, with the
# configuration of the packages. Where libvirt gives guests no /dev/userfaultfd, before its release 11, they are started again.
quick() {
    local guest control way began installed second took
    for guest in q1 q2; do
        define $guest tenantq $plain
        control=$SECONDS
        holds "$guest starts, without PageONE" virsh -q start $guest
        control=$((SECONDS - control))
    done
    for guest in q1 q2; do holds "$guest works" works $guest; done
    [ "$failed" -eq 0 ] || return
    if [ ! -e "/proc/$(process q1)/root"/dev/userfaultfd ]; then way='started again'; else way=attached; fi
    began=$SECONDS
    install_packages
    installed=$((SECONDS - began))
    holds "guests that run are $way" merge_running
    second=$((SECONDS - began - installed))
    for guest in q1 q2; do holds "status shows merged memory of $guest" eventually 400 is_merged $guest 1; done
    took=$((SECONDS - began))
    echo "LIBVIRT-QUICK from nothing to merged guests: $took s: install $installed, $way $second, until status shows both $((took - installed - second))"
    if [ "$took" -le 120 ]; then
        passed 'that is under two minutes'
    else
        skipped "whether it is under two minutes: a plain 'virsh start' takes $control s here"
    fi
    for guest in q1 q2; do
        holds "$guest works on" works $guest
        forget $guest
    done
}
