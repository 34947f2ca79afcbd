// SPDX-License-Identifier: GPL-2.0
/*
 * The kernel's ways to memory: pins, direct I/O, swap, huge pages, other processes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pages.h"

#define SLOW_DISK "/dev/slow"
#define SWAP_DISK "/dev/swap"

/* ---- others that hold pages ----------------------------------------------------------- */

/* A page that a pipe, or a device, holds is not merged: what is written there must arrive. */
static void held(void)
{
	struct file f = file_make(64);
	char *m = file_map(f), buffer[PAGE];
	struct iovec v = { at(m, 30), PAGE };
	int pipes[2], merged = 0, disk = open(SLOW_DISK, O_RDONLY | O_DIRECT), wrong = 0, reads = 0;

	all_merged(f, m, 5);
	fill(at(m, 30), 1);
	fill(at(m, 31), 1);
	CHECK(!pipe(pipes) && vmsplice(pipes[1], &v, 1, 0) == (ssize_t)PAGE);
	for (int i = 0; i < 20; i++) {
		merged += merge_round(f);
		usleep(20000);
	}
	CHECK(merged <= 1 && describe(f.id).merged_pages <= 63);
	CHECK(read(pipes[0], buffer, PAGE) == (ssize_t)PAGE && holds(buffer, 1));
	if (disk < 0) {
		printf("    SKIPPED direct I/O: there is no %s\n", SLOW_DISK);
		return;
	}
	/* A disk writes into pages that are about to be merged. */
	char *want = mmap(0, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pid_t merger = fork();

	if (!merger)
		while (!sh->stop)
			merge_round(f);
	for (double end = now() + 12; now() < end; reads++) {
		uint32_t i = rand() % 4 * 16, off = rand() % 64 << 16;

		for (int j = 0; j < 16; j++)
			fill(at(m, i + j), 3);
		if (rand() & 1)
			usleep(3000);
		if (pread(disk, at(m, i), 1 << 16, off) != 1 << 16 || pread(disk, want, 1 << 16, off) != 1 << 16)
			BAD("pread");
		if (memcmp(want, at(m, i), 1 << 16) && wrong++ < 3)
			BAD("read %d lost bytes", reads);
	}
	sh->stop = 1;
	kill(merger, SIGKILL);
	waitpid(merger, 0, 0);
	printf("    %d reads of 64 KiB past the page cache, %d wrong\n", reads, wrong);
	CHECK(reads > 50);
	close(disk);
	close(f.fd);
}

/* What somebody holds, who may write it by another way than a mapping, keeps its bit. */
static void dirty_held(void)
{
	struct file f = file_make(64);
	char *m = file_map(f), buffer[PAGE];
	struct iovec v = { at(m, 30), PAGE };
	uint64_t bits = 1;
	int pipes[2];

	for (int i = 0; i < 64; i++)
		fill(at(m, i), 1);
	CHECK(!pipe(pipes) && vmsplice(pipes[1], &v, 1, 0) == (ssize_t)PAGE);
	/* All others are in no batch any more, by and by. */
	for (int tries = 0; tries < 500 && bits != 1ull << 30; tries++) {
		harvest(f, &bits);
		merge_round(f);
		usleep(10000);
	}
	CHECK(bits == 1ull << 30);
	harvest(f, &bits);
	CHECK(bits == 1ull << 30 && read(pipes[0], buffer, PAGE) == (ssize_t)PAGE);
	harvest(f, &bits);
	harvest(f, &bits);
	CHECK(bits == 0);
	munmap(m, 64 * PAGE);
	close(f.fd);
}

static void *disk_read(void *arg)
{
	struct file *f = arg;
	int disk = open(SLOW_DISK, O_RDONLY | O_DIRECT | O_CLOEXEC);
	char *m = file_map(*f);

	for (int i = 0; !sh->stop; i++) {
		if (pread(disk, m, 16 * PAGE, (i & 63) << 16) != 16 * PAGE)
			BAD("pread");
		sh->checks++;
		/* One after the other, so that each is slow. The next sets the bits again: after a look. */
		if (i % 4 == 3)
			usleep(45000);
	}
	munmap(m, 16 * PAGE);
	close(disk);
	return NULL;
}

/* What a disk writes into a mapping after a harvest is named by the next one. */
static void dirty_disk(void)
{
	struct file f = file_make(64);
	uint64_t before[64], after[64], a, b;
	int changes = 0, missed = 0;
	pthread_t t;

	if (access(SLOW_DISK, F_OK)) {
		printf("    SKIPPED: there is no %s\n", SLOW_DISK);
		return;
	}
	pthread_create(&t, NULL, disk_read, &f);
	for (double end = now() + 8; now() < end;) {
		harvest(f, &a);
		digests(f, before);
		usleep(20000);
		digests(f, after);
		harvest(f, &b);
		for (int i = 0; i < 16; i++) {
			changes += before[i] > 2 && before[i] != after[i];
			missed += before[i] > 2 && before[i] != after[i] && !(b >> i & 1);
		}
	}
	sh->stop = 1;
	pthread_join(t, NULL);
	printf("    %d pages changed after a harvest, %ld reads of the disk\n", changes, sh->checks);
	if (missed)
		BAD("%d of %d changes are not dirty", missed, changes);
	CHECK(changes > 50);
	close(f.fd);
}

/* Long-term pins: as registered buffers of io_uring are. */
static void pins(void)
{
	struct file f = file_make(64);
	char *m = file_map(f);
	struct rlimit limit = { RLIM_INFINITY, RLIM_INFINITY };
	struct io_uring_params p = { 0 };
	int ring = syscall(SYS_io_uring_setup, 4, &p), pinned;
	struct iovec v = { m, 64 * PAGE };
	struct pageonefs_plain plain = { .id = f.id };

	setrlimit(RLIMIT_MEMLOCK, &limit);
	CHECK(ring >= 0);
	for (int i = 0; i < 64; i++)
		fill(at(m, i), 5);
	pinned = !syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &v, 1);
	printf("    a pin for long, of pages that are written: %s\n", pinned ? "taken" : strerror(errno));
	if (pinned) {
		/* Nothing is merged that is pinned, and after a while nothing of the file. */
		path_write(PARAMETERS "pin_seconds", "1");
		for (int i = 0; i < 40 && !describe(f.id).plain; i++) {
			merge_round(f);
			usleep(100000);
		}
		path_write(PARAMETERS "pin_seconds", "10");
		CHECK(describe(f.id).plain == PAGEONEFS_PLAIN_PINNED);
		CHECK(!syscall(SYS_io_uring_register, ring, IORING_UNREGISTER_BUFFERS, 0, 0));
		CHECK(merge_round(f) == 0 && describe(f.id).merged_pages == 0);
	}
	for (int i = 0; i < 64; i++)
		CHECK(holds(at(m, i), 5));
	munmap(m, 64 * PAGE);
	close(f.fd);

	/* Asked for: its new mappings may be pinned, on every kernel, by every way. */
	f = file_make(64);
	m = file_map(f);
	all_merged(f, m, 6);
	plain.id = f.id;
	CHECK(!ioctl(control_open(MOUNT), PAGEONEFS_MAKE_PLAIN, &plain));
	CHECK(describe(f.id).plain == PAGEONEFS_PLAIN_ASKED && describe(f.id).merged_pages == 0);
	for (int i = 0; i < 64; i++)
		CHECK(holds(at(m, i), 6));
	char *again = file_map(f);

	v.iov_base = again;
	CHECK(!syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &v, 1));
	fill(at(again, 3), 7);
	CHECK(holds(at(m, 3), 7) && merge_round(f) == 0);
	close(ring);
	close(f.fd);
}

