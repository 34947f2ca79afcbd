/* A virtual machine monitor on /dev/kvm whose guests' memory merges.
 *
 *   cc -o vmm examples/vmm.c -Iinclude -Ltarget/release -lpageone_agent
 *   LD_LIBRARY_PATH=target/release ./vmm [SOCKET] &      # start two: they hold the same
 *   pageone status
 *
 * The guest adds up the first word of each page, over and over, in 32-bit mode. Each sum is a line
 * on standard output. SIGTERM or SIGINT ends it: the memory is given back, and looked at. Exit: 0,
 * or 1 if something failed or a byte was wrong.
 *
 * Three calls make it merge: pageone_start(), pageone_register() and pageone_stop(). */
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pageone.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

enum { PAGE = 4096, MEMORY = 32 << 20, CODE = 0x1000, FIRST = 0x200000, PORT = 0x10 };

/* The guest's program, at CODE. */
static const uint8_t program[] = {
    0xbf, 0x00, 0x00, 0x20, 0x00,       /* again: mov edi, FIRST      */
    0x31, 0xc0,                         /*        xor eax, eax        */
    0x03, 0x07,                         /* next:  add eax, [edi]      */
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, /*        add edi, PAGE       */
    0x81, 0xff, 0x00, 0x00, 0x00, 0x02, /*        cmp edi, MEMORY     */
    0x72, 0xf0,                         /*        jb next             */
    0xe7, PORT,                         /*        out PORT, eax       */
    0xeb, 0xe5,                         /*        jmp again           */
};

static volatile sig_atomic_t ended;
static struct kvm_run *run;

static void end(int signal)
{
    (void)signal;
    ended = 1;
    /* KVM_RUN returns at once, though the signal comes before it. */
    run->immediate_exit = 1;
}

static void fail(const char *what)
{
    fprintf(stderr, "vmm: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* What word `n` of the guest's memory holds. */
static uint32_t word(size_t n)
{
    return (uint32_t)n * 2654435761u;
}

/* An ioctl that must not fail. */
static int kvm(int fd, unsigned long request, uintptr_t argument, const char *name)
{
    int result = ioctl(fd, request, argument);
    if (result < 0)
        fail(name);
    return result;
}

/* One virtual processor in 32-bit mode, without paging, at CODE. */
static int processor(int system, int machine)
{
    int cpu = kvm(machine, KVM_CREATE_VCPU, 0, "KVM_CREATE_VCPU");
    int size = kvm(system, KVM_GET_VCPU_MMAP_SIZE, 0, "KVM_GET_VCPU_MMAP_SIZE");
    run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, cpu, 0);
    if (run == MAP_FAILED)
        fail("mapping the processor");
    struct kvm_sregs special;
    kvm(cpu, KVM_GET_SREGS, (uintptr_t)&special, "KVM_GET_SREGS");
    struct kvm_segment code = { .limit = 0xffffffff, .selector = 8, .type = 11, .present = 1, .db = 1, .s = 1, .g = 1 };
    struct kvm_segment data = code;
    data.selector = 16;
    data.type = 3;
    special.cs = code;
    special.ds = special.es = special.fs = special.gs = special.ss = data;
    special.cr0 |= 1; /* protected mode */
    kvm(cpu, KVM_SET_SREGS, (uintptr_t)&special, "KVM_SET_SREGS");
    struct kvm_regs registers = { .rip = CODE, .rflags = 2 };
    kvm(cpu, KVM_SET_REGS, (uintptr_t)&registers, "KVM_SET_REGS");
    return cpu;
}

int main(int arguments, char **argument)
{
    int system = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (system < 0)
        fail("/dev/kvm");
    int machine = kvm(system, KVM_CREATE_VM, 0, "KVM_CREATE_VM");
    uint8_t *memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("memory for the guest");
    struct kvm_userspace_memory_region slot = { .memory_size = MEMORY, .userspace_addr = (uintptr_t)memory };
    kvm(machine, KVM_SET_USER_MEMORY_REGION, (uintptr_t)&slot, "KVM_SET_USER_MEMORY_REGION");
    uint32_t *words = (uint32_t *)memory;
    for (size_t n = FIRST / sizeof *words; n < MEMORY / sizeof *words; n++)
        words[n] = word(n);
    memcpy(memory + CODE, program, sizeof program);

    /* The guest runs whether or not its memory can be merged. */
    struct pageone_options options = { .size = sizeof options, .socket = arguments > 1 ? argument[1] : NULL };
    if (pageone_start(&options) != 0 || pageone_register(memory, MEMORY) != 0)
        fprintf(stderr, "vmm: not merged: %s\n", pageone_error());

    int cpu = processor(system, machine);
    struct sigaction action = { .sa_handler = end };
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    uint32_t expected = 0;
    for (size_t at = FIRST; at < MEMORY; at += PAGE)
        expected += word(at / sizeof *words);
    while (!ended) {
        if (ioctl(cpu, KVM_RUN, 0) < 0) {
            if (errno == EINTR)
                continue;
            fail("KVM_RUN");
        }
        if (run->exit_reason != KVM_EXIT_IO) {
            fprintf(stderr, "vmm: the guest ended: KVM's exit reason is %u\n", run->exit_reason);
            return 1;
        }
        uint32_t sum = *(uint32_t *)((uint8_t *)run + run->io.data_offset);
        printf("sum %08x, %s\n", sum, sum == expected ? "right" : "WRONG");
        fflush(stdout);
        if (sum != expected)
            return 1;
    }

    if (pageone_stop() != 0)
        fprintf(stderr, "vmm: %s\n", pageone_error());
    for (size_t n = FIRST / sizeof *words; n < MEMORY / sizeof *words; n++)
        if (words[n] != word(n)) {
            printf("word %zu is WRONG\n", n);
            return 1;
        }
    puts("given back, all bytes right");
    return 0;
}
