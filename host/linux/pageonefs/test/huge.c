// SPDX-License-Identifier: GPL-2.0
/*
 * Huge pages until the first merge in their 2 MiB: mounts with huge=advise.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

#define HUGE 512u	/* pages */

static void switch_huge(const char *option)
{
	CHECK(!mount("none", MOUNT, 0, MS_REMOUNT, option));
}

static char *huge_map(struct file f)
{
	char *m = file_map(f);

	CHECK((uintptr_t)m % (HUGE * PAGE) == 0 && !madvise(m, f.pages * PAGE, MADV_HUGEPAGE));
	return m;
}

/* How many huge pages of files this process has mapped whole. */
static long mapped(void)
{
	return path_number("/proc/self/smaps_rollup", "ShmemPmdMapped") / 2048;
}

/* Whether tmpfs has huge pages: not on a kernel with CONFIG_BASE_SMALL. */
static int possible(void)
{
	struct file f = { .pages = 2 * HUGE };
	char *m;
	long huge;

	mkdir("/huge", 0755);
	CHECK(!mount("none", "/huge", "tmpfs", 0, "huge=always"));
	f.fd = open("/huge", O_RDWR | O_TMPFILE, 0600);
	CHECK(!ftruncate(f.fd, f.pages * PAGE));
	m = file_map(f);
	fill(at(m, HUGE), 1);
	fill(at(m, 0), 1);
	huge = mapped();
	munmap(m, f.pages * PAGE);
	close(f.fd);
	CHECK(!umount("/huge"));
	if (!huge)
		printf("    SKIPPED huge pages: tmpfs of this kernel has none\n");
	return huge > 0;
}

/* Whether these pages, of `pages`, are dirty, and no others. Takes the bits. */
static int dirty_are(struct file f, uint32_t from, uint32_t to)
{
	uint64_t bits[64];
	uint32_t right = 0;

	harvest(f, bits);
	for (uint32_t i = 0; i < f.pages; i++)
		right += (bits[i / 64] >> (i % 64) & 1) == (i >= from && i < to);
	return right == f.pages;
}

static int all_hold(const char *m, uint32_t from, uint32_t to, const uint64_t *is)
{
	uint32_t right = 0;

	for (uint32_t i = from; i < to; i++)
		right += holds(m + i * PAGE, is[i]);
	return right == to - from;
}

