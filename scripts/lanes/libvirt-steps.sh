#!/bin/bash
# The steps of scripts/lanes/libvirt.sh, in the host with libvirt; they build on each other:
#
#   quick install merge capabilities nosharepages attach module denied suspend managedsave save snapshot migrate balloon destroy upgrade remove
#
# Each line that begins with "LIBVIRT " is a result. STEPS: some of them (install and merge are always done).
set -uo pipefail
# shellcheck source=scripts/lib/libvirt-guests.sh
. /run/pageone-test/common.sh

# ---- the host ------------------------------------------------------------------------------------

# state: what an installation may change. What lies below /etc is read.
state() {
    local not=(-path /etc/libvirt/qemu -o -path /etc/apparmor.d/libvirt -o -name ld.so.cache -o -name .pwd.lock)
    not+=(-o -path '/etc/passwd*' -o -path '/etc/shadow*' -o -path '/etc/group*' -o -path '/etc/gshadow*' -o -path '/etc/sub*')
    find /etc \( "${not[@]}" \) -prune -o -type f -print0 | sort -z | xargs -0 md5sum
    find /etc \( "${not[@]}" \) -prune -o -printf '%p %m %u:%g %l\n' | sort
    find /usr -xdev ! -type d -printf '%p %m %u:%g %s %l\n' | sort
    stat -c '%n %a %U:%G' /dev/userfaultfd
    cat /proc/sys/vm/unprivileged_userfaultfd
}

echo "LIBVIRT-HOST $(. /etc/os-release && echo "$PRETTY_NAME"), Linux $(uname -r), $(virsh --version), $(qemu-system-x86_64 --version | head -n 1), AppArmor $(cat /sys/module/apparmor/parameters/enabled)"
# While there is a virtual CPU the kernel patches none of its code; see guest/kvm-host/init.
qemu-system-x86_64 -accel kvm -S -m 16 -nodefaults -no-user-config -display none > /dev/null 2>&1 < /dev/null &
holds 'libvirtd answers' eventually 120 virsh -q list
state > /tmp/before

# ---- quick, install ------------------------------------------------------------------------------

if wants quick; then quick; else install_packages; fi
cp "$rules" /tmp/rules 2> /dev/null
cp /etc/libvirt/qemu.conf /tmp/qemu.conf
holds 'a second time changes nothing' sh -c "/usr/lib/pageone/libvirt-setup add && cmp $rules /tmp/rules && cmp /etc/libvirt/qemu.conf /tmp/qemu.conf"
holds 'the device is for the group kvm' sh -c '[ "$(stat -c "%a %G" /dev/userfaultfd)" = "660 kvm" ]'
holds 'userfaultfd is for nobody else' sh -c '[ "$(cat /proc/sys/vm/unprivileged_userfaultfd)" = 0 ]'
mkdir -p /etc/pageone
printf 'merge_period = 2.0\ndirect_io_seconds = 0.0\n' > /etc/pageone/pageone.toml
systemctl restart pageone || failed 'the daemon starts'

# ---- merge ---------------------------------------------------------------------------------------

for guest in a1 a2 b1; do
    tenant=tenanta
    [ $guest != b1 ] || tenant=tenantb
    define $guest $tenant $wrapper
    holds "virsh start $guest" virsh -q start $guest
done
for guest in a1 a2 b1; do holds "$guest works" works $guest; done
for guest in a1 a2; do holds "$guest is merged" eventually 240 is_merged $guest 20; done
holds 'the tenants share no frame' sh -c "frames_a='$(frames a1)'; [ -n \"\$frames_a\" ] && ! printf '%s\n' '$(frames b1)' | grep -qxF \"\$frames_a\""
for guest in a1 b1; do
    echo "$guest is in the domain $(domain $guest)"
    holds "$guest has its tenant's domain" sh -c "case '$(domain $guest)' in slice:machine-tenant${guest%1}.slice@*) ;; *) false ;; esac"
