#!/bin/bash
# Installs, upgrades, downgrades, removes and purges the Debian packages in a fresh root of Debian 12, and looks at each step.
#
#   scripts/lanes/packages.sh [DIRECTORY]      DIRECTORY: where the programs are (default: target/release)
#
# The root comes from `scripts/deps.sh packages`. Nothing is installed here.
# Exit: 0 all checks hold; 1 some do not, and each is named; 2 it cannot run here.
set -uo pipefail

# ---- in the root, while systemd runs there: the service with all the unit's restrictions ----------
# Lines `ok WHAT` and `no WHAT` go to /result; what was seen goes to /seen.
if [ -n "${INSIDE:-}" ]; then
    exec > /seen 2>&1
    set -x
    holds() {
        local what=$1
        shift
        if "$@"; then echo "ok $what" >> /result; else echo "no $what" >> /result; fi
    }
    # within SECONDS COMMAND...: until it succeeds.
    within() {
        local left=$(($1 * 5))
        shift
        until "$@"; do
            left=$((left - 1))
            [ "$left" -gt 0 ] || return 1
            sleep 0.2
        done
    }
    merged() { [ "$(pageone status --json | grep -c '"pages_merged": 4096')" -eq 2 ]; }
    period() { pageone status | grep -q "merge period $1 s"; }
    connections() { journalctl -u pageone | grep -c ': client pid='; }
    conf=/etc/pageone/pageone.toml
    sed -i 's/^#merge_period = .*/merge_period = 0.2/; s/^#direct_io_seconds = .*/direct_io_seconds = 0/' $conf
    holds 'the service starts' systemctl restart pageone
    for client in 1 2; do
        # They end when this script does.
        pageone run --no-start -- pageone-test-client hold 4096 2 5 < <(exec sleep 300) > /dev/null &
    done
    holds 'clients of the service are merged' within 60 merged
    before=$(connections)
    echo 'merge_perid = 3' >> $conf
    holds 'a reload of a bad file fails' eval '! systemctl reload pageone'
    holds 'the journal says which line, as an error' eval "journalctl -u pageone -p err | grep -q 'line [0-9]*: merge_perid: .* did you mean merge_period?'"
    holds 'the old values stay' period 0.2
    sed -i '/merge_perid/d; s/^merge_period = .*/merge_period = 0.5/' $conf
    holds 'a reload of a good file succeeds' systemctl reload pageone
    holds 'its values are in effect' within 30 period 0.5
    holds 'nobody connected again' test "$(connections)" -eq "$before"
    holds 'clients stay merged' merged
    holds 'another daemon starts' systemctl restart pageone
    holds 'it takes the clients and what they have merged back' within 60 merged
    pid=$(systemctl show -P MainPID pageone)
    holds 'it has the three capabilities of the unit only' grep -q 'CapBnd:.*0000000000080005' "/proc/$pid/status"
    holds 'it has a filter of system calls' grep -q 'Seccomp:.*2' "/proc/$pid/status"
    mount -t tmpfs none /mnt
    holds 'it sees what is mounted while it runs' grep -q ' /mnt ' "/proc/$pid/mountinfo"
    umount /mnt
    # Each command of the guide, as it stands there. Its block goes on one line, and the daemon's file is not edited.
    PID=$(pageone status --json | grep -o '"pid": *[0-9]*' | grep -o '[0-9]*' | head -n 1)
    export PID
    guide=/usr/share/doc/pageone/docs/guide/operations.md
    while read -r command; do
        holds "the guide's command runs: $command" timeout 100 bash -c 'sudo() { "$@"; }; sudoedit() { test -f "$1"; }; eval "$1"' - "$command"
    done < <(sed -n '/^```sh/,/^```/{/^```/d;p}' "$guide"; [ -e "$guide" ] || echo "test -e $guide")
    holds 'doctor does what is safe' eval 'pageone doctor --apply; [ $? -le 1 ]'
    holds 'the exporter starts' systemctl start pageone-metrics
    # scrape LINE [FIELD]: whether its answer has such a line.
    scrape() {
        exec 3<> /dev/tcp/127.0.0.1/9779 || return
        printf 'GET /metrics HTTP/1.1\r\n%s\r\n' "${2:-}" >&3
        timeout 5 cat <&3 > /tmp/metrics
        grep -q "$1" /tmp/metrics
    }
    holds 'it tells of the host' within 10 scrape '^pageone_unlisted{what="clients"}'
    holds 'and nobody without a password of clients' eval '! grep pageone_client /tmp/metrics'
    # As the guide says. The hash is of "secret"; the guide's commands detached one of the two clients.
    (umask 077 && echo 'basic_auth_users: {a: $2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a}' > /etc/pageone/web.yml)
    mkdir -p /etc/systemd/system/pageone-metrics.service.d
    sed -n 's/^#   \(\[Service\]\|ExecStart=\|IPAddressAllow=\)/\1/p' /lib/systemd/system/pageone-metrics.service \
        > /etc/systemd/system/pageone-metrics.service.d/web.conf
    systemctl daemon-reload
    holds 'it starts with a file of passwords' systemctl restart pageone-metrics
    client='^pageone_client_pages{.*state="merged"} 4096'
    holds 'who has one sees the client' within 10 scrape "$client" "Authorization: Basic $(printf a:secret | base64)"$'\r\n'
    grep '^pageone_client_pages' /tmp/metrics
    # What the package of the host's module brings for it.
    install -D -m 644 /pageonefs.conf /etc/systemd/system/pageone.service.d/pageonefs.conf
    systemctl daemon-reload
    holds 'it starts with the right to manage mounts' systemctl restart pageone
    holds 'it has that capability besides' grep -q 'CapEff:.*0000000000280005' "/proc/$(systemctl show -P MainPID pageone)/status"
    holds 'its exposure is at most 2.3 with it' systemd-analyze security --threshold=23 pageone
    holds 'nothing was refused to it' eval "! journalctl -u pageone | grep -E 'not permitted|cannot|panicked'"
    journalctl -u pageone
    exit
