// SPDX-License-Identifier: GPL-2.0
/*
 * Tries to lose a byte: programs write and know what they wrote, while all that has a double is
 * merged.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

/* ---- processes --------------------------------------------------------------------- */

static void stop_after(const pid_t *pids, int n, int seconds)
{
	sleep(seconds);
	sh->stop = 1;
	for (int i = 0; i < n; i++) {
		int status;

		if (waitpid(pids[i], &status, 0) < 0 || status)
			BAD("child %d ended with %x", i, status);
	}
}

static pid_t merger(struct file f)
{
	pid_t pid = fork_child();

	if (pid)
		return pid;
	while (!sh->stop)
		merge_round(f);
	_exit(0);
}

/* ---- writers through two mappings ----------------------------------------------------- */

struct writer {
	char *a, *b;
	uint32_t pages, k, n;
};

static void *writer(void *arg)
{
	struct writer *w = arg;
	uint64_t *is = calloc(w->pages, 8), r = mix(w->k + 77), fresh = (uint64_t)(w->k + 1) << 40;
	long checks = 0, writes = 0;
	uint32_t i;

	for (i = w->k; i < w->pages; i += w->n)
		fill(at(w->a, i), is[i] = 1);
	while (!sh->stop) {
		r = mix(r);
		i = r % (w->pages / w->n) * w->n + w->k;
		char *x = r >> 33 & 1 ? w->a : w->b, *y = r >> 34 & 1 ? w->a : w->b;

		if (!holds(at(y, i), is[i])) {
			BAD("writer %u: page %u does not hold %lx", w->k, i, (long)is[i]);
			fill(at(w->a, i), is[i] = 1);
		}
		checks++;
		if (r >> 35 & 1)
			continue;
		/* Often what others have, too. */
		uint64_t c = (r >> 40) % 10 < 7 ? (r >> 45) % 16 : fresh++;
		int half = r >> 50 & 511;

		fill_words(at(x, i), c, 0, half);
		if (r >> 60 & 1) {
			uint64_t mixed[512], old[512];

			fill_words(mixed, c, 0, half);
			fill(old, is[i]);
			memcpy(mixed + half, old + half, (512 - half) * 8);
			if (memcmp(at(y, i), mixed, PAGE))
				BAD("writer %u: page %u is wrong when half is written", w->k, i);
		}
		fill_words(at(x, i), c, half, 512);
		is[i] = c;
		writes++;
		if (!(r >> 55 & 15))
			usleep(1000);
	}
	for (i = w->k; i < w->pages; i += w->n)
		if (!holds(at(w->b, i), is[i]))
			BAD("writer %u: at the end page %u does not hold %lx", w->k, i, (long)is[i]);
	__atomic_add_fetch(&sh->checks, checks, 5);
	__atomic_add_fetch(&sh->writes, writes, 5);
	free(is);
	return 0;
}

static pid_t writers(struct file f, int p, int processes, int threads)
{
	pthread_t t[8];
	struct writer w[8];
	pid_t pid = fork_child();

	if (pid)
		return pid;
	char *a = file_map(f), *b = file_map(f);

	for (int i = 0; i < threads; i++) {
		w[i] = (struct writer){ a, b, f.pages, p * threads + i, processes * threads };
		pthread_create(&t[i], 0, writer, &w[i]);
	}
	for (int i = 0; i < threads; i++)
		pthread_join(t[i], 0);
	munmap(a, f.pages * PAGE);
	_exit(0);
}

/* Two processes, two threads and two mappings each; two that merge. */
static void hammer(void)
{
	struct file f = file_make(2048);
	pid_t pids[] = { writers(f, 0, 2, 2), writers(f, 1, 2, 2), merger(f), merger(f) };

	stop_after(pids, 4, 20);
	say("hammer");
	CHECK(stats().merges > 10 && sh->writes > 100);
	close(f.fd);
}

/* ---- dirty bits -------------------------------------------------------------------------- */

/*
 * Every page whose content has changed must be named. Digests and bits of this round and the
 * last.
 */
pid_t harvester(struct file f)
{
	pid_t pid = fork_child();

	if (pid)
		return pid;
	uint64_t *d[2] = { calloc(f.pages, 8), calloc(f.pages, 8) }, *bits[2] = { calloc(f.pages / 64, 8), calloc(f.pages / 64, 8) };
	long changed = 0, rounds = 0;

	for (int k = 0; !sh->stop; k ^= 1, rounds++) {
		harvest(f, bits[k]);
		digests(f, d[k]);
		harvest(f, bits[k ^ 1]);
		for (uint32_t i = 0; rounds && i < f.pages; i++) {
			if (d[0][i] <= 2 || d[1][i] <= 2 || (d[0][i] | d[1][i]) & 1 || d[0][i] == d[1][i])
				continue;
			changed++;
			if (!((bits[0][i / 64] | bits[1][i / 64]) >> (i & 63) & 1))
				BAD("page %u changed and is not dirty", i);
		}
		/* The second harvest has taken bits: fresh digests stand for them. */
		digests(f, d[k]);
		merge_round(f);
	}
	printf("    %ld rounds, %ld changes seen\n", rounds, changed);
	fflush(stdout);
	if (changed < 20)
		BAD("too few changes to say anything");
	_exit(0);
}

