// SPDX-License-Identifier: GPL-2.0
/*
 * Frames whose payers have left them, and who keeps them has no room: what is room, and what such a
 * debt keeps it from.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tenants.h"

/* The disk's pages are in the cache while somebody has it open. */
static int disk;

static void read_disk(struct lender *of)
{
	static char some[1 << 16];

	(void)of;
	CHECK(lseek(disk, 0, SEEK_SET) == 0);
	while (read(disk, some, sizeof(some)) > 0)
		;
}

/* Files' caches fill a limit, and are room for frames all the same. */
static void cache_within(const char *limit, long frames, long most)
{
	long had, is;

	generation++;
	share();
	CHECK(!path_write("/proc/sys/vm/drop_caches", "1"));
	CHECK(!path_write(limit, "24M"));
	within(TENANTS "b/", read_disk, 0);
	had = number(TENANTS "b/memory.current");
	CHECK(had > 21 << 20);
	give_up();
	/* What is free is less than what it comes to pay for. */
	for (double until = now() + 60; path_number(TENANTS "b/memory.stat", "shmem") < frames && now() < until; usleep(10000))
		harvest_times(1);
	for (double until = now() + 30; (is = number(TENANTS "b/memory.current")) > most && now() < until;)
		usleep(10000);
	printf("    of %ld KiB with cache, it pays %ld for frames, %ld in all\n", had >> 10,
	       path_number(TENANTS "b/memory.stat", "shmem") >> 10, is >> 10);
	CHECK(path_number(TENANTS "b/memory.stat", "shmem") >= frames && is <= most);
	CHECK(!path_number(TENANTS "b/memory.events", "oom_kill") && !path_write(limit, "max"));
}

void memcg_cache(void)
{
	disk = open("/dev/scratch", O_RDONLY);
	CHECK(disk >= 0);
	two_make();
	cache_within(TENANTS "b/memory.max", 12 << 20, 24 << 20);
	cache_within(TENANTS "b/memory.high", 6 << 20, 25 << 20);
	close(disk);
	two_end();
}

/* Half of what b has room for without its cache. */
static void leave_some(struct lender *of)
{
	for (uint32_t i = 0; i < LEFT / 4; i++)
		fill(at(of->m, i), 5ull << 40 | i);
}

/* Frames are left that b keeps, and its cache is in their way. */
static void fill_cache(const char *limit)
{
	disk = open("/dev/scratch", O_RDONLY);
	CHECK(disk >= 0);
	two_make();
	share();
	CHECK(!path_write("/proc/sys/vm/drop_caches", "1") && !path_write(limit, "24M"));
	within(TENANTS "b/", read_disk, 0);
	CHECK(number(TENANTS "b/memory.current") > 21 << 20);
	within(TENANTS "a/", leave_some, &giver);
}

/* Who is above high gets frames by and by, and owes nothing meanwhile. */
void memcg_high(void)
{
	fill_cache(TENANTS "b/memory.high");
	harvest_times(2);
	within(DAEMON, join_last, &keeper);
	close(disk);
	two_end();
}

/* What both are in is above high, and would be without a move, too. */
void memcg_common(void)
{
	long is;

	fill_cache(TENANTS "b/memory.max");
	/* Most of the cache stays, as what both are in is concerned. */
	CHECK(!path_write(TENANTS "b/memory.min", "22528K") && !path_write(TENANTS "memory.high", "16M"));
	CHECK(number(TENANTS "b/memory.current") > 21 << 20 && number(TENANTS "memory.current") > 40 << 20);
	for (double until = now() + 60; (is = path_number(TENANTS "b/memory.stat", "shmem")) < 6 << 20 && now() < until;)
		harvest_times(1);
	printf("    it pays %ld KiB for frames\n", is >> 10);
	CHECK(is >= 6 << 20 && !path_number(TENANTS "b/memory.events", "oom_kill"));
	CHECK(!path_write(TENANTS "memory.high", "max"));
	close(disk);
	two_end();
}

/* ---- debts ---------------------------------------------------------------------------------- */

/* A process of the keeper's group that has most of its limit of 16 MiB. */
static pid_t crowd(void)
{
	size_t len = 29 << 19;
	pid_t child;

	CHECK(!path_write(TENANTS "b/memory.max", "16M"));
	child = fork_in(TENANTS "b/");
	if (!child) {
		memset(mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, len);
		for (;;)
			pause();
	}
	for (double until = now() + 30; number(TENANTS "b/memory.current") < (long)len && now() < until;)
		usleep(10000);
	return child;
}

