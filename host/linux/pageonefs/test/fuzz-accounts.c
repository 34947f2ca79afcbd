// SPDX-License-Identifier: GPL-2.0
/*
 * pageonefs-accounts [-s SEED] [-t SECONDS] [-f]: tenants whose pages merge, and who pays for
 * them.
 *
 * Three tenants have a mount and a cgroup each, two of them one domain. Each has two workers, which
 * write, read, punch, truncate and allocate pages of a file that they share and of one of their
 * own, and fork readers. A worker knows what its pages hold, and whether they are there: a page
 * that is there never fails, whatever others do; any other only where tmpfs would fail. A daemon,
 * in a cgroup of its own, merges all (fuzz-accounts-daemon.c).
 *
 * Time goes in rounds. Each has limits of its own: of mounts, exactly as long as their files or
 * full; of a cgroup; of what may be committed, while another process takes the rest. Between two
 * rounds all wait, and each account is held against a walk of all pages (fuzz-accounts-check.c).
 *
 * A seed repeats what each process does, but not when. -f: allocations fail, as the guest's init
 * has set it up. Needs the module and root.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fuzz-accounts.h"

#define COMMIT	"/proc/sys/vm/overcommit_"

static const char *const names[OPS] = {
	"store", "touch", "load", "look at others'", "write", "read", "punch", "punch unless pinned", "allocate", "zero", "truncate",
	"new file", "fork readers", "remap", "private mapping",
};
static const char *const did[DIDS] = { "merges", "wrong pairs", "files made plain", "harvests", "refused punches" };

struct world *w;
static uint64_t seed, r, generation;
static pid_t pids[PROCESSES], hog;
static int fail = -1;
static char scene[200];

/* ---- what processes share --------------------------------------------------------------- */

void mount_path(char *path, int tenant)
{
	sprintf(path, "/tmp/accounts%d", tenant);
}

/* A file of a cgroup of ours; a value of -1 is no limit. */
int group_write(const char *group, const char *file, long value)
{
	char path[128], text[32];

	snprintf(path, sizeof(path), GROUPS "/%s/%s", group, file);
	snprintf(text, sizeof(text), value < 0 ? "max" : "%ld", value);
	return path_write(path, text);
}

static void write_number(const char *path, long value)
{
	char text[32];

	snprintf(text, sizeof(text), "%ld", value);
	if (path_write(path, text))
		BAD("%s", path);
}

/* This may lack memory, too. */
void become(uid_t user)
{
	while (seteuid(user))
		if (errno != ENOMEM)
			BAD("seteuid");
}

/* From now on allocations for this process may fail, or not. It takes root to say so. */
void may_fail(bool on)
{
	uid_t user = geteuid();

	if (fail < 0)
		return;
	become(0);
	while (pwrite(fail, on ? "1" : "0", 1, 0) != 1)
		if (errno != ENOMEM)
			BAD("make-it-fail");
	become(user);
}

/* False at the end. Waits where all have to. */
bool go_on(int process)
{
	while (__atomic_load_n(&w->parking, 5) && !sh->stop) {
		__atomic_store_n(&w->parked[process], w->round, 5);
		usleep(2000);
	}
	return !sh->stop && !sh->bad;
}

/* ---- processes -------------------------------------------------------------------------- */

static void start(int i, bool first)
{
	uint64_t of = mix(seed + i + (generation++ << 32));

	fflush(stdout);
	__atomic_store_n(&w->parked[i], -1, 5);
	pids[i] = fork();
	if (pids[i]) {
		setpgid(pids[i], pids[i]);
		return;
	}
	setpgid(0, 0);
	fail = w->faults ? open("/proc/thread-self/make-it-fail", O_WRONLY | O_CLOEXEC) : -1;
	if (i == DAEMON)
		daemon_runs(of);
	worker_runs(i, of, first);
}

/* Ends a process, and those that it made. */
static void end(int i)
{
	int status;

	if (pids[i] <= 0)
		return;
	kill(-pids[i], SIGKILL);
	while (waitpid(-pids[i], &status, 0) > 0)
		;
	pids[i] = 0;
	/* Its own file is gone. */
	for (uint32_t k = 0; i < HANDS && k < OWN_PAGES; k++)
		w->pages[i / WORKERS][SHARED_PAGES + i % WORKERS * OWN_PAGES + k].here = HERE_NO;
}

/* Only a cgroup that is short of memory loses processes. */
static void ended(int i, int status)
{
	if (!sh->bad && !(status == SIGKILL && (w->faults || (i < HANDS && w->tight == i / WORKERS))))
		BAD("process %d ended with %x", i, status);
	w->kills++;
	end(i);
}

