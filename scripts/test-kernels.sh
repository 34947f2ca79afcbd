#!/bin/bash
# Runs the hazard tests inside a QEMU guest of Debian's 6.12 cloud kernel (and any other kernel of the cache that is
# 6.7 or later): the supported range is tested, not claimed. Needs no hardware virtualisation; takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
bin=${1:-target/debug}
work=$(mktemp -d /tmp/pageone-kernels.XXXXXX)
qemu=
trap '[ -z "$qemu" ] || kill "$qemu" 2>/dev/null || true; rm -rf "$work"' EXIT

tests=$(cargo test -p e2e --test hazards --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*hazards[^"]*\)".*/\1/p' | tail -n 1)
[ -x "$tests" ] || { echo "test-kernels: the hazard tests were not built" >&2; exit 1; }

root=$work/root
mkdir -p "$root"/{bin,lib64,lib,proc,sys,dev,tmp,run,pageone}
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$bin/pageone" "$bin/pageone-test-client" "$bin/libpageone_agent.so" "$root/pageone/"
cp "$tests" "$root/pageone/hazards"
strip "$root"/pageone/* 2>/dev/null || true
# The C library, which all four use.
ldd "$bin/pageone" "$bin/pageone-test-client" "$bin/libpageone_agent.so" "$tests" |
    sed -n 's/.*\(\/[^ ]*\.so[^ ]*\) (.*/\1/p' | sort -u | while read -r library; do
    mkdir -p "$root/$(dirname "$library")"
    cp -L "$library" "$root/$library"
done
cat > "$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp RUST_BACKTRACE=0
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm /sys/fs/cgroup
mount -t tmpfs -o size=90% tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; mount -t cgroup2 cgroup /sys/fs/cgroup
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
echo 1 > /proc/sys/kernel/printk
ip link set lo up
echo "PAGEONE-KERNEL $(uname -r)"
cd /tmp
PAGEONE_BIN_DIR=/pageone PAGEONE_TEST_PATIENCE=8 /pageone/hazards --test-threads=1
echo "PAGEONE-TESTS-ENDED $?"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null) > "$work/initrd"

failed=0 ran=0
for kernel in "$cache"/kernels/*/vmlinuz; do
    version=$(basename "$(dirname "$kernel")")
    # 6.7 and later.
    if [ "$(printf '%s\n' 6.7 "$version" | sort -V | head -n 1)" != 6.7 ]; then continue; fi
    ran=$((ran + 1))
    echo "test-kernels: Linux $version"
    # Without cmpxchg16b, which QEMU 7.2 emulates with wrong flags.
    timeout "${PAGEONE_KERNELS_TIMEOUT:-1500}" qemu-system-x86_64 -accel tcg,thread=multi -smp 2 -cpu qemu64,-cx16 -m 4096 \
        -kernel "$kernel" -initrd "$work/initrd" -append 'console=ttyS0 quiet panic=-1 mitigations=off' \
        -nodefaults -no-user-config -no-reboot -display none -serial "file:$work/console" -monitor none < /dev/null &
    qemu=$!
    wait "$qemu" || true
    qemu=
    tr -d '\r' < "$work/console" | grep -E '^PAGEONE|^test |test result|SKIPPED|panicked|Kernel panic' || true
    if ! grep -q 'PAGEONE-TESTS-ENDED 0' "$work/console"; then
        echo "test-kernels: Linux $version FAILED; its console's end:" >&2
        tail -n 60 "$work/console" >&2
        failed=1
    fi
done
[ "$ran" -gt 0 ] || { echo "test-kernels: no kernel of 6.7 or later in $cache/kernels; scripts/deps.sh kernels fetches one" >&2; exit 1; }
exit "$failed"