/* Mapped whole, with all dirty bits at once; the first merge makes it small, and small it stays. */
static void huge_mapped(void)
{
	struct file f;
	uint64_t is[3 * HUGE] = { 0 }, frame = 0, bits[64];
	char *m, page[PAGE];

	if (!possible())
		return;
	switch_huge("huge=advise");
	f = file_make(2 * HUGE + 100);
	m = huge_map(f);
	CHECK(at(m, HUGE)[5] == 0 && mapped() == 1 && dirty_are(f, 0, 0));
	fill(at(m, 7), is[7] = 1);
	CHECK(mapped() == 2 && dirty_are(f, 0, HUGE));
	/* The next write after a harvest is seen, wherever it is. */
	CHECK(mapped() == 1 && holds(at(m, 7), 1) && mapped() == 2 && dirty_are(f, 0, 0));
	fill(at(m, 500), is[500] = 1);
	fill(at(m, 20), is[20] = 3);
	CHECK(mapped() == 2 && dirty_are(f, 0, HUGE));
	/* The file's end lies in the third. */
	fill(at(m, 2 * HUGE + 50), is[2 * HUGE + 50] = 2);
	CHECK(mapped() <= 2 && dirty_are(f, 2 * HUGE + 50, 2 * HUGE + 51));
	CHECK(pread(f.fd, page, PAGE, 500 * PAGE) == (ssize_t)PAGE && holds(page, 1));
	CHECK(pwrite(f.fd, page, PAGE, 21 * PAGE) == (ssize_t)PAGE && holds(at(m, 21), is[21] = 1));
	harvest(f, bits);
	/* The first merge, of two pages that are equal. */
	CHECK(merge_page(f, 7, &frame) == 0 && merge_page(f, 500, &frame) == 0 && describe(f.id).merged_pages == 2);
	CHECK(all_hold(m, 0, f.pages, is) && mapped() == 1 && dirty_are(f, 0, 0));
	fill(at(m, 300), is[300] = 4);
	CHECK(dirty_are(f, 300, 301) && all_hold(m, 0, f.pages, is));
	/* All is punched but what is merged: no huge page comes over that. */
	CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 7 * PAGE));
	CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 8 * PAGE, (HUGE - 8) * PAGE));
	memset(is, 0, 7 * sizeof(*is));
	memset(is + 8, 0, (HUGE - 8) * sizeof(*is));
	char *n = huge_map(f);

	fill(at(n, 100), is[100] = 5);
	CHECK(describe(f.id).merged_pages == 1 && all_hold(m, 0, f.pages, is) && all_hold(n, 0, f.pages, is));
	CHECK(describe(f.id).merged_pages == 1);
	/* All is punched: a huge page comes again. A page table that is there maps it in small ones. */
	CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, HUGE * PAGE));
	memset(is, 0, HUGE * sizeof(*is));
	harvest(f, bits);
	fill(at(m, 9), is[9] = 6);
	CHECK(dirty_are(f, 9, 10));
	munmap(n, f.pages * PAGE);
	n = huge_map(f);
	fill(at(n, 10), is[10] = 7);
	CHECK(dirty_are(f, 0, HUGE) && all_hold(m, 0, f.pages, is) && all_hold(n, 0, f.pages, is));
	/* None is made any more. The one that is there is mapped as before. */
	switch_huge("huge=never");
	munmap(n, f.pages * PAGE);
	n = huge_map(f);
	fill(at(n, 11), is[11] = 8);
	CHECK(dirty_are(f, 0, HUGE) && all_hold(n, 0, f.pages, is) && all_hold(m, 0, f.pages, is));
	close(f.fd);
	/* A plain file's are tmpfs's own. The kernel complains of mappings that are not counted. */
	f = file_make(HUGE);
	struct pageonefs_plain plain = { f.id };

	CHECK(!ioctl(control_open(MOUNT), PAGEONEFS_MAKE_PLAIN, &plain));
	path_write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "force");
	m = file_map(f);
	fill(at(m, 5), 1);
	CHECK(holds(at(m, 5), 1));
	munmap(m, HUGE * PAGE);
	path_write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "never");
	close(f.fd);
}

/* How a process ends that writes a byte, and then reads another. */
static int ends(volatile char *first, const volatile char *byte)
{
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		signal(SIGBUS, SIG_DFL);
		*first = 1;
		_exit(*byte);
	}
	waitpid(pid, &status, 0);
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* Truncated, punched and held. */
static void huge_cut(void)
{
	struct file f;
	uint64_t is[2 * HUGE] = { 0 }, d[2 * HUGE], frame = 0, bits[64];
	struct iovec v;
	char *m, page[PAGE];
	int pipes[2];

	if (!possible())
		return;
	switch_huge("huge=advise");
	f = file_make(2 * HUGE);
	m = huge_map(f);
	for (uint32_t i = 0; i < f.pages; i++)
		fill(at(m, i), is[i] = i + 1);
	CHECK(mapped() == 2 && dirty_are(f, 0, f.pages));
	/* A part of each: what is left is as it was, and what is gone reads as zeros. */
	CHECK(punch(f, HUGE + 64, 64) == 0);
	memset(is + HUGE + 64, 0, 64 * sizeof(*is));
	digests(f, d);
	CHECK(!d[HUGE + 64] && !d[HUGE + 127] && d[HUGE + 63] && d[HUGE + 128]);
	CHECK(dirty_are(f, HUGE + 64, HUGE + 128) && all_hold(m, 0, f.pages, is));
	CHECK(!ftruncate(f.fd, 100 * PAGE + 8));
	CHECK(ends(at(m, 1), at(m, 200)) == -SIGBUS && ends(at(m, 1), at(m, HUGE)) == -SIGBUS);
	fill(at(m, 1), is[1] = 2);
	/* The end lies in a hole: no huge page that reaches beyond it. */
	CHECK(!ftruncate(f.fd, (HUGE + 100) * PAGE) && ends(at(m, HUGE + 5), at(m, HUGE + 200)) == -SIGBUS);
	CHECK(!ftruncate(f.fd, 100 * PAGE + 8));
	fill_words(page, is[100], 0, 512);
	memset(page + 8, 0, PAGE - 8);
	CHECK(!memcmp(at(m, 100), page, PAGE) && all_hold(m, 0, 100, is));
	CHECK(!ftruncate(f.fd, f.pages * PAGE));
	memset(is + 101, 0, (f.pages - 101) * sizeof(*is));
	CHECK(all_hold(m, 101, f.pages, is) && !memcmp(at(m, 100), page, PAGE));
	/* A page that a pipe holds keeps all from being merged, and its bit. */
	CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, f.pages * PAGE));
	memset(is, 0, sizeof(is));
	munmap(m, f.pages * PAGE);
	m = huge_map(f);
	fill(at(m, 5), is[5] = 1);
	fill(at(m, 6), is[6] = 1);
	CHECK(mapped() == 1);
	CHECK(!pipe2(pipes, O_NONBLOCK));
	v = (struct iovec){ at(m, 5), PAGE };
	CHECK(vmsplice(pipes[1], &v, 1, 0) == (ssize_t)PAGE);
	harvest(f, bits);
	harvest(f, bits);
	CHECK(bits[0] >> 5 & 1);
	CHECK(merge_page(f, 6, &frame) == -EBUSY && all_hold(m, 0, f.pages, is) && describe(f.id).merged_pages == 0);
	CHECK(read(pipes[0], page, PAGE) == (ssize_t)PAGE && holds(page, 1));
	frame = 0;
	CHECK(merge_page(f, 6, &frame) == 0 && merge_page(f, 5, &frame) == 0 && all_hold(m, 0, f.pages, is));
	switch_huge("huge=never");
	close(f.fd);
}

