// SPDX-License-Identifier: GPL-2.0
/*
 * Frames whose payers have left them: memory cgroups of who gave them, and of who keeps them.
 */
#define _GNU_SOURCE
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tenants.h"

struct lender giver, keeper;
uint64_t generation;
static pid_t client;

/* The last page holds the same in both, always. */
static void generation_fill(struct lender *of)
{
	for (uint32_t i = 0; i < LEFT - 1; i++)
		fill(at(of->m, i), generation << 32 | (i + 1));
	fill(at(of->m, LEFT - 1), 7);
}

static int generation_holds(struct lender *of, uint64_t is)
{
	uint32_t wrong = 0;

	for (uint32_t i = 0; i < LEFT - 1; i++)
		wrong += !holds(at(of->m, i), is << 32 | (i + 1));
	return !wrong;
}

/* The keeper's pages join frames of the giver's. */
static void give(struct lender *from)
{
	for (uint32_t i = 0; i < LEFT - 1; i++) {
		uint64_t frame = 0;

		CHECK(!merge_patiently(from->control, from->f, i, &frame));
		CHECK(!merge_patiently(keeper.control, keeper.f, i, &frame));
	}
}

static void harvest_some(struct lender *of)
{
	static uint64_t bits[LEFT / 64];

	for (int i = 0; i < 30; i++) {
		harvest(of->f, bits);
		harvest(giver.f, bits);
		usleep(100000);
	}
}

void share(void)
{
	within(TENANTS "a/", generation_fill, &giver);
	within(TENANTS "b/", generation_fill, &keeper);
	within(DAEMON, give, &giver);
}

void give_up(void)
{
	generation++;
	within(TENANTS "a/", generation_fill, &giver);
}

/* All join frames of the giver's, which writes over its own. */
static void leave(const char *limit)
{
	share();
	charged(TENANTS "a/memory.current", LEFT, "given");
	CHECK(number(TENANTS "b/memory.current") < (long)(LEFT / 20 * PAGE));
	CHECK(!path_write(TENANTS "b/memory.max", limit));
	give_up();
	within(DAEMON, harvest_some, &keeper);
	CHECK(generation_holds(&keeper, generation - 1) && generation_holds(&giver, generation));
}

/* While it owes, it joins nothing that others pay for. */
static void join_refused(struct lender *of)
{
	uint64_t frame = 0;

	CHECK(!merge_patiently(giver.control, giver.f, LEFT - 1, &frame));
	CHECK(merge_patiently(of->control, of->f, LEFT - 1, &frame) == -EBUSY);
}

void join_last(struct lender *of)
{
	uint64_t frame = 0;

	merge_patiently(giver.control, giver.f, LEFT - 1, &frame);
	CHECK(!merge_patiently(of->control, of->f, LEFT - 1, &frame));
}

struct lender lender_make(void)
{
	struct lender made = { control_open(MOUNT), file_make(LEFT), 0 };

	made.m = file_map(made.f);
	return made;
}

void two_make(void)
{
	giver = lender_make();
	keeper = lender_make();
	groups_make();
	make_group(TENANTS "a/", "max");
	make_group(TENANTS "b/", "max");
	generation = 1;
}

void two_end(void)
{
	area_close(&giver, 0);
	area_close(&keeper, 0);
	CHECK(!rmdir(TENANTS "a") && !rmdir(TENANTS "b"));
	groups_end();
}

/*
 * Who uses a frame pays for it, when who gave it has left it: as far as there is room.
 */