done
holds "a tenant's guests share frames" sh -c "[ '$(frames a1)' = '$(frames a2)' ]"
holds 'nothing was denied' sh -c "[ $(denials) = 0 ]"
dmesg | grep -a 'apparmor="DENIED"' | grep -a 'profile="libvirt-' | sed -E 's/.*(operation=)/\1/; s/profile="libvirt-[^"]*"/profile=libvirt-UUID/; s/ pid=[0-9]+//' | sort | uniq -c
holds 'wrapper and agent say nothing' sh -c "! grep -ahE '^pageone' $log/a1.log $log/a2.log $log/b1.log"
pageone status
tr '\0' '\n' < "/proc/$(process a1)/environ" | grep -E '^(LD_|PAGEONE_)'

# ---- capabilities --------------------------------------------------------------------------------

capabilities() { virsh domcapabilities --emulatorbin "$1" --virttype "$2" | sed "s#<path>$1</path>#<path/>#"; }
same_capabilities() {
    local kind
    for kind in kvm qemu; do
        capabilities /usr/bin/qemu-system-x86_64 $kind > /tmp/plain.xml && [ -s /tmp/plain.xml ] || return 1
        capabilities $wrapper $kind | diff /tmp/plain.xml - || return 1
    done
}
if wants capabilities; then
    before=$(pageone status --json | grep -o '"pid"' | wc -l)
    rm -rf /var/cache/libvirt/qemu/capabilities
    systemctl restart libvirtd
    holds 'domcapabilities are the same' same_capabilities
    holds 'who asks is no client' sh -c "[ '$before' = \"\$(pageone status --json | grep -o '\"pid\"' | wc -l)\" ]"
    holds 'guests run on over a restart of libvirtd' works a1
fi

# One processor has all the work: what is not looked at rests from here on.
for guest in a2 b1; do virsh -q suspend $guest; done

# ---- nosharepages --------------------------------------------------------------------------------

if wants nosharepages; then
    define c1 tenanta $wrapper '<memoryBacking><nosharepages/></memoryBacking>'
    holds 'a guest with <nosharepages/> starts' virsh -q start c1
    holds 'its log says why it is not merged' sh -c "grep -a '^pageone: this guest is not merged: mem-merge=off' $log/c1.log"
    holds 'it has no agent' sh -c "! grep -q pageone /proc/$(process c1)/maps"
    said c1
    forget c1
fi

# ---- attach --------------------------------------------------------------------------------------

if wants attach; then
    define r1 tenanta /usr/bin/qemu-system-x86_64
    holds 'a guest without the wrapper starts' virsh -q start r1
    holds 'it works without the agent' works r1
    holds 'it is attached' pageone attach "$(process r1)" --timeout 60
    holds 'it is merged' eventually 240 is_merged r1 20
    holds "with its tenant's guests" sh -c "[ '$(frames r1)' = '$(frames a1)' ]"
    holds 'it works' works r1
    holds 'it is detached' pageone detach "$(process r1)"
    holds 'it works as before' works r1
    said r1
    forget r1
fi

# ---- module --------------------------------------------------------------------------------------