/* The same, by pages of a file's cache that pipes hold: nobody can take them. */
static pid_t crowd_pipes(void)
{
	size_t len = 28 << 19, held = 0;
	pid_t child;

	CHECK(!path_write(TENANTS "b/memory.max", "16M"));
	child = fork_in(TENANTS "b/");
	if (!child) {
		for (int ends[2]; held < len && !pipe(ends);) {
			ssize_t n = fcntl(ends[1], F_SETPIPE_SZ, 1 << 20);

			while ((n = splice(disk, 0, ends[1], 0, 1 << 20, SPLICE_F_NONBLOCK)) > 0)
				held += n;
		}
		for (;;)
			pause();
	}
	for (double until = now() + 30; number(TENANTS "b/memory.current") < (long)len && now() < until;)
		usleep(10000);
	return child;
}

enum { DEBT_PAID, DEBT_LEFT, DEBT_UNPAID, DEBT_AGAIN, DEBT_PAGES };

static void debt_fill(struct lender *of)
{
	for (uint32_t i = 0; i < DEBT_PAGES; i++)
		fill(at(of->m, i), i == DEBT_AGAIN ? DEBT_UNPAID + 1 : i + 1);
}

static void debt_leave(struct lender *of)
{
	fill(at(of->m, DEBT_LEFT), 100);
	fill(at(of->m, DEBT_UNPAID), 101);
}

static void debt_join(struct lender *of)
{
	uint64_t frames[DEBT_PAGES] = {};

	for (uint32_t i = 0; i < DEBT_AGAIN; i++) {
		CHECK(!merge_patiently(giver.control, giver.f, i, &frames[i]));
		if (i != DEBT_PAID)
			CHECK(!merge_patiently(of->control, of->f, i, &frames[i]));
	}
	within(TENANTS "a/", debt_leave, &giver);
	harvest_times(3);
	/* Somebody pays for the first, nobody for the other, which would be a debt at once. */
	CHECK(!merge_patiently(of->control, of->f, DEBT_PAID, &frames[DEBT_PAID]));
	CHECK(merge_patiently(of->control, of->f, DEBT_AGAIN, &frames[DEBT_UNPAID]) == -EBUSY);
}

/* Who has no room, and owes little, joins frames of others: those that somebody pays for. */
void memcg_debt(void)
{
	pid_t child;

	two_make();
	within(TENANTS "a/", debt_fill, &giver);
	within(TENANTS "b/", debt_fill, &keeper);
	child = crowd();
	within(DAEMON, debt_join, &keeper);
	CHECK(waitpid(child, 0, WNOHANG) == 0 && !path_number(TENANTS "b/memory.events", "oom_kill"));
	end(child);
	two_end();
}

enum { STUCK = 1024 };

static void stuck_fill(struct lender *of)
{
	for (uint32_t i = 0; i <= STUCK; i++)
		fill(at(of->m, i), generation << 32 | (i + 1));
}

/* All but the last page. */
static void stuck_join(struct lender *of)
{
	for (uint32_t i = 0; i < STUCK; i++) {
		uint64_t frame = 0;

		CHECK(!merge_patiently(giver.control, giver.f, i, &frame) && !merge_patiently(of->control, of->f, i, &frame));
	}
}

static void stuck_leave(struct lender *of)
{
	for (uint32_t i = 0; i < STUCK; i++)
		fill(at(of->m, i), 5ull << 40 | i);
}

static void stuck_refused(struct lender *of)
{
	uint64_t frame = 0;

	CHECK(!merge_patiently(giver.control, giver.f, STUCK, &frame));
	CHECK(merge_patiently(of->control, of->f, STUCK, &frame) == -EBUSY);
}