/* A huge page is swapped out with all its pages, and comes back page by page. */
static void huge_swap(void)
{
	struct file f;
	uint64_t is[4 * HUGE], d[4 * HUGE], away = 0, none = 0;
	char *m, pid[16];

	if (!possible())
		return;
	if (system("mkswap /dev/swap > /dev/null && swapon /dev/swap")) {
		printf("    SKIPPED swap: there is no /dev/swap\n");
		return;
	}
	mkdir("/sys/fs/cgroup/huge", 0755);
	snprintf(pid, 16, "%d", getpid());
	CHECK(!path_write("/sys/fs/cgroup/huge/cgroup.procs", pid));
	switch_huge("huge=advise");
	f = file_make(4 * HUGE);
	m = huge_map(f);
	for (uint32_t i = 0; i < f.pages; i++)
		fill(at(m, i), is[i] = i + 1);
	CHECK(mapped() == 4);
	path_write("/sys/fs/cgroup/huge/memory.reclaim", "7M");
	digests(f, d);
	for (uint32_t i = 0; i < f.pages; i++) {
		away += d[i] == PAGEONEFS_PAGE_AWAY;
		none += d[i] == PAGEONEFS_PAGE_NONE;
	}
	printf("    %lu of %u pages are away\n", (long)away, f.pages);
	CHECK(!none && away >= HUGE && all_hold(m, 0, f.pages, is));
	switch_huge("huge=never");
	munmap(m, f.pages * PAGE);
	close(f.fd);
	CHECK(!path_write("/sys/fs/cgroup/cgroup.procs", pid) && !swapoff("/dev/swap"));
}

/* A huge page is split while a merge goes from page to page: it gets the pages that it asks for. */
static void huge_walk(void)
{
	/* Not the first ones of a huge page: their neighbours are found in any case. */
	enum { FIRST = 192, COUNT = 64 };
	struct file f;
	uint64_t is[HUGE];
	uint32_t split = 0;
	int pipes[2];

	if (!possible())
		return;
	switch_huge("huge=advise");
	f = file_make(HUGE);
	CHECK(!pipe(pipes));
	for (uint32_t round = 0; round < 20; round++) {
		struct pageonefs_entry e[COUNT] = { 0 };
		struct pageonefs_merge merge = { .id = f.id, .entries = (uintptr_t)e, .count = COUNT };
		char *m = huge_map(f), page[PAGE];
		struct iovec v = { m, PAGE };
		uint32_t busy = 0;
		int status;
		pid_t pid;

		for (uint32_t i = 0; i < HUGE; i++)
			fill(at(m, i), is[i] = round * HUGE + i + 1);
		/* While a pipe holds a page of it, it is not split. */
		CHECK(mapped() == 1 && vmsplice(pipes[1], &v, 1, 0) == (ssize_t)PAGE);
		pid = fork_child();
		if (!pid) {
			uint64_t frame = 0;

			usleep(1000 * round);
			CHECK(read(pipes[0], page, PAGE) == (ssize_t)PAGE);
			/* Splits it. */
			merge_page(f, 7, &frame);
			_exit(0);
		}
		for (uint32_t i = 0; i < COUNT; i++)
			e[i].index = FIRST + i;
		CHECK(!ioctl(control_open(MOUNT), PAGEONEFS_MERGE, &merge));
		for (uint32_t i = 0; i < COUNT; i++)
			busy += e[i].result == -EBUSY;
		split += busy && busy < COUNT;
		CHECK(waitpid(pid, &status, 0) == pid && !status && all_hold(m, 0, HUGE, is));
		munmap(m, HUGE * PAGE);
		CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, HUGE * PAGE));
	}
	printf("    %u of 20 were split in the midst of a merge\n", split);
	/* Merges that are not slowed down are done before that. */
	CHECK(split || access(PARAMETERS "slow", F_OK));
	switch_huge("huge=never");
	close(pipes[0]);
	close(pipes[1]);
	close(f.fd);
}