# in_module: the host's daemon, as its unit has it with the package of the module, merges plain guests whose RAM libvirt puts
# into a mount, and one with the agent in their domain.
in_module() {
    local mount=/mnt/pageone unit=/run/systemd/system/pageone.service.d guest of
    of=$(domain a1)
    local xml="<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>"
    virsh -q suspend a1
    install -D -m 644 $share/pageonefs.conf $unit/pageonefs.conf
    systemctl daemon-reload
    mkdir -p $mount
    holds 'the module is loaded, and mounted for the user of guests' sh -c "insmod $share/pageonefs.ko &&
        mount -t pageonefs -o domain=$of,huge=advise,size=90%,mode=0700,uid=$(id -u libvirt-qemu) none $mount"
    holds 'doctor says that the daemon lacks a right' sh -c "pageone doctor | grep -q 'BLOCKS.*without CAP_SYS_ADMIN'"
    holds 'the daemon starts with it' systemctl restart pageone
    echo "memory_backing_dir = \"$mount\"" >> /etc/libvirt/qemu.conf
    systemctl restart libvirtd
    for guest in m1 m2; do
        define $guest tenanta $plain "$xml"
        holds "$guest starts" virsh -q start $guest
    done
    for guest in m1 m2; do holds "$guest works" works $guest; done
    find $mount -type f -printf '%p %s %u\n'
    holds 'their RAM lies in the mount' test "$(find $mount/libvirt -type f -user libvirt-qemu -size +100M | wc -l)" = 2
    for guest in m1 m2; do holds "$guest is merged" eventually 240 is_merged $guest 20; done
    holds 'in the domain of the mount' sh -c "[ '$(domain m1)' = 'pageonefs:$of' ]"
    holds 'nothing is in their way' pageone doctor "$(process m1)" "$(process m2)"
    pageone doctor "$(process m1)" | grep -E 'module|merging|memory'
    for guest in m1 m2; do holds "$guest works on" works $guest; done
    define s1 tenanta $wrapper
    holds 'a guest with the agent starts beside them' virsh -q start s1
    holds 'its store lies in the module' eventually 240 store_in_module s1
    holds 'it works' works s1
    for guest in m1 m2; do holds "$guest works beside it" works $guest; done
    said s1
    holds 'nothing was denied' sh -c "[ $(denials) = 0 ]"
    for guest in m1 m2 s1; do forget $guest; done
    if [ -e $share/guest/ppr.cpio ]; then recycled_in_module; else skipped "free pages (there are no guests for them: 'scripts/deps.sh ppr')"; fi
    cp /tmp/qemu.conf /etc/libvirt/qemu.conf
    systemctl restart libvirtd
    holds 'the mount goes, while the daemon runs' sh -c "umount $mount && rmdir $mount"
    # The module stays: a1 has pages of the store that lies in it.
    rm -r $unit
    systemctl daemon-reload
    systemctl restart pageone
    virsh -q resume a1
    holds 'a1 is merged as before' eventually 240 is_merged a1 20
}
# Whether it maps files of the store that are no memfds, which have device 00:01.
store_in_module() { awk '/memfd:pageone:/ && !/ 00:01 / { found = 1 } END { exit !found }' "/proc/$(process "$1")/maps"; }
is_recycled() { pageone status --json | grep -qE '"pages_recycled": [0-9]{5}'; }
# A guest without libvirt, whose pool and monitor the daemon takes from its QEMU, as its unit and the module's package let it.
recycled_in_module() {
    local append='console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off STAY=1 PPR=1 WORK=none' pid
    pageone run --backend module --ppr -- $plain -accel kvm -cpu host -m 192 -kernel $share/guest/vmlinuz \
        -initrd $share/guest/ppr.cpio -append "$append" -nodefaults -no-user-config -no-reboot -display none \
        -serial file:/tmp/ppr.console > /tmp/ppr.log 2>&1 < /dev/null &
    pid=$!
    holds 'what a guest has marked as free is punched' eventually 240 is_recycled
    pageone status | grep -A 3 -E 'free pages|PID'
    cat /tmp/ppr.log
    tail -n 3 /tmp/ppr.console
    kill $pid
    wait $pid 2> /dev/null
}
if wants module; then
    if [ -e $share/pageonefs.ko ]; then in_module; else skipped "the module (there are no headers: 'scripts/deps.sh module')"; fi
fi

# ---- denied --------------------------------------------------------------------------------------