static void touch(struct lender *of)
{
	(void)of;
	memset(mmap(0, 1 << 19, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, 1 << 19);
}

/*
 * What cannot be taken of a cache is no room: who has too little without it owes. It is tried now
 * and then only, and what its own tasks need next is left.
 */
void memcg_stuck(void)
{
	long tries;
	pid_t child;

	disk = open("/dev/scratch", O_RDONLY);
	CHECK(disk >= 0 && !path_write("/proc/sys/vm/drop_caches", "1"));
	two_make();
	within(TENANTS "a/", stuck_fill, &giver);
	within(TENANTS "b/", stuck_fill, &keeper);
	within(DAEMON, stuck_join, &keeper);
	child = crowd_pipes();
	within(TENANTS "a/", stuck_leave, &giver);
	harvest_times(100);
	tries = path_number(TENANTS "b/memory.events", "max");
	printf("    of 16 MiB %ld KiB are charged, %ld of them frames; at its limit %ld times\n",
	       number(TENANTS "b/memory.current") >> 10, path_number(TENANTS "b/memory.stat", "shmem") >> 10, tries);
	CHECK(tries < 100);
	within(DAEMON, stuck_refused, &keeper);
	within(TENANTS "b/", touch, 0);
	CHECK(waitpid(child, 0, WNOHANG) == 0 && !path_number(TENANTS "b/memory.events", "oom_kill"));
	end(child);
	close(disk);
	two_end();
}

static void settled_join(struct lender *of)
{
	for (uint32_t i = 0; i < STUCK; i++) {
		uint64_t frame = 0;

		CHECK(!merge_patiently(giver.control, giver.f, i, &frame));
		CHECK(!merge_patiently(keeper.control, keeper.f, i, &frame) && !merge_patiently(of->control, of->f, i, &frame));
	}
}

static void settled_free(struct lender *of)
{
	uint64_t frame = 0;

	CHECK(!merge_patiently(giver.control, giver.f, STUCK, &frame));
	CHECK(!merge_patiently(of->control, of->f, STUCK, &frame));
}

/* Who has left a frame that others keep owes nothing for it. */
void memcg_settled(void)
{
	struct lender third;
	pid_t child;

	two_make();
	third = lender_make();
	make_group(TENANTS "c/", "max");
	within(TENANTS "a/", stuck_fill, &giver);
	within(TENANTS "b/", stuck_fill, &keeper);
	within(TENANTS "c/", stuck_fill, &third);
	within(DAEMON, settled_join, &third);
	CHECK(!path_write(TENANTS "c/memory.max", "1M"));
	child = crowd();
	within(TENANTS "a/", stuck_leave, &giver);
	/* Of each frame one of the two owes. */
	harvest_times(100);
	CHECK(!fallocate(keeper.f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, STUCK * PAGE));
	within(DAEMON, settled_free, &keeper);
	end(child);
	area_close(&third, 0);
	CHECK(!rmdir(TENANTS "c"));
	two_end();
}

/* ---- who has no room takes a generation after the other ------------------------------------- */

enum { TURNS = 60, OF_A_TURN = 256 };

static void turn_fill(struct lender *of)
{
	for (uint32_t i = 0; i < OF_A_TURN; i++)
		fill(at(of->m, i), generation << 32 | (i + 1));
}

/* The number of pages that merge, in some tries. */
static int turn_join(struct lender *of, struct pageonefs_entry *e)
{
	struct pageonefs_merge m = { .id = of->f.id, .entries = (uintptr_t)e, .count = OF_A_TURN };
	int merged = 0;

	for (int tries = 0; tries < 4 && merged < OF_A_TURN; tries++) {
		CHECK(!ioctl(of->control, PAGEONEFS_MERGE, &m));
		merged = 0;
		for (int i = 0; i < OF_A_TURN; i++)
			merged += !e[i].result || e[i].result == -EEXIST;
	}
	return merged;
}

static void turn(struct lender *of)
{
	struct pageonefs_entry e[OF_A_TURN] = {};

	for (uint32_t i = 0; i < OF_A_TURN; i++)
		e[i].index = i;
	turn_join(&giver, e);
	sh->checks = turn_join(of, e);
}

static void turn_close(struct lender *of)
{
	munmap(of->m, of->f.pages * PAGE);
	close(of->f.fd);
}

/* It has a new file for each, and keeps those of which something merged. The giver pays for few. */
void memcg_turns(void)
{
	struct lender files[TURNS];
	int kept = 0, n = 0;
	long before, after;
	pid_t child;

	two_make();
	child = crowd();
	within(TENANTS "a/", turn_fill, &giver);
	before = number(TENANTS "a/memory.current");
	for (; n < TURNS; n++) {
		files[kept] = (struct lender){ giver.control, file_make(OF_A_TURN), 0 };
		files[kept].m = file_map(files[kept].f);
		within(TENANTS "b/", turn_fill, &files[kept]);
		within(DAEMON, turn, &files[kept]);
		if (sh->checks)
			kept++;
		else
			turn_close(&files[kept]);
		generation++;
		within(TENANTS "a/", turn_fill, &giver);
		harvest_times(5);
	}
	after = number(TENANTS "a/memory.current");
	printf("    %d turns, in %d it joined something: the giver pays for %ld KiB, then %ld\n", n, kept, before >> 10, after >> 10);
	CHECK(kept && after - before < 3 << 20);
	CHECK(waitpid(child, 0, WNOHANG) == 0 && !path_number(TENANTS "b/memory.events", "oom_kill"));
	while (kept--)
		turn_close(&files[kept]);
	end(child);
	two_end();
}
