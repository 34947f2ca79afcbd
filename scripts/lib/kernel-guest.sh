# shellcheck shell=bash
# What scripts/lanes/kernels.sh, scripts/lanes/kernels.sh and scripts/lanes/pool-medium.sh share: the file system of a guest that
# runs tests, and booting it. To be sourced in the repository's root; sets `work` to a directory that goes at the end.

lane=$(basename "$0" .sh)
fail() { echo "$lane: $*" >&2; exit 1; }

cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
work=$(mktemp -d /tmp/pageone-kernels.XXXXXX)
qemu=
cleanup() {
    if [ -n "$qemu" ]; then kill "$qemu" 2>/dev/null && wait "$qemu" || true; fi
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Lines of the kernel's log that mean that it is not well.
unwell='Kernel panic|WARNING:|BUG:|kernel BUG|Oops|KASAN|general protection|[Bb]ad page|refcount_t|possible .* locking|'
unwell+='inconsistent lock state|suspicious RCU|hung task|blocked for more|rcu: INFO|soft lockup|segfault|held lock'

# libraries ROOT PROGRAM...: copies the libraries that they use to where the loader looks for them.
libraries() {
    local root=$1
    shift
    ldd "$@" | grep -o '/[^ ]*\.so[^ ]* (' | tr -d ' (' | sort -u |
        while read -r library; do
            mkdir -p "$root$(dirname "$library")"
            cp -L "$library" "$root$library"
        done
}

# initrd ROOT: makes $work/initrd of it.
initrd() {
    (cd "$1" && find . | busybox cpio -o -H newc) > "$work/initrd" 2> "$work/cpio" ||
        fail "the guest's file system could not be packed: $(cat "$work/cpio")"
}

# pack BIN-DIR [TEST-NAME...]: builds the tests and makes $work/initrd of them, the programs and what they need.
pack() {
    local bin=$1 root=$work/root tests program programs wrappers=() name
    shift
    tests=$(cargo test --quiet -p e2e --test hazards --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*hazards[^"]*\)".*/\1/p' | tail -n 1) && [ -x "$tests" ] ||
        fail "the hazard tests could not be built"
    programs=("$bin/pageone" "$bin/pageone-test-client" "$bin/pageone-behaviour-fuzz" \
        "$bin/pageone-hostile-client" "$bin/libpageone_agent.so")
    for program in "${programs[@]}"; do
        [ -f "$program" ] || fail "$program is missing: run 'cargo build --workspace'"
    done
    # The shell and the wrappers that the tests run must be dynamic programs, which take the preload: busybox does not.
    for name in sh timeout ls wc; do wrappers+=("$(command -v "$name")"); done
    mkdir -p "$root"/{bin,proc,sys,dev,tmp,pageone,faulty}
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp -L "${wrappers[@]}" "$root/bin/"
    cp "${programs[@]}" "$root/pageone/"
    cp "$tests" "$root/pageone/hazards"
    strip "$root"/pageone/*
    printf '%s\n' "$@" > "$root/pageone/filters"
    printf '%s\n' "$unwell" > "$root/pageone/unwell"
    cp guest/hazards/init "$root/init"
    cp guest/hazards/faulty "$root/faulty/pageone"
    cp guest/hazards/faulty "$root/faulty/pageone-test-client"
    chmod 755 "$root/init" "$root"/faulty/*
    libraries "$root" "${programs[@]}" "$tests" "${wrappers[@]}"
    initrd "$root"
}

# The guest's clock is the host's counter. A busy host spoils the guest's own calibration, and its seconds get long.
clock() {
    if grep -q '^flags.* constant_tsc.* hypervisor' /proc/cpuinfo; then
        sed -n 's/^cpu MHz[^0-9]*\([0-9]*\)\.\([0-9]\{3\}\).*/tsc_early_khz=\1\2/p; T; q' /proc/cpuinfo
    fi
}

# boot NAME KERNEL LIMIT PARAMETERS: runs a guest for at most LIMIT seconds. Its console goes to standard output. Returns 0
# if all tests passed and its kernel is well. `devices` are more options of QEMU's, `memory` is the guest's, in MiB, and
# `processors` says how many it has, in two NUMA nodes.
# `complains` is what the kernel has to say where the guard is off that keeps it from that; it may say more then.
devices=()
complains=
memory=4096
processors=2
boot() {
    local name=$1 kernel=$2 limit=$3 parameters="$(clock) $4" started=$SECONDS shown code=0 silent=no complaints why
    echo "$lane: $name"
    : > "$work/console"
    # Without cmpxchg16b, which QEMU 7.2 emulates with wrong flags.
    timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -smp "$processors,sockets=$processors" -cpu qemu64,-cx16 -m "$memory" \
        -object memory-backend-ram,size=$((memory / 2))M,id=ram0 -object memory-backend-ram,size=$((memory / 2))M,id=ram1 \
        -numa "node,memdev=ram0,cpus=0-$((processors / 2 - 1))" \
        -numa "node,memdev=ram1,cpus=$((processors / 2))-$((processors - 1))" \
        -kernel "$kernel" -initrd "$work/initrd" \
        -append "console=ttyS0 quiet log_buf_len=4M panic=-1 no_timer_check mitigations=off $parameters" \
        -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" -monitor none "${devices[@]}" < /dev/null &
    qemu=$!
    # Each line as it comes, with the seconds since the guest's start.
    tail -n +1 -s 0.2 -f --pid="$qemu" "$work/console" | while IFS= read -r line || [ -n "$line" ]; do
        line=${line%$'\r'}
        printf '%4d  %s\n' $((SECONDS - started)) "$line"
    done &
    shown=$!
    wait "$qemu" || code=$?
    qemu=
    wait "$shown"
    # The guest's kernel must be well too.
    complaints=$(grep -E "^kernel: .*($unwell)|Kernel panic" "$work/console" | wc -l) || true
    if [ -n "$complains" ]; then grep -q -E "^kernel: .*($complains)" "$work/console" && complaints=0 || silent=yes; fi
    echo "$lane: $name, in short:"
    tr -d '\r' < "$work/console" | sed -n 's/^PAGEONE-REPORT /    /p'
    echo "    kernel: $complaints complaints"
    # Not grep -q: it ends at the first line that it finds, and tr with an error.
    if [ "$complaints" -eq 0 ] && [ "$silent" = no ] &&
        tr -d '\r' < "$work/console" | grep -x 'PAGEONE-TESTS-ENDED 0' > /dev/null &&
        grep -q '^PAGEONE-REPORT [a-z ]*: [1-9][0-9]* passed' "$work/console"; then
        echo "$lane: $name passed in $((SECONDS - started)) s"
        return 0
    fi
    why='a test failed, or none was run'
    if [ "$silent" = yes ]; then why="its kernel did not say '$complains'"; fi
    if [ "$complaints" -gt 0 ]; then why="its kernel complained, see the lines 'kernel:'"; fi
    if ! grep -q '^PAGEONE-TESTS-ENDED' "$work/console"; then why="the guest ended before its tests (QEMU: $code)"; fi
    if [ "$code" -eq 124 ]; then why="the guest was not done after $limit s"; fi
    echo "$lane: $name FAILED: $why" >&2
    return 1
}
