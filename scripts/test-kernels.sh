#!/bin/bash
# Runs the hazard tests inside a QEMU guest of Debian's 6.12 cloud kernel (and any other kernel of the cache that is
# 6.7 or later): the supported range is tested, not claimed. On an older one, Debian's 6.1, the program must say that it is
# too old. Needs no hardware virtualisation; takes some minutes.
#
#   scripts/test-kernels.sh [BIN-DIR [TEST-NAME...]]
#
# BIN-DIR holds the built programs (default: the debug directory of the cargo target directory). Tests may be chosen by
# parts of their names. PAGEONE_KERNELS_TIMEOUT: seconds for one guest, 1500 if unset.
# Exit: 0 all tests passed on every kernel; 1 otherwise, also when a guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
bin=${1:-${CARGO_TARGET_DIR:-target}/debug}
limit=${PAGEONE_KERNELS_TIMEOUT:-1500}
work=$(mktemp -d /tmp/pageone-kernels.XXXXXX)
qemu=
cleanup() {
    if [ -n "$qemu" ]; then kill "$qemu" 2>/dev/null && wait "$qemu" || true; fi
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
fail() { echo "test-kernels: $*" >&2; exit 1; }

tests=$(cargo test --quiet -p e2e --test hazards --no-run --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*hazards[^"]*\)".*/\1/p' | tail -n 1) && [ -x "$tests" ] ||
    fail "the hazard tests could not be built"
programs=("$bin/pageone" "$bin/pageone-test-client" "$bin/libpageone_agent.so")
for program in "${programs[@]}"; do
    [ -f "$program" ] || fail "$program is missing: run 'cargo build --workspace'"
done
# The shell and the wrappers that the tests run must be dynamic programs, which take the preload: busybox does not.
wrappers=()
for name in sh timeout ls wc; do wrappers+=("$(command -v "$name")"); done

root=$work/root
mkdir -p "$root"/{bin,proc,sys,dev,tmp,pageone}
cp "$(command -v busybox)" "$root/bin/busybox"
cp -L "${wrappers[@]}" "$root/bin/"
cp "${programs[@]}" "$root/pageone/"
cp "$tests" "$root/pageone/hazards"
strip "$root"/pageone/*
printf '%s\n' "${@:2}" > "$root/pageone/filters"
# The libraries that they use, where the loader looks for them.
ldd "${programs[@]}" "$tests" "${wrappers[@]}" | grep -o '/[^ ]*\.so[^ ]* (' | tr -d ' (' | sort -u |
    while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
cat > "$root/init" <<'INIT'
#!/bin/busybox sh
export PATH=/bin HOME=/tmp
# Without overwriting: the dynamic programs stay.
for name in $(/bin/busybox --list); do
    [ -e "/bin/$name" ] || /bin/busybox ln -s busybox "/bin/$name"
done
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir /dev/shm
mount -t tmpfs -o size=90% tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
# Only what ends the kernel goes to the console at once; the rest is looked through at the end.
dmesg -n 1
ip link set lo up
echo "PAGEONE-KERNEL $(uname -r)"
cd /tmp
case $(uname -r) in [0-5].* | 6.[0-6].*)
    # Too old to merge: doctor must say so, and a program must run all the same.
    /pageone/pageone doctor
    code=$?
    out=$(/pageone/pageone run -- ls -d /pageone 2> /tmp/said)
    cat /tmp/said
    if [ "$code $out" = "7 /pageone" ] && grep -q '6\.7 or later is needed' /tmp/said; then
        echo 'test result: ok. 1 passed: said what is missing, and ran the program'
        echo 'PAGEONE-TESTS-ENDED 0'
    else
        echo "doctor ended with $code; the program said '$out'"
        echo 'PAGEONE-TESTS-ENDED 1'
    fi
    poweroff -f
    ;;
esac
PAGEONE_BIN_DIR=/pageone PAGEONE_TEST_PATIENCE=8 PAGEONE_TEST_SYSCTL=1 \
    /pageone/hazards --test-threads=1 --show-output $(cat /pageone/filters) 2>&1
code=$?
dmesg | grep -E 'WARNING:|BUG:|Oops|segfault|general protection|rcu: INFO|hung task|blocked for more'
echo "PAGEONE-TESTS-ENDED $code"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | busybox cpio -o -H newc) > "$work/initrd" 2> "$work/cpio" ||
    fail "the guest's file system could not be packed: $(cat "$work/cpio")"

failed=0 ran=0
for kernel in "$cache"/kernels/*/vmlinuz; do
    [ -e "$kernel" ] || continue
    version=$(basename "$(dirname "$kernel")")
    if [ "$(printf '%s\n' 6.7 "$version" | sort -V | head -n 1)" = 6.7 ]; then ran=$((ran + 1)); fi
    started=$SECONDS
    echo "test-kernels: Linux $version"
    : > "$work/console"
    # Without cmpxchg16b, which QEMU 7.2 emulates with wrong flags. With two NUMA nodes.
    timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -smp 2,sockets=2 -cpu qemu64,-cx16 -m 4096 \
        -object memory-backend-ram,size=2G,id=ram0 -object memory-backend-ram,size=2G,id=ram1 \
        -numa node,memdev=ram0,cpus=0 -numa node,memdev=ram1,cpus=1 \
        -kernel "$kernel" -initrd "$work/initrd" -append 'console=ttyS0 quiet panic=-1 mitigations=off' \
        -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" -monitor none < /dev/null &
    qemu=$!
    # Each line as it comes, with the seconds since the guest's start; without the lists that only repeat the tests' names.
    tail -n +1 -s 0.2 -f --pid="$qemu" "$work/console" | while IFS= read -r line || [ -n "$line" ]; do
        line=${line%$'\r'}
        if [[ $line =~ ^('    '[a-z0-9_:]+|successes:|failures:)?$ ]]; then continue; fi
        printf '%4d  %s\n' $((SECONDS - started)) "$line"
    done &
    shown=$!
    code=0
    wait "$qemu" || code=$?
    qemu=
    wait "$shown"
    # The guest's kernel must be well too.
    unwell=$(grep -c -E 'Kernel panic|WARNING:|BUG:|Oops' "$work/console") || true
    if [ "$unwell" -eq 0 ] && tr -d '\r' < "$work/console" | grep -qx 'PAGEONE-TESTS-ENDED 0' &&
        grep -q '^test result: ok\. [1-9]' "$work/console"; then
        echo "test-kernels: Linux $version passed in $((SECONDS - started)) s"
        continue
    fi
    failed=1
    why='a test failed, or none was run'
    if [ "$unwell" -gt 0 ]; then why='its kernel complained, see above'; fi
    if ! grep -q '^PAGEONE-TESTS-ENDED' "$work/console"; then
        why="the guest ended before its tests (QEMU: $code)"
    fi
    if [ "$code" -eq 124 ]; then why="the guest was not done after $limit s"; fi
    echo "test-kernels: Linux $version FAILED: $why" >&2
done
[ "$ran" -gt 0 ] || fail "no kernel of 6.7 or later in $cache/kernels: 'scripts/deps.sh kernels' fetches one"
exit "$failed"
