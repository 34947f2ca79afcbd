// SPDX-License-Identifier: GPL-2.0
/*
 * Tasks that are held up, or end, in the midst of making pages: what others get meanwhile, and
 * what is left.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "areas.h"

#define SLOW CGROUPS "slow/"

/* The kernel has its tasks sleep for seconds, each 128 pages, within a fault or a call. */
static void slow_group(void)
{
	make_group(SLOW, "max");
	CHECK(!path_write(SLOW "memory.high", "0"));
}

static void end(pid_t child)
{
	kill(child, SIGKILL);
	waitpid(child, 0, 0);
}

/* Whether a process sleeps in the kernel. */
static int asleep(pid_t pid)
{
	char path[32], line[64];
	FILE *f;
	int ret;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	f = fopen(path, "r");
	ret = f && fgets(line, sizeof(line), f) && strstr(line, ") D ");
	if (f)
		fclose(f);
	return ret;
}

/*
 * One task sleeps in a fault, and another asks for a page that there may be no room for: it waits.
 * Whoever writes what he has goes on meanwhile.
 */
static void full_waits(void)
{
	enum { PIECE = 64, WINDOWS = 16 };
	struct area slow, a;
	int thief, zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC), windows = 0, failed = 0;
	pid_t sleeper, asker;

	slow_group();
	mount_make("/waits", 2 * MANY, "");
	slow = area_make(MANY);
	a = area_make(MANY);
	thief = openat(control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	CHECK(thief >= 0 && !ftruncate(thief, PAGE));
	signal(SIGBUS, on_bus);
	fill_area(&slow);
	fill_area(&a);
	merge_area(&slow);
	merge_area(&a);
	CHECK(free_pages("/waits") == 0);
	sleeper = fork_in(SLOW);
	if (!sleeper)
		/* The kernel writes all of it, in one call. */
		_exit(read(zeros, slow.m, MANY * PAGE) != MANY * (ssize_t)PAGE);
	asker = fork_child();
	if (!asker)
		while (!sh->stop) {
			sh->checks++;
			if (pwrite(thief, "x", 1, 0) != -1 || errno != ENOSPC)
				BAD("a page beyond the mount's size");
			sh->writes++;
		}
	for (uint32_t i = 0; windows < WINDOWS && !waitpid(sleeper, 0, WNOHANG); i += PIECE) {
		long asked, answered, slept;

		if (i == MANY) {
			fill_area(&a);
			merge_area(&a);
			i = 0;
		}
		asked = __atomic_load_n(&sh->checks, 5);
		answered = __atomic_load_n(&sh->writes, 5);
		slept = state(&slow).private_pages;
		/* Both, before and after, and within one call of each. */
		if (!asleep(sleeper) || !asleep(asker))
			slept = -1;
		for (uint32_t k = i; k < i + PIECE; k++)
			failed += write_fails(at(a.m, k) + 8, 7);
		windows += asked != answered && asleep(sleeper) && asleep(asker) && asked == __atomic_load_n(&sh->checks, 5) &&
			   answered == __atomic_load_n(&sh->writes, 5) && slept == (long)state(&slow).private_pages;
	}
	printf("    %d times %d pages were written while one slept and one waited, %ld answers\n", windows, PIECE, sh->writes);
	/* A busy host takes the time of some: the sleeper is done before. */
	CHECK(windows >= WINDOWS / 4 && !failed && free_pages("/waits") == 0);
	end(asker);
	end(sleeper);
	area_end(&slow);
	area_end(&a);
	close(thief);
	mount_end("/waits");
	CHECK(!rmdir(SLOW));
}

/* A task that fills a file by one call of the kernel's. */
static pid_t fill_slowly(struct file f, char *m)
{
	pid_t child = fork_in(SLOW);

	if (!child)
		_exit(read(open("/dev/zero", O_RDONLY | O_CLOEXEC), m, f.pages * PAGE) != (ssize_t)(f.pages * PAGE));
	return child;
}

/* Waits until it sleeps anew. Returns how many private pages there are then; 0: it has ended. */
static uint64_t await_sleep(struct file f, pid_t sleeper, uint64_t before)
{
	uint64_t there = before;

	while (there == before && !waitpid(sleeper, 0, WNOHANG)) {
		usleep(1000);
		there = asleep(sleeper) ? describe(f.id).private_pages : before;
	}
	return there == before ? 0 : there;
}

static int sleeps_still(struct file f, pid_t sleeper, uint64_t there)
{
	return there && asleep(sleeper) && describe(f.id).private_pages == there;
}

