// SPDX-License-Identifier: GPL-2.0
/*
 * Who pays: memory cgroups of those who use memory, of those who merge, and the kernel's figures.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tenants.h"

long number(const char *path)
{
	char line[64] = "";
	FILE *f = fopen(path, "r");

	if (!f || !fgets(line, sizeof(line), f))
		BAD("%s", path);
	if (f)
		fclose(f);
	return atol(line);
}

/* A process in a group of its own. */
pid_t fork_in(const char *group)
{
	char path[128], pid[16];
	pid_t child = fork_child();

	if (child)
		return child;
	snprintf(path, sizeof(path), "%scgroup.procs", group);
	snprintf(pid, sizeof(pid), "%d", getpid());
	if (path_write(path, pid))
		BAD("%s", path);
	return 0;
}

void make_group(const char *group, const char *limit)
{
	char path[128];

	if (mkdir(group, 0755))
		BAD("mkdir %s", group);
	snprintf(path, sizeof(path), "%smemory.max", group);
	CHECK(!path_write(path, limit));
	snprintf(path, sizeof(path), "%smemory.swap.max", group);
	/* Not there without swap in the kernel. */
	path_write(path, "0");
}

/* Each content in two pages. Not further ahead of who merges than this. */
#define AHEAD	2048

static void write_pairs(struct file f)
{
	char *m = file_map(f);

	for (uint32_t i = 0; i < f.pages; i += 2) {
		fill(at(m, i), f.id << 32 | (i + 1));
		fill(at(m, i + 1), f.id << 32 | (i + 1));
		sh->writes = i + 2;
		while (sh->writes - sh->checks > AHEAD && !sh->stop)
			usleep(1000);
	}
	munmap(m, f.pages * PAGE);
}

static int pairs_hold(struct file f)
{
	char *m = mmap(0, f.pages * PAGE, PROT_READ, MAP_SHARED, f.fd, 0);
	int wrong = 0;

	for (uint32_t i = 0; i < f.pages; i++)
		wrong += !holds(at(m, i), f.id << 32 | ((i & ~1) + 1));
	munmap(m, f.pages * PAGE);
	return !wrong;
}

static void merge_pairs(struct file f)
{
	int mount = control_open(MOUNT);

	for (uint32_t i = 0; i < f.pages; i += 2) {
		uint64_t frame = 0;

		while (sh->writes < i + 2 && !sh->stop)
			usleep(1000);
		if (sh->stop)
			return;
		if (merge_patiently(mount, f, i, &frame) || merge_patiently(mount, f, i + 1, &frame))
			BAD("page %u does not merge", i);
		sh->checks = i + 2;
	}
}

/* A tenant writes pairs and waits; a daemon merges them. */
static pid_t tenant, merger;

static void merge_tenant(struct file f, const char *group)
{
	sh->writes = sh->checks = sh->stop = 0;
	tenant = fork_in(group);
	if (!tenant) {
		write_pairs(f);
		for (;;)
			pause();
	}
	merger = fork_in(DAEMON);
	if (!merger) {
		merge_pairs(f);
		_exit(0);
	}
}

void end(pid_t child)
{
	kill(child, SIGKILL);
	waitpid(child, 0, 0);
}