static void dirty(void)
{
	struct file f = file_make(1024);
	pid_t pids[] = { writers(f, 0, 2, 1), writers(f, 1, 2, 1), harvester(f) };

	stop_after(pids, 3, 25);
	say("dirty");
	close(f.fd);
}

/* Writes pages, and cuts them by all calls that do. */
static pid_t cutting(struct file f)
{
	pid_t pid = fork_child();

	if (pid)
		return pid;
	char page[PAGE];
	uint64_t r = 3;

	while (!sh->stop) {
		for (uint32_t i = 0; i < f.pages; i++) {
			fill(page, 1 + i % 2);
			if (pwrite(f.fd, page, PAGE, i * PAGE) != (ssize_t)PAGE)
				BAD("pwrite");
		}
		usleep(2000);
		r = mix(r);
		off_t from = r % (f.pages * PAGE - 1), len = 1 + (r >> 32) % (f.pages * PAGE - from);
		int mode = r >> 8 & 1 ? FALLOC_FL_PUNCH_HOLE : FALLOC_FL_ZERO_RANGE, ret;

		if (r >> 9 & 3)
			ret = fallocate(f.fd, mode | FALLOC_FL_KEEP_SIZE, from, len);
		else
			ret = ftruncate(f.fd, (f.pages * PAGE + from) / 2) || ftruncate(f.fd, f.pages * PAGE);
		if (ret)
			BAD("a cut");
		sh->writes++;
	}
	_exit(0);
}

/* A hole that is read through a mapping is a page of zeros. */
static pid_t reading(struct file f)
{
	pid_t pid = fork_child();

	if (pid)
		return pid;
	char *m = file_map(f);

	while (!__atomic_load_n(&sh->stop, 5))
		for (uint32_t i = 0; i < f.pages / 2; i++)
			sh->checks += !*(volatile char *)at(m, i);
	_exit(0);
}

/* Holes and lengths, too: what a digest sees has its bit before the call has ended. */
static void dirty_cuts(void)
{
	struct file f = file_make(64);
	pid_t pids[] = { cutting(f), reading(f), harvester(f) };

	stop_after(pids, 3, 15);
	say("dirty_cuts");
	close(f.fd);
}

/* Writes by call, holes and lengths leave bits, too. */
static void dirty_calls(void)
{
	struct file f = file_make(128);
	char *m = file_map(f);
	uint64_t bits[2];

	all_merged(f, m, 5);
	harvest(f, bits);
	CHECK(harvest(f, bits) == 0);
	CHECK(holds(at(m, 3), 5) && holds(at(m, 4), 5) && harvest(f, bits) == 0);
	at(m, 3)[0] = 1;
	CHECK(pwrite(f.fd, "xx", 2, 70 * PAGE - 1) == 2);
	CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 80 * PAGE, 2 * PAGE));
	CHECK(!ftruncate(f.fd, 127 * PAGE));
	CHECK(harvest(f, bits) == 6 && bits[0] == 1ull << 3 && bits[1] == (3ull << 5 | 3ull << 16 | 1ull << 63));
	/* What others hold, as a new page's batch does, may be named again. */
	for (int tries = 0; tries < 50 && harvest(f, bits); tries++)
		usleep(20000);
	/* Written again, without a fault of another kind between. */
	at(m, 3)[0] = 2;
	CHECK(harvest(f, bits) == 1 && bits[0] == 1ull << 3);
	munmap(m, 128 * PAGE);
	close(f.fd);
}

/* ---- calls beside merges -------------------------------------------------------- */

/*
 * Writes, reads, holes and lengths by calls and through a mapping; each process has its own
 * pages.
 */