/* ---- at once ------------------------------------------------------------------------------ */

/* Has 2 MiB of the file to itself, and knows what it wrote there. */
static pid_t owner(struct file f, uint32_t k)
{
	pid_t pid = fork_child();
	uint64_t is[HUGE] = { 0 }, r = k;
	long whole = 0;
	char *m = 0;

	if (pid)
		return pid;
	while (!sh->stop) {
		r = mix(r);
		uint32_t i = r % HUGE, n = (r >> 20) % 32;

		if (!m || !(r >> 30 & 63)) {
			if (m)
				munmap(m, HUGE * PAGE);
			/* Now and then all goes, and a huge page comes. */
			if (r >> 40 & 3) {
				CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, k * HUGE * PAGE, HUGE * PAGE));
				memset(is, 0, sizeof(is));
			}
			m = mmap(0, HUGE * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, f.fd, k * HUGE * PAGE);
			madvise(m, HUGE * PAGE, MADV_HUGEPAGE);
			fill(m, is[0] = r >> 8);
			whole += mapped();
		}
		for (; n && i < HUGE; n--, i++) {
			if (!holds(at(m, i), is[i]))
				BAD("owner %u: page %u does not hold %lx", k, i, (long)is[i]);
			if (r >> 50 & 1)
				fill(at(m, i), is[i] = r >> 51 & 1 ? i % 3 : (uint64_t)k << 40 | i << 20 | (r >> 52));
		}
		if (!(r >> 44 & 7)) {
			char page[PAGE];

			i = (r >> 10) % HUGE;
			fill(page, is[i] = r >> 60);
			CHECK(pwrite(f.fd, page, PAGE, (k * HUGE + i) * PAGE) == (ssize_t)PAGE);
		}
		__atomic_add_fetch(&sh->checks, 32, 5);
	}
	if (!all_hold(m, 0, HUGE, is))
		BAD("owner %u: at the end", k);
	__atomic_add_fetch(&sh->writes, whole, 5);
	_exit(0);
}

/* Programs write huge pages and punch them, while they are harvested, merged, and moved. */
static void huge_hammer(void)
{
	struct file f;
	pid_t pids[5];

	if (!possible())
		return;
	switch_huge("huge=advise");
	f = file_make(3 * HUGE);
	for (int i = 0; i < 3; i++)
		pids[i] = owner(f, i);
	pids[3] = harvester(f);
	pids[4] = fork_child();
	while (!pids[4] && !sh->stop) {
		merge_round(f);
		path_write("/proc/sys/vm/compact_memory", "1");
		usleep(20000);
	}
	if (!pids[4])
		_exit(0);
	sleep(20);
	sh->stop = 1;
	for (int i = 0; i < 5; i++) {
		int status;

		if (waitpid(pids[i], &status, 0) < 0 || status)
			BAD("child %d ended with %x", i, status);
	}
	say("huge_hammer");
	printf("    %ld huge pages were mapped whole, %ld split\n", sh->writes, path_number("/proc/vmstat", "thp_split_page"));
	CHECK(sh->writes > 10 && stats().merges > 100);
	switch_huge("huge=never");
	close(f.fd);
}

const struct test huge_tests[] = {
	{ "huge_mapped", huge_mapped }, { "huge_cut", huge_cut }, { "huge_swap", huge_swap },
	{ "huge_walk", huge_walk }, { "huge_hammer", huge_hammer }, { 0 },
};
