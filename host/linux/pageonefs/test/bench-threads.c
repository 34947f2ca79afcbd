// SPDX-License-Identifier: GPL-2.0
/*
 * bench-threads PAGES ROUNDS: how much faster two threads merge two files than one thread does, one
 * file after the other. All files hold the same, so both threads use the same frames at the same
 * time. Needs two processors; scripts/lanes/pageonefs-bench.sh time runs it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "pages.h"

#define BATCH 512
#define FILES 2

static uint32_t pages;
static struct file files[FILES + 1];
static uint64_t *frames;
static pthread_barrier_t barrier;

static int merge(int f, int make)
{
	struct pageonefs_entry e[BATCH];
	uint32_t merged = 0, i;

	for (uint32_t from = 0; from < pages; from += BATCH) {
		struct pageonefs_merge m = { .id = files[f].id, .entries = (uintptr_t)e };

		for (m.count = 0; m.count < BATCH && from + m.count < pages; m.count++)
			e[m.count] = (struct pageonefs_entry){ from + m.count, make ? 0 : frames[from + m.count], 0, 0 };
		if (ioctl(control_open(MOUNT), PAGEONEFS_MERGE, &m))
			BAD("merge");
		for (i = 0; make && i < m.count; i++)
			frames[from + i] = e[i].frame;
		merged += m.merged;
	}
	return merged;
}

static void *merge_one(void *f)
{
	pthread_barrier_wait(&barrier);
	return (void *)(intptr_t)merge((intptr_t)f, 0);
}

/*
 * Makes all pages private, by writing them. Another process maps the files, as where a daemon
 * merges: else the threads would interrupt each other, to take the mappings away.
 */
static int to_child[2], from_child[2];

static void child(void)
{
	char *memory[FILES + 1], f;

	for (int i = 0; i <= FILES; i++)
		memory[i] = file_map(files[i]);
	while (read(to_child[0], &f, 1) == 1) {
		for (uint32_t i = 0; i < pages; i++)
			fill(at(memory[(int)f], i), i + 1);
		if (write(from_child[1], &f, 1) != 1)
			break;
	}
	_exit(0);
}

static void refill(int f)
{
	char c = f;

	if (write(to_child[1], &c, 1) != 1 || read(from_child[0], &c, 1) != 1)
		BAD("the child is gone");
}

static int later(const void *a, const void *b)
{
	return *(const double *)a > *(const double *)b ? 1 : -1;
}

int main(int argc, char **argv)
{
	double ratios[64];
	int rounds, round;

	setvbuf(stdout, 0, _IOLBF, 0);
	if (argc < 3)
		return 2;
	sh = calloc(1, sizeof(*sh));
	pages = atoi(argv[1]);
	rounds = atoi(argv[2]) < 64 ? atoi(argv[2]) : 64;
	frames = calloc(pages, sizeof(*frames));
	control_open(MOUNT);
	for (int f = 0; f <= FILES; f++)
		files[f] = file_make(pages);
	if (pipe(to_child) || pipe(from_child))
		BAD("pipe");
	if (!fork()) {
		close(to_child[1]);
		child();
	}
	for (int f = 0; f <= FILES; f++)
		refill(f);
	/* New pages are in batches of the processor, for a moment. */
	usleep(300000);
	if (merge(FILES, 1) < (int)pages - 64)
		BAD("frames");
	pthread_barrier_init(&barrier, NULL, FILES + 1);
	for (round = 0; round < rounds; round++) {
		pthread_t threads[FILES];
		double start, one, two;
		long by_one = 0, by_two = 0;
		void *merged;

		start = now();
		for (int f = 0; f < FILES; f++)
			by_one += merge(f, 0);
		one = (now() - start) / by_one;
		for (int f = 0; f < FILES; f++)
			refill(f);
		for (int f = 0; f < FILES; f++)
			pthread_create(&threads[f], NULL, merge_one, (void *)(intptr_t)f);
		usleep(100000);
		pthread_barrier_wait(&barrier);
		start = now();
		for (int f = 0; f < FILES; f++) {
			pthread_join(threads[f], &merged);
			by_two += (intptr_t)merged;
		}
		two = (now() - start) / by_two;
		for (int f = 0; f < FILES; f++)
			refill(f);
		ratios[round] = one / two;
		printf("THREADS one %.2f us a page (%ld), two %.2f us (%ld): %.2f\n", one * 1e6, by_one, two * 1e6, by_two,
		       one / two);
	}
	qsort(ratios, rounds, sizeof(*ratios), later);
	printf("THREADS two threads merge %.2f times as fast as one (median of %d; %.2f to %.2f); to reach: 1.8\n",
	       ratios[rounds / 2], rounds, ratios[0], ratios[rounds - 1]);
	if (sh->bad)
		printf("BENCH-FAILED\n");
	return !!sh->bad;
}