# permits_itself WHAT: whether libvirt's own rules permit it, as those of libvirt 11 do some of it.
permits_itself() {
    case $1 in
        max_map_count | userfaultfd) grep -qhE "/$1\"? [rwk]+," /etc/apparmor.d/abstractions/libvirt-qemu /etc/apparmor.d/libvirt/*.files ;;
        # The device in a guest's own /dev is the guests' user's there.
        "the device's mode") [ "$(stat -c %U "/proc/$(process d1)/root"/dev/userfaultfd)" = libvirt-qemu ] ;;
        *) return 1 ;;
    esac
}
# without LINE WHAT TEXT: a guest starts without this line of the rules, and its log has the text.
without() {
    cp $rules /tmp/rules.all
    grep -vF "$1" /tmp/rules.all > $rules
    define d1 tenanta $wrapper
    holds "without the rule for $2 a guest starts" virsh -q start d1
    if permits_itself "$2"; then
        skipped "a denial of $2: libvirt's own rules permit it"
    else
        holds "its log names $2" eventually 120 grep -aE "$3" $log/d1.log
    fi
    said d1
    cp /tmp/rules.all $rules
}
if wants denied; then
    virsh -q suspend a1
    without '/smaps r,' smaps 'memory is not merged: /proc/self/smaps is denied by .*smaps r,. in /etc/apparmor.d/local/abstractions/libvirt-qemu'
    holds 'it works, unmerged' works d1
    holds 'nothing of it is merged' sh -c "[ '0$(merged d1)' -eq 0 ]"
    forget d1
    without '/pagemap r,' pagemap 'memory is not merged: /proc/self/pagemap is denied by'
    forget d1
    without 'max_map_count r,' max_map_count 'vm.max_map_count is taken for its default'
    holds 'it is merged all the same' eventually 240 is_merged d1 10
    forget d1
    without '/dev/userfaultfd rw,' userfaultfd 'memory is not merged: /dev/userfaultfd is denied by .*userfaultfd rw,'
    forget d1
    without '/status r,' status 'memory is not merged: /proc/thread-self/status is denied by'
    forget d1
    grep -vF $wrapper $rules > /tmp/rules.less && cp $rules /tmp/rules.all && cp /tmp/rules.less $rules
    define d1 tenanta $wrapper
    holds 'without the rule for the wrapper no guest starts: it is needed' sh -c '! virsh -q start d1'
    forget d1
    cp /tmp/rules.all $rules
    chmod 600 /dev/userfaultfd
    without 'no line' "the device's mode" 'memory is not merged: /dev/userfaultfd is denied by its mode; a udev rule'
    forget d1
    chmod 660 /dev/userfaultfd
    virsh -q resume a1
fi

# ---- what libvirt does with guests ---------------------------------------------------------------

if wants suspend; then
    virsh -q suspend a1
    memory a1 /tmp/1
    sleep 10
    memory a1 /tmp/2
    holds 'memory of a suspended guest stays as it is' same /tmp/1 /tmp/2 0
    virsh -q resume a1
    holds 'it works on' works a1
fi
if wants managedsave; then
    virsh -q suspend a1
    memory a1 /tmp/1
    holds managedsave virsh -q managedsave a1
    holds 'start of what was saved' virsh -q start a1 --paused
    memory a1 /tmp/2
    # The page with the guest's clock, as without the agent.
    holds 'managedsave keeps memory' same /tmp/1 /tmp/2 2
    same /tmp/1 /tmp/2 2
    virsh -q resume a1
    holds 'it works on' works a1
    holds 'it is merged again' eventually 240 is_merged a1 20
fi
if wants save; then
    virsh -q suspend a1
    memory a1 /tmp/1
    holds save virsh -q save a1 /var/lib/libvirt/qemu/save/a1.sav
    holds restore virsh -q restore /var/lib/libvirt/qemu/save/a1.sav --paused
    memory a1 /tmp/2
    holds 'save and restore keep memory' same /tmp/1 /tmp/2 2
    same /tmp/1 /tmp/2 2
    rm -f /var/lib/libvirt/qemu/save/a1.sav
    virsh -q resume a1
    holds 'it works on' works a1
fi
if wants snapshot; then
    holds 'an external snapshot with memory' virsh -q snapshot-create-as a1 s1 --live --memspec file=/var/lib/libvirt/qemu/save/s1.mem,snapshot=external
    # libvirt migrates no guest that has snapshots; what was stored stays.
    holds 'its description can go' virsh -q snapshot-delete a1 s1 --metadata
    holds 'it works on' works a1
    rm -f /var/lib/libvirt/qemu/save/s1.mem
fi
# ---- migrate -------------------------------------------------------------------------------------

# A second libvirtd, with files, a name and an identity of its own: libvirt refuses to migrate a guest to where it comes from.
other=/run/other
other_host() {
    mkdir -p $other/{etc,lib,run,log/qemu,cache}
    cp -a /etc/libvirt/. $other/etc/
    rm -rf $other/etc/qemu/*
    chown --reference=/var/lib/libvirt/qemu $other/lib
    echo "host_uuid = \"$(cat /proc/sys/kernel/random/uuid)\"" >> $other/etc/libvirtd.conf
    # There is no virtlogd.
    echo 'stdio_handler = "file"' >> $other/etc/qemu.conf
    unshare --mount --uts sh -c "hostname other
        for pair in etc:/etc/libvirt lib:/var/lib/libvirt/qemu run:/run/libvirt log:/var/log/libvirt cache:/var/cache/libvirt; do
            mount --bind $other/\${pair%%:*} \${pair#*:} || exit 1
        done
        exec /usr/sbin/libvirtd --pid-file /run/libvirt/other.pid" > $other/said 2>&1 &
    eventually 120 there list > /dev/null
}
there() { virsh -q -c "qemu:///system?socket=$other/run/libvirt-sock" "$@"; }
# arrived COMMAND...: with the files of the other libvirtd in the place of libvirt's.
arrived() {
    local log=$other/log/qemu
    process() { cat $other/run/qemu/"$1".pid; }
    "$@"
    local code=$?
    process() { cat "/run/libvirt/qemu/$1.pid"; }
    return $code
}
if wants migrate; then
    holds 'another libvirtd runs' other_host
    holds 'a merged guest migrates to it while it works' virsh -q migrate --live a1 "qemu:///system?socket=$other/run/libvirt-sock" --migrateuri tcp://127.0.0.1:49200
    holds 'it is there' sh -c "[ \"\$(virsh -q -c 'qemu:///system?socket=$other/run/libvirt-sock' domstate a1)\" = running ]"
    holds 'it works there' arrived works a1
    holds 'it is merged there' arrived eventually 240 is_merged a1 20
    holds 'it found no wrong byte' sh -c "! grep -a CORRUPT $other/log/qemu/a1.console"
    arrived said a1
    there destroy a1
    kill "$(cat $other/run/other.pid)"
    holds 'it starts where it came from' virsh -q start a1
    holds 'and works' works a1
fi
virsh -q resume a2
if wants balloon; then
    actual() { virsh -q dommemstat a2 | awk '$1 == "actual" { print $2 }'; }
    reaches() { [ "$(actual)" = "$1" ]; }
    virsh -q setmem a2 160M --live
    holds 'setmem takes memory away' eventually 120 reaches 163840
    virsh -q setmem a2 192M --live
    holds 'setmem gives it back' eventually 120 reaches 196608
    holds 'it works on' works a2
fi
if wants destroy; then
    pid=$(process a1)
    holds destroy virsh -q destroy a1
    holds 'the daemon forgets it' eventually 60 sh -c "! pageone status | grep -q ' $pid '"
    holds 'the other works on' works a2
    holds 'it starts again' virsh -q start a1
    holds 'and works' works a1
fi
holds 'nobody found a wrong byte' sh -c "! grep -al CORRUPT $log/*.console"

# ---- upgrade -------------------------------------------------------------------------------------

if wants upgrade; then
    asked=$(stat -c %Z $wrapper)
    sleep 1.1
    holds "QEMU's upgrade touches the wrapper" sh -c "dpkg-trigger --no-await --by-package=qemu-system-x86 /usr/bin/qemu-system-x86_64; dpkg --triggers-only -a; [ \$(stat -c %Z $wrapper) -gt $asked ]"
    holds 'libvirt asks anew' same_capabilities
fi

# ---- remove --------------------------------------------------------------------------------------

if wants remove; then
    holds 'the daemon stops, and guests work on' sh -c 'systemctl stop pageone'
    holds 'a2 works without the daemon' works a2
    for guest in a1 a2 b1; do forget $guest; done
    holds 'packages go' sh -c "dpkg --purge \$(for deb in $share/packages/*.deb; do dpkg-deb -f \$deb Package; done)"
    state > /tmp/after
    holds 'the host is as it was' diff /tmp/before /tmp/after
    define e1 tenanta /usr/bin/qemu-system-x86_64
    holds 'a plain guest starts' virsh -q start e1
    holds 'and works' works e1
    forget e1
fi
skipped 'postcopy migration: tests/tests/functional/migration.rs does it, without libvirt'
echo "LIBVIRT-STEPS: $ran ran, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