static void park(void)
{
	double late = now() + 300;
	int status;

	w->round++;
	__atomic_store_n(&w->parking, 1, 5);
	for (int i = 0; i < PROCESSES; i++)
		while (pids[i] && __atomic_load_n(&w->parked[i], 5) != w->round) {
			if (waitpid(pids[i], &status, WNOHANG) == pids[i])
				ended(i, status);
			if (now() > late) {
				BAD("process %d does not come back", i);
				path_write("/proc/sysrq-trigger", "w");
				return;
			}
			usleep(1000);
		}
}

/* ---- rounds ----------------------------------------------------------------------------- */

static int remount(int tenant, uint32_t pages)
{
	char path[64], options[32];

	mount_path(path, tenant);
	snprintf(options, sizeof(options), "size=%uk", pages * 4);
	return mount("none", path, NULL, MS_REMOUNT, options);
}

/* Commits all that may be committed, again and again. */
static void hog_runs(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (setresuid(65534, 65534, 65534))
		_exit(1);
	for (;;) {
		for (uint64_t size = 64ul << 20; size >= PAGE; size /= 2)
			while (w->commit && mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
				;
		usleep(3000);
	}
}

static void commit_begin(void)
{
	long committed = path_number("/proc/meminfo", "Committed_AS") - path_number("/proc/meminfo", "SwapTotal") + 2048;

	fflush(stdout);
	hog = fork();
	if (!hog)
		hog_runs();
	write_number("/proc/sys/vm/user_reserve_kbytes", 0);
	write_number("/proc/sys/vm/admin_reserve_kbytes", 0);
	write_number(COMMIT "kbytes", committed > 1 ? committed : 1);
	write_number(COMMIT "memory", 2);
	w->commit = true;
}

static void commit_end(void)
{
	w->commit = false;
	write_number(COMMIT "memory", 0);
	write_number(COMMIT "ratio", 50);
	kill(hog, SIGKILL);
	waitpid(hog, NULL, 0);
}

/* What the next round is like. */
static void round_begin(const long *used)
{
	char group[16], *at = scene;

	at += sprintf(at, "round %d:", w->round);
	for (int t = 0; t < TENANTS; t++) {
		uint32_t size, low = used[t] > 1 ? used[t] : 1;

		switch (rnd(&r, 5)) {
		case 0:
			size = ROOMY;
			break;
		case 1:
		case 2:
			size = TENANT_PAGES;
			break;
		case 3:
			size = low + rnd(&r, 8);
			break;
		default:
			size = low;
		}
		if (used[t] > 1 && !rnd(&r, 3) && (!remount(t, used[t] - 1) || errno != EINVAL))
			BAD("a mount gets smaller than its files");
		if (remount(t, size))
			BAD("remount, size %u", size);
		else
			w->size[t] = size;
		at += sprintf(at, " size %u (%ld used)", size, used[t]);
	}
	w->tight = rnd(&r, 4) ? -1 : (int)rnd(&r, TENANTS);
	if (w->tight >= 0) {
		long max;

		sprintf(group, "t%d", w->tight);
		max = group_stat(group, "memory.current");
		max = w->swap_pages && rnd(&r, 2) ? max - max / 8 : max + (128 << 10) + (long)rnd(&r, 1 << 20);
		at += sprintf(at, ", tenant %d is short of memory", w->tight);
		group_write(group, "memory.max", max);
	}
	w->plain = !rnd(&r, 6);
	if (w->plain)
		at += sprintf(at, ", files become plain");
	if (!rnd(&r, 3)) {
		commit_begin();
		sprintf(at, ", all is committed");
	}
}

static void round_end(void)
{
	char group[16];

	if (w->commit)
		commit_end();
	if (w->tight >= 0) {
		sprintf(group, "t%d", w->tight);
		group_write(group, "memory.max", -1);
	}
}

/* All is held against the walk: what lags behind, for a while. */
static void look(long *used)
{
	const char *wrong;

	for (int tries = 0; (wrong = accounts_wrong(pids, used)) && tries < 80; tries++) {
		if (tries % 4 == 1)
			accounts_drain();
		usleep(100000);
	}
	if (wrong)
		BAD("%s", wrong);
	models_agree();
}

/* ---- the start and the end -------------------------------------------------------------- */

static void prepare(void)
{
	char path[64], options[96];

	mkdir(GROUPS, 0755);
	if (path_write(GROUPS "/cgroup.subtree_control", "+memory"))
		BAD("there are no cgroups");
	for (int t = 0; t < TENANTS; t++) {
		int fd;

		snprintf(path, sizeof(path), GROUPS "/t%d", t);
		mkdir(path, 0755);
		mount_path(path, t);
		mkdir(path, 0755);
		snprintf(options, sizeof(options), "domain=accounts%d,size=%uk,mode=0700,uid=%d", DOMAIN_OF(t), ROOMY * 4, 1000 + t);
		if (mount("none", path, "pageonefs", 0, options))
			BAD("mount %s", options);
		w->size[t] = ROOMY;
		strcat(path, "/shared");
		fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
		if (fd < 0 || ftruncate(fd, SHARED_PAGES * PAGE) || fchown(fd, 1000 + t, -1))
			BAD("%s", path);
		close(fd);
	}
	mkdir(GROUPS "/daemon", 0755);
	w->tight = -1;
	w->max_users = 16u << rnd(&r, 4);
	write_number(PARAMETERS "max_users", w->max_users);
	path_write(PARAMETERS "pin_seconds", "100000");
	if (!system("mkswap /dev/swap > /dev/null && swapon /dev/swap"))
		w->swap_pages = path_number("/proc/meminfo", "SwapTotal") / 4;
	else
		printf("    SKIPPED swap: there is no disk for it\n");
}

static void finish(void)
{
	const char *left;
	char path[64];
	int status;

	for (int op = 0; op < OPS; op++)
		printf("    %-19s %8ld done %6ld refused\n", names[op], w->done[op], w->failed[op]);
	for (int i = 0; i < DIDS; i++)
		printf("    %s %ld%s", did[i], w->did[i], i < DIDS - 1 ? "," : "\n");
	printf("    fuzz: %d rounds, %ld processes killed, max_users %u, pages swapped out %ld\n", w->round, w->kills, w->max_users,
	       path_number("/proc/vmstat", "pswpout"));
	sh->stop = 1;
	for (int i = 0; i < PROCESSES; i++)
		if (pids[i] && (waitpid(pids[i], &status, 0) != pids[i] || status))
			BAD("process %d ended with %x", i, status);
	for (int t = 0; t < TENANTS; t++) {
		mount_path(path, t);
		strcat(path, "/shared");
		unlink(path);
	}
	if (system("swapoff /dev/swap 2>/dev/null") < 0)
		BAD("swapoff");
	for (int tries = 0; (left = accounts_left()) && tries < 100; tries++) {
		if (tries % 8 == 1)
			accounts_drain();
		usleep(100000);
	}
	/* A finding has left things undone. */
	if (left && !sh->bad)
		BAD("at the end %s", left);
	for (int t = 0; t < TENANTS; t++) {
		mount_path(path, t);
		umount2(path, MNT_DETACH);
	}
}

int main(int argc, char **argv)
{
	double seconds = 60, stop;
	long used[TENANTS];
	int c, status;

	setvbuf(stdout, 0, _IOLBF, 0);
	sh = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	w = mmap(0, sizeof(*w), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	/* Nobody's cgroup pays for these. */
	if (mlock(sh, PAGE) || mlock(w, sizeof(*w)))
		BAD("mlock");
	seed = time(0);
	while ((c = getopt(argc, argv, "s:t:f")) != -1) {
		switch (c) {
		case 's':
			seed = strtoull(optarg, 0, 0);
			break;
		case 't':
			seconds = atof(optarg);
			break;
		case 'f':
			w->faults = true;
			break;
		default:
			return 2;
		}
	}
	printf("seed %lu\n", (long)seed);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	r = mix(seed ^ 0x77);
	prepare();
	accounts_begin(false);
	w->parking = 1;
	for (int i = 0; i < PROCESSES; i++)
		start(i, true);
	park();
	accounts_begin(true);
	sprintf(scene, "the first round");
	stop = now() + seconds;
	do {
		double end_at = now() + 0.3 + rnd(&r, 1000) / 1e3;

		__atomic_store_n(&w->parking, 0, 5);
		while (now() < end_at && !sh->bad) {
			usleep(rnd(&r, 100000));
			/* A daemon may end in the midst. */
			if (!rnd(&r, 100))
				end(DAEMON);
			if (w->swap_pages && !rnd(&r, 3))
				group_write("", "memory.reclaim", rnd(&r, 256) * PAGE);
			else if (!rnd(&r, 20))
				path_write("/proc/sys/vm/compact_memory", "1");
		}
		park();
		round_end();
		/* In the place of those that have ended. */
		for (int i = 0; i < PROCESSES && !sh->bad; i++) {
			if (pids[i] && waitpid(pids[i], &status, WNOHANG) == pids[i])
				ended(i, status);
			if (!pids[i])
				start(i, false);
		}
		if (!sh->bad)
			park();
		if (!sh->bad)
			look(used);
		if (sh->bad)
			printf("    in %s\n", scene);
		else
			round_begin(used);
	} while (now() < stop && !sh->bad);
	round_end();
	finish();
	printf("RESULT %d passed, %d failed\n", !sh->bad, !!sh->bad);
	return !!sh->bad;
}
