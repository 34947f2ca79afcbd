#!/bin/bash
# What scripts/test-packages.sh does in its root while systemd runs there: the service with all the unit's restrictions.
# Lines `ok WHAT` and `no WHAT` go to /result; what was seen goes to /seen.
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
merged() { [ "$(pageone status | grep -c 'pageone-test-client  *16  *16 .* merging')" -eq 2 ]; }
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
# The guide's commands detached one of the two clients.
scrape() {
    exec 3<> /dev/tcp/127.0.0.1/9779 || return
    printf 'GET /metrics HTTP/1.1\r\n\r\n' >&3
    timeout 5 cat <&3 > /tmp/metrics
    grep -q '^pageone_client_pages{.*state="merged"} 4096' /tmp/metrics
}
holds 'it tells of the client' within 10 scrape
grep '^pageone_client_pages' /tmp/metrics
# What the package of the host's module brings for it.
install -D -m 644 /pageonefs.conf /etc/systemd/system/pageone.service.d/pageonefs.conf
systemctl daemon-reload
holds 'it starts with the right to manage mounts' systemctl restart pageone
holds 'it has that capability besides' grep -q 'CapEff:.*0000000000280005' "/proc/$(systemctl show -P MainPID pageone)/status"
holds 'its exposure is at most 2.3 with it' systemd-analyze security --threshold=23 pageone
holds 'nothing was refused to it' eval "! journalctl -u pageone | grep -E 'not permitted|cannot|panicked'"
journalctl -u pageone