static pid_t caller(struct file f, int k, int n)
{
	pid_t pid = fork_child();

	if (pid)
		return pid;
	char *m = file_map(f), *mine = calloc(1, PAGE), *is = calloc(f.pages, PAGE);
	uint64_t r = mix(k + 99);
	long checks = 0;

	while (!sh->stop) {
		r = mix(r);
		uint32_t i = r % (f.pages / n) * n + k, from = r >> 20 & 4095, len = (r >> 32 & 4095) % (PAGE - from) + 1;
		off_t place = i * PAGE + from;

		switch (r >> 44 & 7) {
		case 0: /* a write that leaves the page as it was, and one that does not */
			memset(mine, r >> 50 & 1, len);
			if (pwrite(f.fd, mine, len, place) != (ssize_t)len)
				BAD("pwrite");
			memcpy(at(is, i) + from, mine, len);
			break;
		case 1:
			fill(mine, r >> 50 & 3);
			if (pwrite(f.fd, mine, PAGE, i * PAGE) != (ssize_t)PAGE)
				BAD("pwrite");
			memcpy(at(is, i), mine, PAGE);
			break;
		case 2:
			if (fallocate(f.fd, (r >> 50 & 1 ? FALLOC_FL_PUNCH_HOLE : FALLOC_FL_ZERO_RANGE) | FALLOC_FL_KEEP_SIZE, place, len))
				BAD("fallocate");
			memset(at(is, i) + from, 0, len);
			break;
		case 3:
			if (fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, i * PAGE, PAGE))
				BAD("fallocate");
			memset(at(is, i), 0, PAGE);
			break;
		case 4:
			fill(at(m, i), r >> 50 & 3);
			fill(at(is, i), r >> 50 & 3);
			break;
		case 5:
			at(m, i)[from] = r >> 50 & 1;
			at(is, i)[from] = r >> 50 & 1;
			break;
		}
		if (r >> 60 & 1) {
			if (pread(f.fd, mine, PAGE, i * PAGE) != (ssize_t)PAGE || memcmp(mine, at(is, i), PAGE))
				BAD("caller %d: page %u reads wrong after %d", k, i, (int)(r >> 44 & 7));
		} else if (memcmp(at(m, i), at(is, i), PAGE)) {
			BAD("caller %d: page %u is wrong after %d", k, i, (int)(r >> 44 & 7));
		}
		checks++;
	}
	__atomic_add_fetch(&sh->checks, checks, 5);
	_exit(0);
}

/* The file's last pages come and go: what is beyond its end reads as zeros afterwards. */
static pid_t cutter(struct file f)
{
	pid_t pid = fork_child();

	if (pid)
		return pid;
	char page[PAGE], *m = file_map(f);
	uint64_t r = 5;

	while (!sh->stop) {
		uint32_t keep;

		for (uint32_t i = 0; i < 64; i++)
			fill(at(m, i), 1 + i % 2);
		usleep(2000);
		r = mix(r);
		keep = r % 64;
		if (ftruncate(f.fd, keep * PAGE + 100) || ftruncate(f.fd, 64 * PAGE))
			BAD("ftruncate");
		fill(page, 1 + keep % 2);
		memset(page + 100, 0, PAGE - 100);
		for (uint32_t i = 0; i < 64; i++)
			if (i < keep ? !holds(at(m, i), 1 + i % 2) : i > keep ? !holds(at(m, i), 0) : memcmp(at(m, i), page, PAGE))
				BAD("page %u is wrong when %u were kept", i, keep);
		sh->writes++;
	}
	_exit(0);
}

static void calls(void)
{
	struct file f = file_make(512), g = file_make(64);
	pid_t pids[] = { caller(f, 0, 2), caller(f, 1, 2), merger(f), cutter(g), merger(g) };

	stop_after(pids, 5, 20);
	say("calls");
	CHECK(sh->checks > 100 && sh->writes > 2);
	close(f.fd);
	close(g.fd);
}

/* ---- killing -------------------------------------------------------------------- */

static void scribble(struct file f, uint64_t r)
{
	for (;;) {
		char *x = file_map(f);
		int n = mix(r) % 3000, j;

		for (j = 0; j < n; j++) {
			r = mix(r);
			fill(at(x, r % f.pages), r >> 40 & 3);
			if (!(r >> 50 & 63)) {
				munmap(at(x, (r >> 20) % f.pages), PAGE);
				break;
			}
		}
		if (!(r & 1))
			mmap(x, f.pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		munmap(x, f.pages * PAGE);
		r = mix(r);
	}
}

/* Processes end in the midst of everything, and the last user of a file, while it is merged. */
static void killing(void)
{
	struct file f = file_make(1024);
	pid_t m = merger(f);
	int rounds = 0;

	for (double end = now() + 15; now() < end; rounds++) {
		pid_t k = fork_child();

		if (!k)
			scribble(f, rounds);
		usleep(1000 + rand() % 60000);
		kill(k, SIGKILL);
		waitpid(k, 0, 0);
	}
	printf("    %d processes were killed\n", rounds);
	kill(m, SIGKILL);
	waitpid(m, 0, 0);
	say("killing");
	CHECK(rounds > 2);
	close(f.fd);
}

const struct test hazard_tests[] = {
	{ "hammer", hammer }, { "dirty", dirty }, { "dirty_cuts", dirty_cuts },
	{ "dirty_calls", dirty_calls }, { "calls", calls }, { "killing", killing }, { 0 },
};
