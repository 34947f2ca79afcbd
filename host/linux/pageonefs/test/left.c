// SPDX-License-Identifier: GPL-2.0
/*
 * Frames whose payers have left them: memory cgroups of who gave them, and of who keeps them.
 */
#define _GNU_SOURCE
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