/* Merged and private pages, and holes: without a pin all go, and their bits are set. */
static void punch_free(void)
{
	struct file f = file_make(128);
	char *m = file_map(f);
	uint64_t bits[2], punched = ((1ull << 50) - 1) << 4;
	struct pageonefs_punch p = { .id = f.id, .start = 64, .pages = 64, .held = 1 };

	all_merged(f, m, 5);
	for (int i = 10; i < 50; i++)
		fill(at(m, i), 100 + i);
	for (int tries = 0; tries < 50 && harvest(f, bits); tries++)
		usleep(20000);
	CHECK(punch(f, 4, 50) == 0);
	CHECK(harvest(f, bits) >= 50 && (bits[0] & punched) == punched);
	for (int i = 0; i < 128; i++)
		CHECK(holds(at(m, i), i < 4 || i >= 54 ? 5 : 0));
	CHECK(describe(f.id).merged_pages > 40 && describe(f.id).merged_pages <= 78);
	fill(at(m, 20), 9);
	CHECK(holds(at(m, 20), 9) && punch(f, 0, 0) == 0 && punch(f, 100, 60) == 0 && holds(at(m, 127), 0));
	CHECK(ioctl(control_open(MOUNT), PAGEONEFS_PUNCH, &p) && errno == EFAULT);
	p.start = ~0ull - 5;
	CHECK(ioctl(control_open(MOUNT), PAGEONEFS_PUNCH, &p) && errno == EINVAL);
	struct pageonefs_plain plain = { .id = f.id };

	p.start = 0;
	p.held = (uintptr_t)bits;
	CHECK(!ioctl(control_open(MOUNT), PAGEONEFS_MAKE_PLAIN, &plain));
	CHECK(ioctl(control_open(MOUNT), PAGEONEFS_PUNCH, &p) && errno == EBUSY && holds(at(m, 20), 9));
	munmap(m, 128 * PAGE);
	close(f.fd);
}

