// SPDX-License-Identifier: GPL-2.0
/*
 * Frames whose payers have left them: memory cgroups of who gave them, and of who keeps them.
 */
#define _GNU_SOURCE
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tenants.h"

enum { LEFT = 8192 };
static struct lender giver, keeper;
static uint64_t generation;
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

/* All join frames of the giver's, which writes over its own. */
static void leave(const char *limit)
{
	within(TENANTS "a/", generation_fill, &giver);
	within(TENANTS "b/", generation_fill, &keeper);
	within(DAEMON, give, &giver);
	charged(TENANTS "a/memory.current", LEFT, "given");
	CHECK(number(TENANTS "b/memory.current") < (long)(LEFT / 20 * PAGE));
	CHECK(!path_write(TENANTS "b/memory.max", limit));
	generation++;
	within(TENANTS "a/", generation_fill, &giver);
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

static void join_last(struct lender *of)
{
	uint64_t frame = 0;

	merge_patiently(giver.control, giver.f, LEFT - 1, &frame);
	CHECK(!merge_patiently(of->control, of->f, LEFT - 1, &frame));
}

/*
 * Who uses a frame pays for it, when who gave it has left it: as far as there is room.
 */
void memcg_left(void)
{
	long of_a, of_b;

	giver = (struct lender){ control_open(MOUNT), file_make(LEFT), 0 };
	keeper = (struct lender){ control_open(MOUNT), file_make(LEFT), 0 };
	giver.m = file_map(giver.f);
	keeper.m = file_map(keeper.f);
	groups_make();
	make_group(TENANTS "a/", "max");
	make_group(TENANTS "b/", "max");
	client = fork_in(TENANTS "b/");
	if (!client)
		for (;;)
			pause();
	generation = 1;
	leave("max");
	charged(TENANTS "a/memory.current", LEFT, "left, the giver");
	charged(TENANTS "b/memory.current", LEFT, "left, the keeper");
	generation = 3;
	leave("16M");
	of_a = number(TENANTS "a/memory.current"), of_b = number(TENANTS "b/memory.current");
	printf("    with 16 MiB the keeper is charged %ld KiB, and the giver %ld\n", of_b >> 10, of_a >> 10);
	CHECK(of_b <= 16 << 20 && of_b > 15 << 20 && labs(of_a + of_b - 2 * LEFT * (long)PAGE) < (long)(LEFT / 10 * PAGE));
	within(DAEMON, join_refused, &keeper);
	CHECK(waitpid(client, 0, WNOHANG) == 0 && !path_number(TENANTS "b/memory.events", "oom_kill"));
	CHECK(!path_write(TENANTS "b/memory.max", "max"));
	within(DAEMON, harvest_some, &keeper);
	charged(TENANTS "a/memory.current", LEFT, "room again, the giver");
	charged(TENANTS "b/memory.current", LEFT, "room again, the keeper");
	within(DAEMON, join_last, &keeper);
	CHECK(generation_holds(&keeper, 3) && generation_holds(&giver, 4));
	end(client);
	area_close(&giver, 0);
	area_close(&keeper, 0);
	CHECK(!rmdir(TENANTS "a") && !rmdir(TENANTS "b"));
	groups_end();
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

	giver = (struct lender){ control_open(MOUNT), file_make(LEFT), 0 };
	giver.m = file_map(giver.f);
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