void memcg_left(void)
{
	long of_a, of_b;

	two_make();
	client = fork_in(TENANTS "b/");
	if (!client)
		for (;;)
			pause();
	leave("max");
	charged(TENANTS "a/memory.current", LEFT, "left, the giver");
	charged(TENANTS "b/memory.current", LEFT, "left, the keeper");
	generation = 3;
	leave("16M");
	of_a = number(TENANTS "a/memory.current"), of_b = number(TENANTS "b/memory.current");
	printf("    with 16 MiB the keeper is charged %ld KiB, and the giver %ld\n", of_b >> 10, of_a >> 10);
	CHECK(of_b <= 14 << 20 && of_b > 13 << 20 && labs(of_a + of_b - 2 * LEFT * (long)PAGE) < (long)(LEFT / 10 * PAGE));
	/* What it is charged in advance comes and goes. */
	CHECK(!path_write(TENANTS "b/memory.max", "15M"));
	within(DAEMON, join_refused, &keeper);
	CHECK(waitpid(client, 0, WNOHANG) == 0 && !path_number(TENANTS "b/memory.events", "oom_kill"));
	CHECK(!path_write(TENANTS "b/memory.max", "max"));
	/* Room again is enough. */
	within(DAEMON, join_last, &keeper);
	within(DAEMON, harvest_some, &keeper);
	charged(TENANTS "a/memory.current", LEFT, "room again, the giver");
	charged(TENANTS "b/memory.current", LEFT, "room again, the keeper");
	CHECK(generation_holds(&keeper, 3) && generation_holds(&giver, 4));
	end(client);
	two_end();
}

/* ---- what it costs whoever comes to pay, and the daemon --------------------------------- */

/* Touches 256 KiB when it is told to. */
static void touch_when_told(volatile int *told)
{
	char *p = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	while (!*told)
		usleep(10000);
	for (int i = 0; i < 64; i++)
		p[i * PAGE] = 1;
	*told = 2;
	for (;;)
		pause();
}

/* Who comes to pay keeps room of its own, below each of its limits. */
void memcg_room(void)
{
	volatile int *told = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	long had;

	two_make();
	client = fork_in(TENANTS "b/");
	if (!client)
		touch_when_told(told);
	leave("16M");
	had = number(TENANTS "b/memory.current");
	*told = 1;
	for (double until = now() + 10; *told == 1 && now() < until;)
		usleep(10000);
	printf("    of 16 MiB it pays %ld KiB\n", had >> 10);
	CHECK(had > 8 << 20 && *told == 2);
	CHECK(waitpid(client, 0, WNOHANG) == 0 && !path_number(TENANTS "b/memory.events", "oom_kill"));
	/* Nobody had reclaimed in its place. */
	CHECK(!path_number(TENANTS "b/memory.events", "max"));
	/* As nobody writes here, nobody is throttled. */
	CHECK(!path_write(TENANTS "b/memory.max", "max"));
	share();
	CHECK(!path_write(TENANTS "b/memory.high", "20M"));
	give_up();
	within(DAEMON, harvest_some, &keeper);
	had = number(TENANTS "b/memory.current");
	printf("    where 20 MiB are high, it pays %ld KiB\n", had >> 10);
	CHECK(had > 8 << 20 && had < 20 << 20 && !path_number(TENANTS "b/memory.events", "high"));
	/* What both are in has no room, and needs none. */
	CHECK(!path_write(TENANTS "b/memory.high", "max"));
	within(DAEMON, harvest_some, &keeper);
	share();
	CHECK(!path_write(TENANTS "memory.max", "72M"));
	give_up();
	within(DAEMON, harvest_some, &keeper);
	had = number(TENANTS "b/memory.current");
	printf("    where both together have no room, it pays %ld KiB\n", had >> 10);
	CHECK(had > 24 << 20 && !path_write(TENANTS "memory.max", "max"));
	end(client);
	two_end();
}

/* Of the giver's file, too: who keeps a frame is found by whoever looks. */
void harvest_times(int n)
{
	struct pageonefs_harvest h = { .id = giver.f.id, .pages = 64 };

	while (n--)
		if (ioctl(giver.control, PAGEONEFS_HARVEST, &h))
			BAD("harvest");
}