/* Writes four pages by a call that pins them and then waits for what it is to write. */
struct pinning {
	char *to, *from;
};

static void *pinning(void *arg)
{
	struct pinning *p = arg;
	struct iovec local = { p->from, 4 * PAGE }, remote = { p->to, 4 * PAGE };

	if (process_vm_writev(getpid(), &local, 1, &remote, 1, 0) != 4 * (ssize_t)PAGE)
		BAD("process_vm_writev");
	return NULL;
}

/* What is pinned stays, and its user goes on with the pages that the file has. */
static void punch_pins(void)
{
	struct file f = file_make(64);
	char *m = file_map(f), *from = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *content = malloc(4 * PAGE);
	int waits = syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register all = { { (uintptr_t)from, 4 * PAGE }, UFFDIO_REGISTER_MODE_MISSING, 0 };
	struct uffdio_copy copy = { (uintptr_t)from, (uintptr_t)content, 4 * PAGE, 0, 0 };
	struct pinning p = { at(m, 40), from };
	struct uffd_msg message;
	pthread_t t;

	CHECK(waits >= 0 && !ioctl(waits, UFFDIO_API, &api) && !ioctl(waits, UFFDIO_REGISTER, &all));
	for (int i = 0; i < 64; i++)
		fill(at(m, i), 5);
	for (int i = 0; i < 4; i++)
		fill(at(content, i), 70 + i);
	pthread_create(&t, NULL, pinning, &p);
	CHECK(read(waits, &message, sizeof(message)) == sizeof(message));
	uint64_t held = punch(f, 0, 64);

	CHECK(!ioctl(waits, UFFDIO_COPY, &copy));
	pthread_join(t, NULL);
	for (int i = 0; i < 64; i++)
		if (!holds(at(m, i), i >= 40 && i < 44 ? 30 + i : 0))
			BAD("page %d when all were punched that are not pinned", i);
	CHECK(held == 15ull << 40 && punch(f, 0, 64) == 0 && holds(at(m, 41), 0));
	close(waits);
	close(f.fd);
}

/* ---- other processes -------------------------------------------------------------------- */

/* Waits until a page has this content, as another process writes it. */
static int becomes(const char *page, uint64_t content)
{
	for (double end = now() + 20; now() < end; usleep(1000))
		if (holds(page, content))
			return 1;
	return 0;
}