fi

# ---- on this machine -------------------------------------------------------------------------------
set -e
cd "$(dirname "$0")/../.."
programs=${1:-${CARGO_TARGET_DIR:-target}/release}
[ "$(id -u)" -eq 0 ] || { echo 'test-packages: SKIPPED: only root can install packages into a root' >&2; exit 2; }
name=test-packages tar=packages-root.tar
# shellcheck source=scripts/lib/packages-root.sh
. scripts/lib/packages-root.sh
skipped() { echo "test-packages: SKIPPED: $*"; }

old=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
new=$old+next
DEB_OUT=$work/old packaging/deb.sh "$programs" > "$work/log" || { cat "$work/log"; exit 1; }
DEB_OUT=$work/new DEB_VERSION=$new packaging/deb.sh "$programs" > /dev/null
grep SKIPPED "$work/log" || true

mkdir -p "$root/packages" && cp -r "$work/old" "$work/new" "$root/packages/"
# all VERSION: its packages, as the root sees them. Those of modules need dkms: scripts/lanes/packages-dkms.sh has a root for them.
all() { (cd "$root" && printf '/%s ' $(ls packages/"$1"/*.deb | grep -v -- -dkms_)); }
# As Proxmox' QEMU has it.
ln -s qemu-system-x86_64 "$root/usr/bin/kvm"
files() { (cd "$root" && find . -path ./proc -prune -o -path ./packages -prune -o -path ./var/log -prune -o -path ./var/cache -prune \
    -o -path './var/lib/dpkg/*-old' -prune -o -path ./run -prune -o -print | LC_ALL=C sort); }
files > "$work/before"

holds 'they install' dpkg_inside -i $(all old)
holds 'pageone runs, with the glibc of Debian 12' inside pageone --version
holds 'the sample configuration has nothing wrong' inside pageone config check
holds 'the sample is what the program prints' inside sh -c 'pageone config sample | cmp - /etc/pageone/pageone.toml'
for page in pageone pageone-daemon pageone-run pageone-status pageone-config-check; do
    holds "$page has a man page" inside sh -c "zcat /usr/share/man/man1/$page.1.gz | grep -q '^\.TH'"
done
holds 'completions for bash' inside bash -c '. /usr/share/bash-completion/completions/pageone && complete -p pageone'
holds 'the unit is right' inside systemd-analyze verify --man=no /lib/systemd/system/pageone.service
holds 'its exposure is at most 2.0' inside systemd-analyze security --offline=yes --threshold=20 /lib/systemd/system/pageone.service
holds "the exporter's unit is right" inside systemd-analyze verify --man=no /lib/systemd/system/pageone-metrics.service
holds "the exporter's exposure is at most 2.0" inside systemd-analyze security --offline=yes --threshold=20 /lib/systemd/system/pageone-metrics.service
holds 'the unit is enabled' test -L "$root/etc/systemd/system/multi-user.target.wants/pageone.service"
holds 'run finds the agent' inside sh -c 'ldd /usr/lib/pageone/libpageone_agent.so && ! ldd /usr/lib/pageone/libpageone_agent.so | grep "not found"'
holds 'a program links with the library' cc -Wall -Werror -I"$root/usr/include" -o "$root/vmm" examples/vmm.c \
    -L"$root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)" -L"$root/usr/lib/pageone" -lpageone_agent
holds 'a linked program finds the library' inside sh -c 'ldd /vmm | grep -q "libpageone_agent.so => /"'
holds 'pkg-config knows it' grep -q '^Libs: -lpageone_agent$' "$root"/usr/lib/*/pkgconfig/pageone.pc
rm -f "$root/vmm"
holds 'the wrapper has the name that Proxmox starts' cmp -s "$root/usr/bin/kvm" "$root/usr/bin/qemu-system-x86_64-pageone"
holds "Proxmox' link is kept" test "$(readlink "$root/usr/bin/kvm.proxmox")" = qemu-system-x86_64
holds 'programs belong to root and nobody else writes them' inside sh -c '[ "$(stat -c %U%a /usr/bin/pageone)" = root755 ]'
holds 'what is there is what was packed' inside dpkg --verify pageone libpageone-agent libpageone-dev

# An edit survives the upgrade, and so does what an administrator has switched off.
sed -i 's/^#max_cpu = .*/max_cpu = 25/' "$root/etc/pageone/pageone.toml"
rm "$root/etc/systemd/system/multi-user.target.wants/pageone.service"
holds 'they upgrade' dpkg_inside -i $(all new)
holds 'the new version is there' inside sh -c "[ \"\$(dpkg-query -Wf '\${Version}' pageone)\" = $new ]"
holds 'an edited configuration stays' grep -q '^max_cpu = 25' "$root/etc/pageone/pageone.toml"
holds 'a disabled unit stays disabled' not test -e "$root/etc/systemd/system/multi-user.target.wants/pageone.service"
holds 'they downgrade' dpkg_inside -i $(all old)
holds 'an edited configuration stays at the downgrade' grep -q '^max_cpu = 25' "$root/etc/pageone/pageone.toml"

# The service, with systemd as the first process of a container.
if command -v systemd-nspawn > /dev/null && [ -e "$programs/pageone-test-client" ]; then
    rm -rf "$work/booted" && cp -a "$root" "$work/booted"
    install "$programs/pageone-test-client" "$work/booted/usr/bin/"
    install scripts/lanes/packages.sh "$work/booted/inside.sh"
    install -m 644 packaging/pageonefs.conf "$work/booted/pageonefs.conf"
    printf '[Unit]\nAfter=pageone.service\n[Service]\nType=oneshot\nEnvironment=INSIDE=1\nExecStart=/inside.sh\nTimeoutStartSec=400\nExecStopPost=/bin/systemctl poweroff --no-block\n' \
        > "$work/booted/etc/systemd/system/try.service"
    ln -s /etc/systemd/system/try.service "$work/booted/etc/systemd/system/multi-user.target.wants/try.service"
    # Nobody has to answer for the machine's name or its network: it has none of them.
    timeout 600 systemd-nspawn -q -D "$work/booted" --register=no --keep-unit --capability=all --boot --console=pipe \
        < /dev/null > "$work/container" 2>&1 || true
    if [ -e "$work/booted/result" ]; then
        while read -r verdict what; do
            holds "in the container: $what" test "$verdict" = ok
            [ "$verdict" = ok ] || grep -v '^+' "$work/booted/seen" | tail -n 40
        done < "$work/booted/result"
    else
        skipped "the service itself: no container starts here ($(tail -n 1 "$work/container"))"
    fi
else
    skipped 'the service itself (there is no systemd-nspawn, package systemd-container, or no pageone-test-client)'
fi

names=$(for deb in $(all old); do dpkg-deb -f "$root$deb" Package; done)
holds 'they go' dpkg_inside -r $names
holds 'the configuration stays' test -e "$root/etc/pageone/pageone.toml"
holds 'they are purged' dpkg_inside -P $names
files > "$work/after"
holds 'a purge leaves nothing' diff "$work/before" "$work/after"

# The RPMs, in another copy of the root: no RPM system is here, so what they require is not installed by any.
if command -v rpmbuild > /dev/null && [ -e "$programs/qemu-system-x86_64-pageone" ]; then
    holds 'the RPMs are built' env RPM_OUT="$work/rpm" packaging/rpm.sh "$programs"
    host=("$work"/rpm/pageone-[0-9]*.rpm) guests=("$work"/rpm/pageone-libvirt-*.rpm)
    contains() { rpm -qlp "$1" | grep -xF "$2"; }
    for file in /usr/bin/pageone /usr/lib/pageone/libpageone_agent.so /usr/lib/pageone/libpageone_template.so /usr/lib/systemd/system/pageone.service /etc/pageone/pageone.toml \
        /usr/share/man/man1/pageone-attach.1.gz; do
        holds "the RPM has $file" contains "${host[0]}" "$file"
    done
    for file in /usr/bin/qemu-system-x86_64-pageone /usr/lib/udev/rules.d/60-pageone-userfaultfd.rules /usr/share/pageone/selinux/pageone.te; do
        holds "the RPM for libvirt has $file" contains "${guests[0]}" "$file"
    done
    requires() { rpm -qp --requires "$1" | grep "$2"; }
    holds 'the RPM requires the C library' requires "${host[0]}" '^libc\.so\.6'
    holds 'the RPM for libvirt requires the other' requires "${guests[0]}" "^pageone = $old-1\$"
    holds 'the configuration is kept' sh -c "rpm -qp --configfiles '${host[0]}' | grep -qx /etc/pageone/pageone.toml"
    rm -rf "$work/rpmroot" && mkdir "$work/rpmroot" && tar -xf "$cache/packages-root.tar" -C "$work/rpmroot" --exclude='./dev/*'
    mknod -m 666 "$work/rpmroot/dev/null" c 1 3
    mkdir -p "$work/rpmroot/etc/libvirt" && : > "$work/rpmroot/etc/libvirt/qemu.conf"
    in_root() { rpm --root "$work/rpmroot" --dbpath /var/lib/rpm --noplugins "$@"; }
    holds 'the RPMs install' in_root --nodeps -i "${host[@]}" "${guests[@]}"
    holds 'pageone of the RPM runs' chroot "$work/rpmroot" pageone --version
    holds 'libvirt gives guests the device' grep -q /dev/userfaultfd "$work/rpmroot/etc/libvirt/qemu.conf"
    # The wrapper was touched, as when QEMU is upgraded.
    holds 'what is there is what was packed in the RPMs' in_root --nodeps --nomtime -V pageone pageone-libvirt
    holds 'the RPMs go' in_root -e pageone-libvirt pageone
    holds "libvirt's file is as it was" not test -s "$work/rpmroot/etc/libvirt/qemu.conf"
    holds 'nothing of the RPMs stays' not test -e "$work/rpmroot/usr/lib/pageone"
else
    skipped 'the RPMs (there is no rpmbuild, package rpm, or no qemu-system-x86_64-pageone)'
fi
# The modules: another root.
if scripts/lanes/packages-dkms.sh "$work/old" "$work/new"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
if command -v lintian > /dev/null; then
    holds 'lintian finds no error' lintian --fail-on error --suppress-tags bad-distribution-in-changes-file "$work"/old/*.deb
else
    skipped 'lintian (it is not installed)'
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
