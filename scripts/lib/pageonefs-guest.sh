# shellcheck shell=bash
# What the scripts share that run the tests of host/linux/pageonefs in guests. To be sourced after scripts/lib/kernel-guest.sh.

sources=host/linux/pageonefs/test

# Parameters of the kernels of scripts/lib/debug-kernel.sh: NUMA nodes are fake ones, as there is no ACPI; SLUB checks what it frees;
# slabs have two pages at first, and one where two cannot be had, so that no mapping fails for its slab; leaks are looked for.
checks='numa=fake=2 tsc=reliable hung_task_panic=1 slab_debug=FZ page_poison=1 slab_min_order=1 kmemleak=on LEAKS=1'
# They write to all memory at their start.
memory=1536

# pack_guest KERNEL [y]: makes $work/initrd with the module for this kernel (see scripts/lib/module.sh); with y, one whose guards
# can be off. With kmem's wrapper, where `kmem` is set, and with the daemon, where `daemon` is.
pack_guest() {
    local kernel=$1 root=$work/root
    rm -rf "$root"
    mkdir -p "$root"/{bin,proc,sys,dev,tmp,mnt}
    cp "$(command -v busybox)" "$root/bin/busybox"
    PAGEONEFS_SABOTAGE=${2:-} scripts/lib/module.sh pageonefs "$kernel" "$root"
    compile "$root/pageonefs-test" main pages files hazards memory frames huge protect lend account committed held-up refuse tenants left debts
    compile "$root/pageonefs-fuzz" fuzz fuzz-model fuzz-ops fuzz-calls fuzz-daemon pages
    compile "$root/pageonefs-accounts" fuzz-accounts fuzz-accounts-{worker,ops,daemon,check} pages
    if [ -n "${kmem:-}" ]; then
        cp "$kmem" "$root/kmem-test"
        strip "$root/kmem-test"
        libraries "$root" "$kmem"
    fi
    if [ -n "${daemon:-}" ]; then
        mkdir -p "$root/pageone"
        cp "$programs"/{pageone,pageone-test-client,libpageone_agent.so} "$root/pageone/"
        cp "$daemon" "$root/pageone/functional"
        strip "$root"/pageone/*
        libraries "$root" "$root"/pageone/*
    fi
    printf '%s\n' "$unwell" > "$root/unwell"
    cp "$sources/init" "$root/init"
    cp "$sources/soak" "$root/soak"
    chmod 755 "$root/init" "$root/soak"
    mknod "$root/dev/console" c 5 1 2>/dev/null || true
    initrd "$root"
}

# compile PROGRAM SOURCE...
compile() {
    local program=$1 files
    shift
    files=("${@/#/$sources/}")
    gcc -std=gnu11 -O2 -Wall -Wextra -Werror -static -pthread -o "$program" "${files[@]/%/.c}" ||
        fail "$program does not compile"
}

# The typed interface's tests, as a program.
kmem_tests() {
    kmem=$(cargo test --quiet -p kmem --lib --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*kmem[^"]*\)".*/\1/p' | tail -n 1) && [ -x "$kmem" ] || fail "kmem's tests could not be built"
}

# The daemon's tests that need no guest, as a program, and the programs that they run.
daemon_tests() {
    programs=$(realpath "${CARGO_TARGET_DIR:-target}/debug")
    cargo build --quiet -p pageone -p agent -p e2e --lib --bins || fail "the daemon could not be built"
    daemon=$(cargo test --quiet -p e2e --test functional --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\/functional-[^"]*\)".*/\1/p' | tail -n 1) && [ -x "$daemon" ] ||
        fail "the daemon's tests could not be built"
}

# A slow disk with random content, one for swap, and one to write to. NVMe is built into these kernels.
head -c 8M /dev/urandom > "$work/slow"
truncate -s 512M "$work/swap"
truncate -s 64M "$work/scratch"
devices=(
    -drive "file=$work/slow,format=raw,if=none,id=slow,throttling.iops-total=60" -device nvme,serial=slow,drive=slow
    -drive "file=$work/swap,format=raw,if=none,id=swap" -device nvme,serial=swap,drive=swap
    -drive "file=$work/scratch,format=raw,if=none,id=scratch" -device nvme,serial=scratch,drive=scratch
)
