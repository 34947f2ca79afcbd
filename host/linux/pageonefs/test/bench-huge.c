// SPDX-License-Identifier: GPL-2.0
/*
 * bench-huge: what memory costs in huge pages and in small ones, until it is merged. Each line is
 * "COST pageonefs huge|small what nanoseconds", a page; scripts/lanes/pageonefs-bench.sh runs it.
 */
#define _GNU_SOURCE
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <time.h>
#include <unistd.h>

#include "pages.h"

#define HUGE	512u		/* pages */
#define PAGES	(32 * HUGE)
#define CHUNK	512u

static const char *kind;

static uint64_t cpu(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void cost(const char *what, uint64_t since, uint64_t pages)
{
	uint64_t total = cpu() - since;

	printf("COST pageonefs %s %s %lu.%02lu\n", kind, what, (long)(total / pages), (long)(total * 100 / pages % 100));
}

static void write_each(char *m, uint32_t step)
{
	for (uint32_t i = 0; i < PAGES; i += step)
		at(m, i)[8]++;
}

static void merge_all(struct file f)
{
	struct pageonefs_entry e[CHUNK];
	uint64_t frame = 0;

	merge_page(f, 0, &frame);
	for (uint32_t i = 1; i < PAGES; i += CHUNK) {
		struct pageonefs_merge m = { .id = f.id, .entries = (uintptr_t)e };

		for (; m.count < CHUNK && i + m.count < PAGES; m.count++)
			e[m.count] = (struct pageonefs_entry){ .index = i + m.count, .frame = frame };
		if (ioctl(control_open(MOUNT), PAGEONEFS_MERGE, &m))
			BAD("merge");
	}
}

static void measure(int huge)
{
	static uint64_t bits[PAGES / 64];
	struct file f;
	uint64_t t;
	char *m;

	kind = huge ? "huge" : "small";
	if (mount("none", MOUNT, 0, MS_REMOUNT, huge ? "huge=advise" : "huge=never"))
		BAD("remount");
	f = file_make(PAGES);
	m = file_map(f);
	madvise(m, PAGES * PAGE, MADV_HUGEPAGE);
	t = cpu();
	write_each(m, 1);
	cost("touch", t, PAGES);
	t = cpu();
	harvest(f, bits);
	cost("harvest-dirty", t, PAGES);
	t = cpu();
	write_each(m, 1);
	cost("write-again", t, PAGES);
	harvest(f, bits);
	/* One page of each 2 MiB: of these, a page. */
	t = cpu();
	write_each(m, HUGE);
	cost("write-one", t, PAGES / HUGE);
	t = cpu();
	harvest(f, bits);
	cost("harvest-one", t, PAGES / HUGE);
	for (uint32_t i = 0; i < PAGES; i += HUGE)
		at(m, i)[8] = 2;
	t = cpu();
	merge_all(f);
	cost("merge", t, PAGES);
	if (describe(f.id).merged_pages != PAGES)
		BAD("%lu pages are merged", (long)describe(f.id).merged_pages);
	munmap(m, PAGES * PAGE);
	close(f.fd);
}

int main(void)
{
	static struct shared here;

	sh = &here;
	setvbuf(stdout, 0, _IOLBF, 0);
	measure(0);
	measure(1);
	return !!sh->bad;
}
