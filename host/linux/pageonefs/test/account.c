// SPDX-License-Identifier: GPL-2.0
/*
 * Mounts that are full: what a program has it can read and write, whatever else goes on. What is
 * refused is new memory.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include "areas.h"

enum { CONTENTS = 16 };

int control;
static uint64_t frames[CONTENTS];

/* ---- reads and writes that may raise SIGBUS -------------------------------------------- */

static __thread sigjmp_buf jump;
static __thread volatile int expected;

void on_bus(int s)
{
	if (!expected)
		_exit(9);
	siglongjmp(jump, s);
}

int write_fails(char *p, char value)
{
	expected = 1;
	if (sigsetjmp(jump, 1)) {
		expected = 0;
		return 1;
	}
	*(volatile char *)p = value;
	expected = 0;
	return 0;
}

static int read_fails(char *p)
{
	expected = 1;
	if (sigsetjmp(jump, 1)) {
		expected = 0;
		return 1;
	}
	(void)*(volatile char *)p;
	expected = 0;
	return 0;
}

/* ---- mounts -------------------------------------------------------------------------- */

void mount_make(const char *path, uint32_t pages, const char *more)
{
	char options[64];

	snprintf(options, sizeof(options), "nr_blocks=%u%s", pages, more);
	mkdir(path, 0755);
	if (mount("none", path, "pageonefs", 0, options))
		BAD("mount of %u pages", pages);
	control = control_open(path);
	memset(frames, 0, sizeof(frames));
}

void mount_end(const char *path)
{
	close(control);
	CHECK(!umount(path));
}

struct area area_make(uint32_t pages)
{
	struct area a = { { openat(control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600), 0, pages }, 0 };
	struct pageonefs_file file;
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };

	if (a.f.fd < 0 || ftruncate(a.f.fd, pages * PAGE))
		BAD("a file of %u pages", pages);
	/* The newest one. */
	for (file.id = 0; !ioctl(control, PAGEONEFS_LIST, &l) && l.filled; l.after = file.id)
		a.f.id = file.id;
	a.m = file_map(a.f);
	return a;
}

void area_end(struct area *a)
{
	munmap(a->m, a->f.pages * PAGE);
	close(a->f.fd);
}

struct pageonefs_file state(struct area *a)
{
	struct pageonefs_file file = { 0 };
	struct pageonefs_list l = { .after = a->f.id - 1, .files = (uintptr_t)&file, .room = 1 };

	CHECK(!ioctl(control, PAGEONEFS_LIST, &l) && l.filled == 1 && file.id == a->f.id);
	return file;
}

long free_pages(const char *path)
{
	struct statfs sf;

	CHECK(!statfs(path, &sf));
	return (long)sf.f_bfree;
}

/* A page that cannot be written stays as it is, and the test has failed. */
void fill_area(struct area *a)
{
	for (uint32_t i = 0; i < a->f.pages; i++) {
		if (write_fails(at(a->m, i), 0))
			sh->bad++;
		else
			fill(at(a->m, i), 1 + i % CONTENTS);
	}
}

/* Whatever can be merged of pages that hold what fill_area() has put there. */
void merge_some(struct area *a)
{
	static struct pageonefs_entry e[MANY];
	struct pageonefs_merge m = { .id = a->f.id, .entries = (uintptr_t)e, .count = a->f.pages };

	for (uint32_t i = 0; i < a->f.pages; i++)
		e[i] = (struct pageonefs_entry){ .index = i, .frame = frames[i % CONTENTS] };
	if (ioctl(control, PAGEONEFS_MERGE, &m))
		BAD("merge");
	for (uint32_t i = 0; i < a->f.pages; i++)
		if (!e[i].result || e[i].result == -EEXIST)
			frames[i % CONTENTS] = e[i].frame;
		else if (e[i].result == -ENOENT)
			frames[i % CONTENTS] = 0;
}

void merge_area(struct area *a)
{
	for (int tries = 0; tries < 400 && state(a).merged_pages < a->f.pages; tries++) {
		merge_some(a);
		if (tries > 3)
			usleep(5000);
	}
	CHECK(state(a).merged_pages == a->f.pages);
}

/* ---- a mount as long as its files ------------------------------------------------------- */

enum beside { IDLE, MERGE, READ, STEAL };

static void beside(enum beside what, struct area *a, struct area *b, int thief)
{
	struct area *mine = what == READ ? a : b;

	for (uint32_t k = 0; !sh->stop; k++) {
		if (what == STEAL) {
			sh->checks += pwrite(thief, "x", 1, k % MANY * PAGE) == 1;
			sh->writes++;
			continue;
		}
		/* As a guest writes, and the daemon merges. */
		for (uint32_t i = 0; i < MANY; i += 7)
			sh->bad += write_fails(at(mine->m, i), at(mine->m, i)[1]);
		fill_area(mine);
		merge_some(mine);
		sh->writes++;
	}
	_exit(0);
}