long harvest_until(const char *group, long bytes)
{
	long is;

	for (double limit = now() + 30; (is = number(group)) < bytes && now() < limit; usleep(10000))
		harvest_times(1);
	return is;
}

/* Nobody had room for what was left, and has then: nobody looks at it again within a second. */
void memcg_rest(void)
{
	long before, rests, later;
	double looked;
	int tries = 0;

	two_make();
	do {
		CHECK(!path_write(TENANTS "b/memory.max", "max"));
		generation++;
		share();
		CHECK(!path_write(TENANTS "b/memory.max", "1M"));
		give_up();
		/* All of them wait, and the last look was just now. */
		harvest_times(500);
		usleep(1100000);
		before = number(TENANTS "b/memory.current");
		looked = now();
		harvest_times(1);
		CHECK(!path_write(TENANTS "b/memory.max", "max"));
		harvest_times(30);
		rests = number(TENANTS "b/memory.current");
	} while (now() - looked > 0.9 && ++tries < 20);
	CHECK(tries < 20);
	later = harvest_until(TENANTS "b/memory.current", LEFT / 2 * PAGE);
	printf("    it pays %ld KiB, %ld at once, and %ld later\n", before >> 10, rests >> 10, later >> 10);
	CHECK(rests - before < 1 << 20 && later >= (long)(LEFT / 2 * PAGE));
	two_end();
}

static void fill_far(struct lender *of)
{
	for (uint32_t i = LEFT - LEFT / 4; i < LEFT; i++)
		fill(at(of->m, i), 2ull << 40 | i);
}

/* What was left is found among all that was not, in a few harvests of any file. */
void memcg_far(void)
{
	long had = 0;
	int n = 0;

	two_make();
	share();
	within(TENANTS "a/", fill_far, &giver);
	for (; n < 300 && had < (long)(LEFT / 8 * PAGE); n++) {
		harvest_times(1);
		had = number(TENANTS "b/memory.current");
	}
	printf("    after %d harvests it pays %ld KiB\n", n, had >> 10);
	CHECK(had >= (long)(LEFT / 8 * PAGE));
	two_end();
}

#define VERSION_1 "/tmp/version-1/"

/* Version 1 would not count right what was charged before: no other test is in this guest. */
static int move_controller(void)
{
	if (access(PARAMETERS "no_version_check", F_OK)) {
		printf("    SKIPPED: this is not its guest\n");
		return -1;
	}
	CHECK(!path_write(CGROUPS "cgroup.subtree_control", "-memory"));
	mkdir(VERSION_1, 0755);
	if (!mount("cgroup", VERSION_1, "cgroup", 0, "memory"))
		return 0;
	if (errno == EINVAL)
		printf("    SKIPPED: this kernel has no version 1 for memory\n");
	else
		BAD("version 1 is refused");
	return -1;
}

static void within_1(const char *group, void (*act)(struct lender *), struct lender *of)
{
	char path[128], pid[16];
	pid_t child = fork_child();

	if (!child) {
		snprintf(path, sizeof(path), VERSION_1 "%s/cgroup.procs", group);
		snprintf(pid, sizeof(pid), "%d", getpid());
		CHECK(!path_write(path, pid));
		act(of);
		_exit(0);
	}
	waitpid(child, 0, 0);
}

/* Where charges can move under the kernel's lock of a cgroup, nobody else moves them. */
void memcg_version(void)
{
	long before, of_a, of_b;

	if (move_controller())
		return;
	giver = lender_make();
	keeper = lender_make();
	generation = 1;
	CHECK(!mkdir(VERSION_1 "a", 0755) && !mkdir(VERSION_1 "b", 0755));
	within_1("a", generation_fill, &giver);
	within_1("b", generation_fill, &keeper);
	give(&giver);
	before = number(VERSION_1 "a/memory.usage_in_bytes");
	generation = 2;
	within_1("a", generation_fill, &giver);
	/* Nobody owes there for having no room. */
	CHECK(!path_write(VERSION_1 "b/memory.limit_in_bytes", "1M"));
	harvest_some(&keeper);
	join_last(&keeper);
	of_a = number(VERSION_1 "a/memory.usage_in_bytes"), of_b = number(VERSION_1 "b/memory.usage_in_bytes");
	printf("    the giver is charged %ld KiB, then %ld, and the keeper %ld\n", before >> 10, of_a >> 10, of_b >> 10);
	CHECK(of_a > before + (long)(LEFT / 2 * PAGE) && of_b < (long)(LEFT / 4 * PAGE));
	CHECK(generation_holds(&keeper, 1) && generation_holds(&giver, 2));
	area_close(&giver, 0);
	area_close(&keeper, 0);
}