/* By a process of the daemon's group. Returns the error. */
static int plain_by_daemon(struct file f)
{
	struct pageonefs_plain plain = { .id = f.id };
	pid_t child = fork_in(DAEMON);
	int status, ret;

	if (!child) {
		while ((ret = ioctl(control_open(MOUNT), PAGEONEFS_MAKE_PLAIN, &plain)) && errno == EINTR)
			;
		_exit(ret ? errno : 0);
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The group is charged for so many pages, and the daemon's for nothing. */
void charged(const char *group, uint64_t pages, const char *when)
{
	long is = number(group), of_daemon = number(DAEMON "memory.current"), used = pages * PAGE;

	printf("    %s: %ld KiB are used, %ld charged, the daemon's group has %ld\n", when, used >> 10, is >> 10, of_daemon >> 10);
	if (labs(is - used) > used / 20)
		BAD("%s: %ld KiB are used, and %ld charged", when, used >> 10, is >> 10);
	if (of_daemon > used / 20)
		BAD("%s: the daemon's group pays %ld KiB", when, of_daemon >> 10);
}

/* A tenant writes more than its limit, which merging keeps it within; then nothing is merged. */
static void memcg_limit(void)
{
	struct file f = file_make(32768);
	int status;

	make_group(TENANTS "a/", "96M");
	merge_tenant(f, TENANTS "a/");
	waitpid(merger, &status, 0);
	CHECK(!status && waitpid(tenant, &status, WNOHANG) == 0);
	charged(TENANTS "a/memory.current", f.pages / 2, "merged");
	CHECK(labs(path_number(TENANTS "a/memory.stat", "shmem") - (long)(f.pages / 2 * PAGE)) < (long)(f.pages / 40 * PAGE));
	/* It does not fit into its limit: what is merged stays so, and nobody is killed. */
	CHECK(plain_by_daemon(f) == ENOMEM);
	CHECK(waitpid(tenant, &status, WNOHANG) == 0 && !path_number(TENANTS "a/memory.events", "oom_kill"));
	CHECK(describe(f.id).merged_pages > f.pages / 4 && pairs_hold(f));
	CHECK(number(DAEMON "memory.current") < (long)(f.pages / 40 * PAGE));
	CHECK(!path_write(TENANTS "a/memory.max", "max") && plain_by_daemon(f) == 0);
	CHECK(describe(f.id).merged_pages == 0);
	charged(TENANTS "a/memory.current", f.pages, "plain");
	CHECK(pairs_hold(f));
	end(tenant);
	close(f.fd);
}

/* A limit holds for what is merged. */
static void memcg_kill(void)
{
	struct file f = file_make(16384);
	int status = 0;

	make_group(TENANTS "b/", "24M");
	merge_tenant(f, TENANTS "b/");
	while (!waitpid(tenant, &status, WNOHANG) && sh->checks < f.pages)
		usleep(10000);
	sh->stop = 1;
	end(merger);
	end(tenant);
	printf("    with 24 MiB, of %u pages %ld were written\n", f.pages, sh->writes);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && sh->writes < f.pages);
	CHECK(number(TENANTS "b/memory.current") <= 24 << 20);
	close(f.fd);
}

/* A cgroup goes, and its file stays: what the cgroup was in pays. */
static void memcg_gone(void)
{
	struct file f = file_make(16384);
	int status;

	make_group(TENANTS "c/", "max");
	merge_tenant(f, TENANTS "c/");
	waitpid(merger, &status, 0);
	end(tenant);
	CHECK(!status && !rmdir(TENANTS "c"));
	charged(TENANTS "memory.current", f.pages / 2, "merged, the group has gone");
	CHECK(plain_by_daemon(f) == 0 && pairs_hold(f));
	charged(TENANTS "memory.current", f.pages, "plain, the group has gone");
	close(f.fd);
}

void groups_make(void)
{
	CHECK(!mkdir(DAEMON, 0755) && !mkdir(TENANTS, 0755));
	CHECK(!path_write(TENANTS "cgroup.subtree_control", "+memory"));
}

void groups_end(void)
{
	for (double limit = now() + 30; number(TENANTS "memory.current") > 1 << 20 && now() < limit;)
		usleep(100000);
	CHECK(number(TENANTS "memory.current") <= 1 << 20);
	CHECK(!rmdir(TENANTS) && !rmdir(DAEMON));
}

static void memcg(void)
{
	groups_make();
	memcg_limit();
	memcg_kill();
	CHECK(!rmdir(TENANTS "a") && !rmdir(TENANTS "b"));
	memcg_gone();
	groups_end();
}

/* ---- pages of stores ------------------------------------------------------------------------- */

/* By a process of this group, which has then ended. */
void within(const char *group, void (*act)(struct lender *), struct lender *a)
{
	pid_t child = fork_in(group);
	int status;

	if (!child) {
		act(a);
		_exit(0);
	}
	waitpid(child, &status, 0);
	CHECK(!status);
}

static pid_t client;
static uint64_t *lent;

/* As the daemon: the client's pages go to the store, and are lent. */
static void store_fill(struct lender *store)
{
	for (uint32_t i = 0; i < store->f.pages; i++) {
		CHECK(!slot_make(store, i, client));
		fill(at(store->m, i), 1 + i);
		lent[i] = 0;
		CHECK(!merge_patiently(store->control, store->f, i, &lent[i]));
	}
}

static void guest_fill(struct lender *guest)
{
	for (uint32_t i = 0; i < guest->f.pages; i++)
		fill(at(guest->m, i), 1 + i);
}

static void guest_join(struct lender *guest)
{
	for (uint32_t i = 0; i < guest->f.pages; i++)
		CHECK(!merge_patiently(guest->control, guest->f, i, &lent[i]));
}

/* Half of the pages leave the store; then they are made anew as the others are. */
static void store_cut(struct lender *store)
{
	CHECK(!fallocate(store->f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, store->f.pages / 2 * PAGE));
}

static void store_copy(struct lender *store)
{
	for (uint32_t i = 0, half = store->f.pages / 2; i < half; i++)
		CHECK(!ioctl(store->control, PAGEONEFS_SLOT,
			     &(struct pageonefs_slot){ .id = store->f.id, .index = i, .like_id = store->f.id, .like = half + i }));
}

static void store_end(struct lender *store)
{
	CHECK(!fallocate(store->f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, store->f.pages * PAGE));
}

/* Until there is no room: then nobody is killed, and there is room again when something goes. */
static void store_limit(struct lender *store)
{
	uint32_t i = 0;
	int error = 0;

	while (i < store->f.pages && !(error = slot_make(store, i, client)))
		i++;
	printf("    of %u pages the client's group had room for %u\n", store->f.pages, i);
	CHECK(error == ENOMEM);
	CHECK(!fallocate(store->f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, i / 2 * PAGE));
	CHECK(!slot_make(store, 0, client));
}

/* A client pays for what its pages became, wherever it is, while it is used; its limit holds. */
static void memcg_lent(void)
{
	enum { LENT = 8192 };
	struct lender guest = guest_make("/lend-a", LENT), store = store_make(&guest, LENT);

	lent = mmap(0, LENT * sizeof(*lent), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	memset(lent, 0, LENT * sizeof(*lent));
	groups_make();
	make_group(TENANTS "a/", "max");
	make_group(TENANTS "b/", "max");
	client = fork_in(TENANTS "a/");
	if (!client)
		for (;;)
			pause();
	within(DAEMON, store_fill, &store);
	charged(TENANTS "a/memory.current", LENT, "lent");
	within(TENANTS "b/", guest_fill, &guest);
	charged(TENANTS "b/memory.current", LENT, "a file of another's");
	within(DAEMON, guest_join, &guest);
	charged(TENANTS "a/memory.current", LENT, "joined");
	CHECK(number(TENANTS "b/memory.current") < (long)(LENT / 20 * PAGE));
	within(DAEMON, store_cut, &store);
	charged(TENANTS "a/memory.current", LENT, "recalled");
	within(DAEMON, store_copy, &store);
	charged(TENANTS "a/memory.current", LENT + LENT / 2, "made like others");
	within(DAEMON, store_end, &store);
	charged(TENANTS "a/memory.current", LENT, "all recalled");
	/* Each page that is written is its writer's. */
	within(TENANTS "b/", guest_fill, &guest);
	charged(TENANTS "b/memory.current", LENT, "written");
	CHECK(number(TENANTS "a/memory.current") < (long)(LENT / 20 * PAGE));
	CHECK(!path_write(TENANTS "a/memory.max", "16M"));
	within(DAEMON, store_limit, &store);
	CHECK(number(TENANTS "a/memory.current") <= 16 << 20 && number(DAEMON "memory.current") < (long)(LENT / 20 * PAGE));
	CHECK(waitpid(client, 0, WNOHANG) == 0 && !path_number(TENANTS "a/memory.events", "oom_kill"));
	end(client);
	area_close(&store, 0);
	area_close(&guest, "/lend-a");
	munmap(lent, LENT * sizeof(*lent));
	CHECK(!rmdir(TENANTS "a") && !rmdir(TENANTS "b"));
	groups_end();
}

/* Takes what room the client's group has, and gives it back, again and again. */
static void store_churn(struct lender *store)
{
	while (!sh->stop) {
		for (uint32_t i = 0; i < store->f.pages && !slot_make(store, i, client);)
			i++;
		store_end(store);
	}
}

/* There is room for a copy that the daemon makes, and others take it first: nobody is killed. */
static void memcg_race(void)
{
	struct lender guest = guest_make("/lend-a", 8), store = store_make(&guest, 64);
	struct file f = file_make(2048);
	char limit[32];
	pid_t churn = 0;
	long max;
	int error;

	groups_make();
	make_group(TENANTS "a/", "max");
	merge_tenant(f, TENANTS "a/");
	waitpid(merger, &error, 0);
	CHECK(!error);
	client = tenant;
	max = number(TENANTS "a/memory.current");
	while (describe(f.id).merged_pages && !sh->bad) {
		snprintf(limit, sizeof(limit), "%ld", max += 32 * PAGE);
		CHECK(!path_write(TENANTS "a/memory.max", limit));
		churn = churn ?: fork_in(DAEMON);
		if (!churn) {
			store_churn(&store);
			_exit(0);
		}
		error = plain_by_daemon(f);
		CHECK(!error || error == ENOMEM);
	}
	end(churn);
	CHECK(waitpid(tenant, 0, WNOHANG) == 0 && !path_number(TENANTS "a/memory.events", "oom_kill"));
	CHECK(pairs_hold(f));
	end(tenant);
	close(f.fd);
	area_close(&store, 0);
	area_close(&guest, "/lend-a");
	CHECK(!rmdir(TENANTS "a"));
	groups_end();
}

static long figure(const char *name)
{
	/* Processors count by themselves, and tell by and by. */
	path_write("/proc/sys/vm/stat_refresh", "1");
	return path_number("/proc/meminfo", name);
}

/* Frames are counted as tmpfs's pages are, and no more when they have gone. */
static void figures(void)
{
	static const char *names[] = { "Shmem", "Cached" };
	struct file f = file_make(4096);
	long before[2], merged[2], frames = stats().frames;

	for (int i = 0; i < 2; i++)
		before[i] = figure(names[i]);
	sh->checks = f.pages;
	write_pairs(f);
	merge_pairs(f);
	frames = stats().frames - frames;
	for (int i = 0; i < 2; i++)
		merged[i] = figure(names[i]);
	close(f.fd);
	CHECK(frames == (long)f.pages / 2);
	for (int i = 0; i < 2; i++) {
		printf("    %s: %ld kB before, %ld with %ld frames, %ld after\n", names[i], before[i], merged[i], frames, figure(names[i]));
		CHECK(labs(merged[i] - before[i] - frames * 4) <= 256 && labs(figure(names[i]) - before[i]) <= 256);
	}
}

const struct test tenant_tests[] = { { "memcg", memcg }, { "memcg_lent", memcg_lent },
				    { "memcg_left", memcg_left }, { "memcg_runs", memcg_runs },
				    { "memcg_room", memcg_room }, { "memcg_rest", memcg_rest },
				    { "memcg_far", memcg_far }, { "memcg_race", memcg_race }, { "figures", figures },
				    { "memcg_cache", memcg_cache }, { "memcg_debt", memcg_debt },
				    { "memcg_turns", memcg_turns }, { "memcg_stuck", memcg_stuck }, { "memcg_high", memcg_high },
				    { "memcg_common", memcg_common }, { "memcg_settled", memcg_settled },
				    { "memcg_version", memcg_version }, { 0 } };