/* All blocks are used by files whose pages are merged, written and read again and again. */
static void full(enum beside what)
{
	struct area a, b;
	long failed = 0, tried = 0;
	int thief;
	pid_t pid = 0;

	mount_make("/full", 2 * MANY, "");
	a = area_make(MANY);
	b = area_make(MANY);
	thief = openat(control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	CHECK(thief >= 0 && !ftruncate(thief, MANY * PAGE));
	signal(SIGBUS, on_bus);
	fill_area(&a);
	fill_area(&b);
	merge_area(&a);
	CHECK(free_pages("/full") == 0);
	if (what != IDLE) {
		pid = fork_child();
		if (!pid)
			beside(what, &a, &b, thief);
	}
	for (int round = 0; round < 40 || (pid && sh->writes < 40); round++) {
		for (uint32_t i = 0; i < MANY; i++, tried++) {
			char *p = at(a.m, i * 31 % MANY);

			/* The other process has the same file then. */
			failed += what == READ ? read_fails(p) : write_fails(p + 8, 7);
		}
		if (what != READ) {
			fill_area(&a);
			merge_some(&a);
		}
		CHECK(free_pages("/full") >= 0 && free_pages("/full") < MANY);
	}
	sh->stop = 1;
	if (pid)
		waitpid(pid, 0, 0);
	printf("    %ld %s, %ld SIGBUS; %ld rounds beside\n", tried, what == READ ? "reads" : "writes", failed, sh->writes);
	if (sh->checks)
		BAD("%ld pages beyond the mount's size", sh->checks);
	CHECK(!failed);
	/* Nobody else any more: merged pages, copies, and the account is what it was. */
	fill_area(&a);
	merge_area(&a);
	CHECK(free_pages("/full") == 0 && pwrite(thief, "x", 1, 0) < 0 && errno == ENOSPC);
	for (uint32_t i = failed = 0; i < MANY; i += 4)
		failed += i % 8 ? pwrite(a.f.fd, "y", 1, i * PAGE) != 1 : write_fails(at(a.m, i), 9);
	CHECK(!failed);
	CHECK(free_pages("/full") == 0);
	area_end(&a);
	CHECK(free_pages("/full") == MANY && pwrite(thief, "x", 1, 0) == 1 && free_pages("/full") == MANY - 1);
	area_end(&b);
	close(thief);
	CHECK(free_pages("/full") == 2 * MANY);
	mount_end("/full");
}

static void full_idle(void)
{
	full(IDLE);
}

static void full_merge(void)
{
	full(MERGE);
}

static void full_read(void)
{
	full(READ);
}

static void full_steal(void)
{
	full(STEAL);
}

/* ---- new pages at the limit ---------------------------------------------------------------- */

static struct area holes;
static pthread_barrier_t both;
static long refused;

static void *toucher(void *unused)
{
	for (;;) {
		pthread_barrier_wait(&both);
		if (sh->stop)
			return unused;
		for (uint32_t i = 0; i < holes.f.pages; i++)
			if (write_fails(at(holes.m, i), 1))
				__atomic_add_fetch(&refused, 1, 5);
		pthread_barrier_wait(&both);
	}
}

/* A file's holes are filled, by two threads at once, while the mount has just the room for them. */
static void full_holes(void)
{
	struct area a;
	pthread_t other;
	pid_t pid;

	mount_make("/holes", MANY + 64, "");
	a = area_make(MANY);
	holes = area_make(64);
	signal(SIGBUS, on_bus);
	fill_area(&a);
	merge_area(&a);
	pid = fork_child();
	if (!pid)
		beside(MERGE, &a, &a, -1);
	pthread_barrier_init(&both, 0, 2);
	pthread_create(&other, 0, toucher, 0);
	for (int round = 0; round < 150 || sh->writes < 20; round++) {
		pthread_barrier_wait(&both);
		for (uint32_t i = 0; i < holes.f.pages; i++)
			if (write_fails(at(holes.m, i), 2))
				__atomic_add_fetch(&refused, 1, 5);
		pthread_barrier_wait(&both);
		CHECK(!fallocate(holes.f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 64 * PAGE));
		/* By calls, too. */
		for (uint32_t i = 0; i < holes.f.pages; i++)
			if (pwrite(holes.f.fd, "x", 1, i * PAGE) != 1)
				refused++;
		CHECK(!fallocate(holes.f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 64 * PAGE));
		if (fallocate(holes.f.fd, 0, 0, 64 * PAGE))
			refused++;
		CHECK(!fallocate(holes.f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 64 * PAGE));
	}
	sh->stop = 1;
	pthread_barrier_wait(&both);
	pthread_join(other, 0);
	waitpid(pid, 0, 0);
	printf("    %ld pages were refused, %ld rounds of merging\n", refused, sh->writes);
	CHECK(!refused && free_pages("/holes") == 64);
	area_end(&a);
	area_end(&holes);
	CHECK(free_pages("/holes") == MANY + 64);
	mount_end("/holes");
}

/* What is refused at the limit: it changes nothing. */
static void full_refused(void)
{
	struct area a, b;
	struct statfs sf;
	struct stat st;
	char target[200];

	mount_make("/refused", 40, "");
	a = area_make(32);
	b = area_make(16);
	fill_area(&a);
	merge_area(&a);
	signal(SIGBUS, on_bus);
	CHECK(free_pages("/refused") == 8);
	/* Half of it is there. */
	for (int i = 0; i < 8; i++)
		fill(at(b.m, i), 30 + i);
	CHECK(write_fails(at(b.m, 9), 1) && read_fails(at(b.m, 10)) && pwrite(b.f.fd, "x", 1, 11 * PAGE) < 0 && errno == ENOSPC);
	CHECK(fallocate(b.f.fd, 0, 4 * PAGE, 20 * PAGE) && errno == ENOSPC);
	CHECK(fallocate(b.f.fd, FALLOC_FL_ZERO_RANGE, 4 * PAGE, 8 * PAGE) && errno == ENOSPC);
	CHECK(fallocate(b.f.fd, FALLOC_FL_KEEP_SIZE, 0, 1ul << 40) && errno == ENOSPC);
	CHECK(!fstat(b.f.fd, &st) && st.st_size == 16 * (off_t)PAGE && st.st_blocks == 8 * 8);
	for (int i = 0; i < 8; i++)
		CHECK(holds(at(b.m, i), 30 + i));
	/* What needs no page is not. */
	CHECK(!fallocate(b.f.fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 4 * PAGE, PAGE) && holds(at(b.m, 4), 0));
	CHECK(!fallocate(a.f.fd, FALLOC_FL_ZERO_RANGE, 100, 2 * PAGE) && holds(at(a.m, 1), 0) && state(&a).merged_pages == 29);
	CHECK(!symlinkat("short", control, "s") && !unlinkat(control, "s", 0));
	memset(target, 'x', sizeof(target));
	target[199] = 0;
	CHECK(symlinkat(target, control, "s") && errno == ENOSPC && faccessat(control, "s", F_OK, AT_SYMLINK_NOFOLLOW) && errno == ENOENT);
	/* Remounted: smaller than what is used, merged pages with it. */
	CHECK(mount("none", "/refused", 0, MS_REMOUNT, "nr_blocks=39") && errno == EINVAL);
	CHECK(!statfs("/refused", &sf) && sf.f_blocks == 40 && sf.f_bfree == 0);
	CHECK(!mount("none", "/refused", 0, MS_REMOUNT, "nr_blocks=40") && write_fails(at(b.m, 9), 1));
	CHECK(!mount("none", "/refused", 0, MS_REMOUNT, "nr_blocks=42") && free_pages("/refused") == 2);
	CHECK(!symlinkat(target, control, "s") && free_pages("/refused") == 1 && !unlinkat(control, "s", 0));
	CHECK(!write_fails(at(b.m, 9), 1) && free_pages("/refused") == 1);
	CHECK(!mount("none", "/refused", 0, MS_REMOUNT, "nr_blocks=0") && !statfs("/refused", &sf) && sf.f_blocks == 0);
	for (int i = 10; i < 16; i++)
		CHECK(!write_fails(at(b.m, i), 1));
	CHECK(mount("none", "/refused", 0, MS_REMOUNT, "nr_blocks=100") && errno == EINVAL);
	area_end(&a);
	area_end(&b);
	mount_end("/refused");
}

/* A plain file's own mapping keeps the limit, too. */
static void full_plain(void)
{
	struct pageonefs_plain plain;
	struct utsname kernel;
	struct area a;

	uname(&kernel);
	if (!strncmp(kernel.release, "6.1.", 4)) {
		printf("    SKIPPED: plain files' mappings are tmpfs's own\n");
		return;
	}
	mount_make("/plain", 8, "");
	a = area_make(16);
	signal(SIGBUS, on_bus);
	for (int i = 0; i < 8; i++)
		fill(at(a.m, i), 30 + i);
	plain.id = a.f.id;
	CHECK(!ioctl(control, PAGEONEFS_MAKE_PLAIN, &plain));
	munmap(a.m, 16 * PAGE);
	a.m = file_map(a.f);
	CHECK(holds(at(a.m, 5), 35) && !write_fails(at(a.m, 5), 1) && write_fails(at(a.m, 9), 1) && read_fails(at(a.m, 10)));
	CHECK(free_pages("/plain") == 0);
	area_end(&a);
	mount_end("/plain");
}

const struct test account_tests[] = {
	{ "full_idle", full_idle }, { "full_merge", full_merge }, { "full_read", full_read }, { "full_steal", full_steal },
	{ "full_holes", full_holes }, { "full_refused", full_refused }, { "full_plain", full_plain }, { 0 },
};