/* One task sleeps in a fault of a file, and the daemon punches that file. */
static void throttled(void)
{
	enum { LONG = 4 * MANY, SLEEPS = 8 };
	struct file f = file_make(LONG);
	char *m = file_map(f);
	uint64_t there = 0;
	int windows = 0;
	pid_t sleeper;

	slow_group();
	sleeper = fill_slowly(f, m);
	for (int i = 0; i < SLEEPS; i++) {
		there = await_sleep(f, sleeper, there);
		punch(f, LONG - 64, 64);
		windows += sleeps_still(f, sleeper, there);
	}
	/* Now and then it sleeps for a page table, before the fault has the file's lock. */
	printf("    %d of %d times a punch came back while one slept in a fault\n", windows, SLEEPS);
	CHECK(windows > SLEEPS / 2);
	end(sleeper);
	munmap(m, LONG * PAGE);
	close(f.fd);
	CHECK(!rmdir(SLOW));
}

/* One task sleeps among writes of merged pages, and the daemon takes their dirty bits. */
static void throttled_writes(void)
{
	enum { TRIES = 8 };
	uint64_t there, bits[MANY / 64];
	int windows = 0;

	slow_group();
	for (int i = 0; i < TRIES; i++) {
		struct file f = file_make(MANY);
		char *m = file_map(f);
		pid_t sleeper;

		/* All have their bits. */
		all_merged(f, m, 5);
		sleeper = fill_slowly(f, m);
		there = await_sleep(f, sleeper, 0);
		harvest(f, bits);
		windows += sleeps_still(f, sleeper, there);
		end(sleeper);
		munmap(m, MANY * PAGE);
		close(f.fd);
	}
	printf("    %d of %d times a harvest came back while one slept\n", windows, TRIES);
	CHECK(windows > TRIES / 2);
	CHECK(!rmdir(SLOW));
}

/* Killed in the midst, an allocation leaves what was there, and what somebody has used since. */
static void allocate_ends(void)
{
	struct area a;
	struct stat st;

	slow_group();
	mount_make("/ends", 4 * MANY, "");
	for (int zero = 0; zero < 2; zero++) {
		pid_t child;

		a = area_make(MANY);
		fill(at(a.m, 5), 5);
		fill(at(a.m, 700), 7);
		child = fork_in(SLOW);
		if (!child)
			_exit(!fallocate(a.f.fd, zero ? FALLOC_FL_ZERO_RANGE : 0, 0, 3 * MANY * PAGE));
		while (!fstat(a.f.fd, &st) && st.st_blocks < 200 * 8 && !waitpid(child, 0, WNOHANG))
			usleep(1000);
		CHECK(st.st_blocks >= 200 * 8 && st.st_blocks < 3 * MANY * 8);
		CHECK(holds(at(a.m, 2), 0));
		fill(at(a.m, 3), 3);
		end(child);
		CHECK(!fstat(a.f.fd, &st) && st.st_size == MANY * (off_t)PAGE && st.st_blocks == 4 * 8);
		CHECK(holds(at(a.m, 2), 0) && holds(at(a.m, 3), 3) && holds(at(a.m, 5), 5) && holds(at(a.m, 700), 7));
		CHECK(free_pages("/ends") == 4 * MANY - 4);
		area_end(&a);
	}
	mount_end("/ends");
	CHECK(!rmdir(SLOW));
}

static pthread_barrier_t both;
static int rival_fd, rival_won;

static void *rival(void *unused)
{
	for (;;) {
		pthread_barrier_wait(&both);
		if (sh->stop)
			return unused;
		rival_won = !fallocate(rival_fd, 0, 0, 640 * PAGE);
		pthread_barrier_wait(&both);
	}
}

/* Two files are allocated at once, with room for one: one of them gets it, the other nothing. */
static void allocate_race(void)
{
	int fd, won, wrong = 0;
	struct stat mine, his;
	pthread_t other;

	mount_make("/race", MANY, "");
	fd = openat(control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	rival_fd = openat(control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	pthread_barrier_init(&both, 0, 2);
	pthread_create(&other, 0, rival, 0);
	for (int round = 0; round < 300; round++) {
		pthread_barrier_wait(&both);
		won = !fallocate(fd, 0, 0, 640 * PAGE);
		pthread_barrier_wait(&both);
		CHECK(!fstat(fd, &mine) && !fstat(rival_fd, &his));
		wrong += won + rival_won != 1 || mine.st_blocks + his.st_blocks != 640 * 8 || !mine.st_size == !his.st_size;
		CHECK(!ftruncate(fd, 0) && !ftruncate(rival_fd, 0) && free_pages("/race") == MANY);
	}
	sh->stop = 1;
	pthread_barrier_wait(&both);
	pthread_join(other, 0);
	printf("    300 rounds, %d wrong\n", wrong);
	CHECK(!wrong);
	close(fd);
	close(rival_fd);
	mount_end("/race");
}

const struct test held_up_tests[] = {
	{ "full_waits", full_waits }, { "throttled", throttled }, { "throttled_writes", throttled_writes },
	{ "allocate_ends", allocate_ends }, { "allocate_race", allocate_race }, { 0 },
};