static void processes(void)
{
	struct file f = file_make(64);
	char *m = file_map(f), buffer[PAGE], other[PAGE], path[128];
	int status;
	pid_t me = getpid(), k;

	all_merged(f, m, 5);
	k = fork();
	if (!k) {
		int bad = !holds(at(m, 9), 5);

		fill(at(m, 9), 6);
		_exit(bad || !becomes(at(m, 10), 7));
	}
	CHECK(becomes(at(m, 9), 6));
	fill(at(m, 10), 7);
	waitpid(k, &status, 0);
	CHECK(!status && holds(at(m, 9), 6) && holds(at(m, 8), 5));
	/* Another process's memory. */
	all_merged(f, m, 5);
	fill(other, 8);
	struct iovec here = { buffer, PAGE }, there = { at(m, 3), PAGE }, from = { other, PAGE };

	k = fork();
	if (!k) {
		int bad = process_vm_readv(me, &here, 1, &there, 1, 0) != (ssize_t)PAGE || !holds(buffer, 5);

		_exit(bad | (process_vm_writev(me, &from, 1, &there, 1, 0) != (ssize_t)PAGE) << 1);
	}
	waitpid(k, &status, 0);
	CHECK(!status && holds(at(m, 3), 8) && holds(at(m, 4), 5));
	/* A futex, which the kernel finds by the file's page. */
	k = fork();
	if (!k)
		_exit(syscall(SYS_futex, at(m, 20), FUTEX_WAIT, *(uint32_t *)at(m, 20), &(struct timespec){ 5, 0 }, 0, 0) != 0);
	usleep(300000);
	all_merged(f, m, 5);
	for (int i = 0; i < 20 && syscall(SYS_futex, at(m, 20), FUTEX_WAKE, 1, 0, 0, 0) != 1; i++)
		usleep(100000);
	waitpid(k, &status, 0);
	CHECK(!status && holds(at(m, 20), 5));
	/* Opened by its mapping, it is the same file. */
	all_merged(f, m, 5);
	snprintf(path, sizeof(path), "/proc/self/map_files/%lx-%lx", (long)m, (long)(m + 64 * PAGE));
	int fd = open(path, O_RDWR);

	CHECK(fd >= 0 && pread(fd, buffer, PAGE, 5 * PAGE) == (ssize_t)PAGE && holds(buffer, 5));
	CHECK(pwrite(fd, "x", 1, 5 * PAGE) == 1 && at(m, 5)[0] == 'x' && holds(at(m, 6), 5));
	close(fd);
	/* Moved, protected, advised; not made longer. */
	char *place = mmap(0, 64 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(mremap(m, 64 * PAGE, 128 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
	char *moved = mremap(m, 64 * PAGE, 64 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);

	CHECK(moved == place && holds(at(moved, 63), 5));
	m = moved;
	CHECK(!mprotect(m, 64 * PAGE, PROT_READ) && holds(at(m, 8), 5) && !mprotect(m, 64 * PAGE, PROT_READ | PROT_WRITE));
	fill(at(m, 8), 9);
	CHECK(holds(at(m, 8), 9) && !madvise(m, 64 * PAGE, MADV_MERGEABLE));
	CHECK(!madvise(m, 64 * PAGE, 22 /* MADV_POPULATE_READ */) && !madvise(m, 64 * PAGE, 23 /* _WRITE */));
	CHECK(describe(f.id).merged_pages == 0 && holds(at(m, 7), 5));
	unsigned long node = 1;

	CHECK(!syscall(SYS_mbind, m, 64 * PAGE, 2 /* MPOL_BIND */, &node, 64, 0));
	close(f.fd);
}

/* Huge pages must not fill the holes of merged ones. */
static void huge(void)
{
	const char *modes[] = { "always", "force" };
	char *r = mmap(0, 2048 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *m = (char *)(((uintptr_t)r + 0x1fffff) & ~0x1ffffful);

	for (int k = 0; k < 2; k++) {
		struct file f = file_make(1024);
		uint32_t wrong = 0, i;

		CHECK(mmap(m, 1024 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, f.fd, 0) == m);
		all_merged(f, m, 5);
		if (path_write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", modes[k]))
			BAD("shmem_enabled=%s", modes[k]);
		madvise(m, 1024 * PAGE, MADV_HUGEPAGE);
		fill(at(m, 700), 6);
		fill(at(m, 10), 6);
		CHECK(pwrite(f.fd, "z", 1, 600 * PAGE) == 1);
		CHECK(madvise(m, 1024 * PAGE, 25 /* MADV_COLLAPSE */) < 0);
		char *n = file_map(f), page[PAGE];
		uint64_t bits[16];

		for (i = 0; i < 1024; i++) {
			uint64_t c = i == 700 || i == 10 ? 6 : 5;

			fill(page, c);
			if (i == 600)
				page[0] = 'z';
			wrong += !!memcmp(at(m, i), page, PAGE) + !!memcmp(at(n, i), page, PAGE);
			wrong += pread(f.fd, n == m ? 0 : page, PAGE, i * PAGE) != (ssize_t)PAGE || memcmp(page, at(m, i), PAGE);
		}
		if (wrong)
			BAD("%s: %u pages are wrong", modes[k], wrong);
		/* What is written after a harvest is named, whatever maps it. */
		harvest(f, bits);
		at(m, 3)[0]++;
		at(n, 701)[0]++;
		harvest(f, bits);
		CHECK(bits[0] >> 3 & 1 && bits[10] >> (701 - 640) & 1);
		path_write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "never");
		munmap(n, 1024 * PAGE);
		close(f.fd);
	}
}

/* ---- swap ----------------------------------------------------------------------- */

/*
 * Private pages are charged and swapped while others of the file are merged, and come back right.
 */
static void swap(void)
{
	struct file f = file_make(8192);
	char *m, pid[16];
	uint64_t *is = calloc(f.pages, 8), r = 3, *d = malloc(f.pages * 8);
	long out = path_number("/proc/vmstat", "pswpout"), away = 0;

	if (system("mkswap " SWAP_DISK " > /dev/null && swapon " SWAP_DISK)) {
		printf("    SKIPPED swap: there is no %s\n", SWAP_DISK);
		return;
	}
	mkdir("/sys/fs/cgroup/small", 0755);
	/* No memory.max: where all pages are just being written to the disk, the kernel kills. */
	CHECK(!path_write("/sys/fs/cgroup/small/memory.high", "8M"));
	snprintf(pid, 16, "%d", getpid());
	CHECK(!path_write("/sys/fs/cgroup/small/cgroup.procs", pid));
	m = file_map(f);
	for (double end = now() + 20; now() < end;) {
		for (int n = 0; n < 2000; n++) {
			r = mix(r);
			uint32_t i = r % f.pages;

			if (!holds(at(m, i), is[i]))
				BAD("page %u does not hold %lx", i, (long)is[i]);
			if (r >> 40 & 1)
				fill(at(m, i), is[i] = r >> 41 & 1 ? (r >> 42 & 3) + 1 : r | 1ull << 63);
			sh->checks++;
		}
		merge_round(f);
	}
	for (uint32_t i = 0; i < f.pages; i++)
		if (!holds(at(m, i), is[i]))
			BAD("at the end page %u does not hold %lx", i, (long)is[i]);
	digests(f, d);
	for (uint32_t i = 0; i < f.pages; i++)
		away += d[i] == PAGEONEFS_PAGE_AWAY;
	printf("    %ld pages were swapped out, %ld are away now\n", path_number("/proc/vmstat", "pswpout") - out, away);
	CHECK(path_number("/proc/vmstat", "pswpout") - out > 1000 && away > 100);
	/* Those that are away go, too. */
	for (uint32_t i = 0; i < f.pages / 2; i += 64)
		CHECK(punch(f, i, 64) == 0);
	digests(f, d);
	for (uint32_t i = 0; i < f.pages; i++)
		if (i < f.pages / 2 ? d[i] != PAGEONEFS_PAGE_NONE : !holds(at(m, i), is[i]))
			BAD("page %u when the first half was punched", i);
	say("swap");
	munmap(m, f.pages * PAGE);
	CHECK(!path_write("/sys/fs/cgroup/cgroup.procs", pid));
	close(f.fd);
	CHECK(!swapoff(SWAP_DISK));
}

const struct test memory_tests[] = {
	{ "held", held }, { "dirty_held", dirty_held }, { "dirty_disk", dirty_disk }, { "pins", pins }, { "punch_free", punch_free },
	{ "punch_pins", punch_pins }, { "processes", processes }, { "huge", huge }, { "swap", swap }, { 0 },
};
