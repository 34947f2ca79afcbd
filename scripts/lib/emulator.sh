# shellcheck shell=bash
# What scripts/lib/kvm-host.sh and scripts/lanes/libvirt.sh share: the emulator of a machine with KVM, and to wait for what runs in it.
# PAGEONE_KVM_STOCK=1: the emulator as it is installed, with its faults.
#
# Two stores are taken out of a copy of the emulator; guests, or the host, die of them (docs/results.md):
# - helper_vmrun (target/i386/tcg/sysemu/svm_helper.c) notes an interrupt that KVM injects as the pending exception. If another
#   thread interrupts the emulated processor before the guest exits, the guest gets that interrupt once more, wherever it is.
# - cpu_clear_ignne (fpu_helper.c there) clears a bit in a word of the *first* processor, for each FPU state that any processor
#   loads, and not atomically. The first processor's own changes get lost: the host's interrupts are on where VMRUN or an exit
#   turned them off, or the guest's page tables are read at addresses of the host. Linux never sets that bit.

# emulator WORK: sets `emulator` to a command with its first options; WORK is a directory that stays as long as it runs.
emulator() {
    local program work=$1 options=()
    program=$(command -v qemu-system-x86_64)
    if [ "${PAGEONE_KVM_STOCK:-0}" != 1 ]; then
        # mov %esi,exception_index; movl $0,exception_is_int; movq $-1,exception_next_eip; testb $2,loglevel; jne; mov $1,%edx
        # call; andl $~0x80,hflags2; add $8,%rsp
        if perl -0777 -pe 'BEGIN { binmode STDIN; binmode STDOUT }
            $n = s/\x89[\x80-\xbf].{4}(?=\xc7[\x80-\xbf].{4}\0{4}\x48\xc7[\x80-\xbf].{4}\xff{4}\xf6\x05.{4}\x02\x0f\x85.{4}\xba\x01\0{3})/\x66\x0f\x1f\x44\0\0/sg;
            $m = s/(\xe8.{4})\x81\xa0.{4}\x7f\xff\xff\xff(?=\x48\x83\xc4\x08)/$1\x66\x2e\x0f\x1f\x84\0\0\0\0\0/sg;
            END { $? = 1 if $n != 1 || $m != 1 }' < "$program" > "$work/emulator"; then
            chmod 755 "$work/emulator"
            program=$work/emulator
            QEMU_MODULE_DIR=$(dirname "$(ls /usr/lib/*/qemu/accel-tcg-x86_64.so | head -n 1)")
            export QEMU_MODULE_DIR
            options=(-L /usr/share/qemu -L /usr/share/seabios)
        else
            echo "${0##*/}: this QEMU is not one whose faults are known, and is used as it is: guests may hang or die" >&2
        fi
    fi
    # Without cmpxchg16b, which QEMU 7.2 emulates with wrong flags; and without fast string instructions (ERMS, FSRM). A processor
    # with these moves a cache line at a time, the emulator a byte: kernel and C library would copy and clear memory ten times
    # slower than they need to, and nothing else would.
    emulator=("$program" "${options[@]}" -machine q35 -accel "tcg,thread=multi" -cpu "max,-cx16,-erms,-fsrm,+svm")
}

# emulated QEMU WORK WORD: shows WORK/console until the process QEMU ends, and removes WORK. Exit: the number in the console's last
# line "WORD NUMBER"; 1 without one.
emulated() {
    local qemu=$1 work=$2 word=$3 me=${0##*/} shown code
    # shellcheck disable=SC2064
    trap "kill $qemu 2>/dev/null || true; wait $qemu 2>/dev/null || true; rm -rf '$work'" EXIT
    tail -n +1 -s 0.2 -F --pid="$qemu" "$work/console" 2>/dev/null | sed -u 's/\r$//' &
    shown=$!
    wait "$qemu" || echo "${me%.sh}: QEMU ended with $?" >&2
    wait "$shown" || true
    code=$(tr -d '\r' < "$work/console" | sed -n "s/^$word //p" | tail -n 1)
    [ -n "$code" ] || { echo "${me%.sh}: the host ended before its work did" >&2; exit 1; }
    exit "$code"
}