/* ---- neighbours that join one frame in one call ---------------------------------------- */

/* So many neighbours have one content; of each run these are written next. */
enum { RUN = 8 };
static uint32_t part_first, part_end;

static void part_fill(struct lender *of)
{
	for (uint32_t i = 0; i < LEFT; i++)
		if (i % RUN >= part_first && i % RUN < part_end)
			fill(at(of->m, i), generation << 32 | (i / RUN + 1));
}

static void part(const char *group, uint32_t first, uint32_t end)
{
	part_first = first, part_end = end;
	within(group, part_fill, &giver);
}

/* The last page of a run comes last: its cgroup is the file's payer. */
static void give_runs(struct lender *of)
{
	for (uint32_t i = 0; i < LEFT; i += RUN) {
		struct pageonefs_entry e[RUN] = {};
		struct pageonefs_merge m = { .id = of->f.id, .entries = (uintptr_t)e, .count = RUN - 2 };
		uint64_t frame = 0;

		CHECK(!merge_patiently(of->control, of->f, i, &frame));
		for (uint32_t k = 1; k < RUN; k++)
			e[k - 1] = (struct pageonefs_entry){ .index = i + k, .frame = frame };
		CHECK(!ioctl(of->control, PAGEONEFS_MERGE, &m));
		for (uint32_t k = 1; k < RUN; k++)
			CHECK((k < RUN - 1 && !e[k - 1].result) || !merge_patiently(of->control, of->f, i + k, &frame));
	}
}

/* Of two who write one file, each counts as a user of its own, in one call, too. */
void memcg_runs(void)
{
	long given, stays, left;
	uint32_t wrong = 0;

	giver = lender_make();
	groups_make();
	make_group(TENANTS "a/", "max");
	make_group(TENANTS "b/", "max");
	generation = 1;
	part(TENANTS "a/", 0, RUN / 2);
	part(TENANTS "b/", RUN / 2, RUN);
	within(DAEMON, give_runs, &giver);
	given = number(TENANTS "b/memory.current");
	generation = 2;
	part(TENANTS "a/", 0, RUN / 2 - 1);
	within(DAEMON, harvest_some, &giver);
	stays = number(TENANTS "b/memory.current");
	part(TENANTS "a/", RUN / 2 - 1, RUN / 2);
	within(DAEMON, harvest_some, &giver);
	left = number(TENANTS "b/memory.current");
	printf("    charged to the other: %ld KiB at first, %ld, and %ld once it is alone\n", given >> 10, stays >> 10, left >> 10);
	CHECK(given < (long)(LEFT / RUN / 2 * PAGE) && stays < (long)(LEFT / RUN / 2 * PAGE));
	CHECK(labs(left - LEFT / RUN * (long)PAGE) < (long)(LEFT / RUN / 8 * PAGE));
	for (uint32_t i = 0; i < LEFT; i++)
		wrong += !holds(at(giver.m, i), (uint64_t)(i % RUN < RUN / 2 ? 2 : 1) << 32 | (i / RUN + 1));
	CHECK(!wrong);
	area_close(&giver, 0);
	CHECK(!rmdir(TENANTS "a") && !rmdir(TENANTS "b"));
	groups_end();
}
