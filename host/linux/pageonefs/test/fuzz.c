// SPDX-License-Identifier: GPL-2.0
/*
 * pageonefs-fuzz [-s SEED] [-t SECONDS] [-f] [-p] [-q] [-k]: programs that do to files, at
 * random, whatever programs can do, while their pages merge; and a model that knows each byte.
 *
 * Eight owners, in four processes, share three files. A page has one owner at any time, who alone
 * changes it, and who keeps what it must hold in memory that all share. Before a change an owner
 * notes what the range will hold: so a call that fails half way, or a process that is killed in it,
 * leaves bytes of which each must be either. The others look at a page and at its version, and know
 * what it must hold when the version stays. Beside them run two processes that do as a daemon does
 * (fuzz-daemon.c). This one kills processes and starts them again, reclaims memory, and turns what
 * switches there are.
 *
 * A seed repeats what each owner does, but not when. -f: allocations fail, as the guest's init has
 * set it up. -p: memory breaks. -q: no switches of the machine are turned. -k: goes on after a
 * finding. Needs the file system at /mnt, newly loaded, and root.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"

static const char *const names[OPS] = {
	"store", "write", "check", "look at others'", "fallocate", "truncate", "advise", "map", "unmap", "protect", "remap", "fork",
	"disk to mapping", "mapping to disk", "vmsplice", "splice", "process_vm_writev", "private mapping", "new file", "names",
	"seek", "lock and bind",
};
/* How often, of all these together. */
static const int weights[OPS] = { 40, 20, 40, 40, 14, 6, 24, 6, 4, 4, 4, 2, 6, 4, 4, 10, 6, 12, 2, 2, 3, 4 };
static const char *const made[] = { "equal", "wrong", "moves", "stale", "wild", "made plain", "poisoned", "rounds of harvests", "lent" };

void work(struct me *me, int rounds)
{
	int sum = 0, op, k;

	for (op = 0; op < OPS; op++)
		sum += weights[op];
	for (; rounds && !sh->stop; rounds--) {
		k = rnd(me, sum);
		for (op = 0; k >= weights[op]; op++)
			k -= weights[op];
		bool calls = op == OP_PWRITE || op == OP_CHECK || op == OP_FALLOCATE || op == OP_TRUNCATE || op == OP_SEEK ||
			     (op >= OP_DISK_IN && op <= OP_VM_WRITE) || op == OP_RENEW || op == OP_NAMES;
		long ret = calls ? op_calls(me, op) : op_mappings(me, op);

		__atomic_add_fetch(ret < 0 ? &w->failed[op] : &w->done[op], 1, __ATOMIC_RELAXED);
		if (sh->bad && !w->keep)
			break;
	}
}

struct start {
	int owner;
	uint64_t seed;
};

static void *thread(void *arg)
{
	struct start *s = arg;
	struct me *me = calloc(1, sizeof(*me));

	me_open(me, s->owner, s->seed);
	/* What a killed one before has left undone. Its own file is gone. */
	if (w->pending[s->owner].active && w->pending[s->owner].file >= SHARED)
		w->pending[s->owner].active = 0;
	settle(me);
	may_fail(me, true);
	work(me, -1);
	check_all(me);
	return NULL;
}

static pid_t start(int which, uint64_t seed)
{
	pthread_t t[THREADS];
	struct start s[THREADS];
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid) {
		setpgid(pid, pid);
		return pid;
	}
	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	catch_faults();
	if (which == OWNERS / THREADS)
		daemon_harvests(seed);
	if (which > OWNERS / THREADS)
		daemon_merges(seed);
	for (int i = 0; i < THREADS; i++) {
		s[i] = (struct start){ which * THREADS + i, seed };
		if (pthread_create(&t[i], 0, thread, &s[i]))
			BAD("a thread");
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], 0);
	_exit(0);
}

/* Ends a process, and those that it made. */
static void end(pid_t pid)
{
	int status;

	kill(-pid, SIGKILL);
	while (waitpid(-pid, &status, 0) > 0)
		;
}

/* What a machine does beside: memory gets scarce, and is moved; switches are turned. */
static void disturb(struct me *me)
{
	static const char *const huge[] = { "never", "always", "force", "within_size" };
	char value[32];

	switch (rnd(me, w->quiet ? 6 : 12)) {
	case 0:
	case 1:
	case 2:
	case 3:
		snprintf(value, sizeof(value), "%luK", (long)(64 << rnd(me, 8)));
		path_write("/sys/fs/cgroup/fuzz/memory.reclaim", value);
		break;
	case 4:
		path_write("/proc/sys/vm/compact_memory", "1");
		break;
	case 5:
		path_write("/proc/sys/vm/drop_caches", "3");
		break;
	case 6:
		snprintf(value, sizeof(value), "%lu", rnd(me, 2) ? 65536 : 2 + rnd(me, 20));
		path_write(PARAMETERS "max_users", value);
		break;
	case 7:
		path_write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", rnd(me, 2) ? "never" : huge[rnd(me, 4)]);
		break;
	case 8:
		mount("none", MOUNT, 0, MS_REMOUNT, rnd(me, 4) ? "huge=advise" : "huge=never");
		break;
	}
}

static void prepare(void)
{
	char pid[16], path[64];

	mkdir(MOUNT "/fuzz", 0755);
	for (int f = 0; f < SHARED; f++) {
		snprintf(path, sizeof(path), MOUNT "/fuzz/%d", f);
		int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);

		if (fd < 0 || ftruncate(fd, PAGES * PAGE))
			BAD("%s", path);
		if (f == 0 && id_of(fd) != 1)
			BAD("the first file of the module is not this one: load it anew");
		close(fd);
		w->size[f] = PAGES * PAGE;
	}
	int fd = open("/dev/slow", O_RDONLY);

	if (fd < 0 || pread(fd, w->disk, DISK, 0) != (long)DISK)
		printf("    SKIPPED direct I/O: there is no slow disk\n");
	close(fd);
	path_write(PARAMETERS "pin_seconds", "100000");
	if (mount("none", MOUNT, 0, MS_REMOUNT, "huge=advise"))
		BAD("huge pages");
	mkdir("/sys/fs/cgroup/fuzz", 0755);
	snprintf(pid, 16, "%d", getpid());
	if (path_write("/sys/fs/cgroup/fuzz/cgroup.procs", pid))
		printf("    SKIPPED memory pressure: there are no cgroups\n");
	if (system("mkswap /dev/swap > /dev/null && swapon /dev/swap"))
		printf("    SKIPPED swap: there is no disk for it\n");
}

static void finish(void)
{
	char path[64];

	for (int op = 0; op < OPS; op++)
		printf("    %-18s %8ld done %6ld refused\n", names[op], w->done[op], w->failed[op]);
	for (int i = 0; i < 9; i++)
		printf("    %s %ld%s", made[i], w->made[i], i < 8 ? "," : "\n");
	printf("    changes seen %ld, processes killed %ld, pages swapped out %ld, huge pages mapped %ld, split %ld\n",
	       w->dirty_checks, w->kills, path_number("/proc/vmstat", "pswpout"),
	       path_number("/proc/vmstat", "thp_file_mapped"), path_number("/proc/vmstat", "thp_split_page"));
	say("fuzz");
	path_write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "never");
	mount("none", MOUNT, 0, MS_REMOUNT, "huge=never");
	path_write(PARAMETERS "max_users", "65536");
	for (int f = 0; f < SHARED; f++) {
		snprintf(path, sizeof(path), MOUNT "/fuzz/%d", f);
		unlink(path);
	}
	if (system("rm -rf " MOUNT "/fuzz; swapoff /dev/swap 2>/dev/null"))
		return;
	/* Inodes go after a while. */
	for (int i = 0; i < 100 && stats().frames; i++)
		usleep(50000);
	if (stats().frames || stats().merged_pages)
		BAD("%lu frames are left", (long)stats().frames);
}

int main(int argc, char **argv)
{
	enum { ALL = OWNERS / THREADS + 2 };
	uint64_t seed = time(0), generation = 0;
	double seconds = 60, kill_at;
	struct rlimit unlimited = { RLIM_INFINITY, RLIM_INFINITY };
	struct me *me = calloc(1, sizeof(*me));
	pid_t pids[ALL];
	int c, status;

	setvbuf(stdout, 0, _IOLBF, 0);
	sh = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	w = mmap(0, sizeof(*w), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	while ((c = getopt(argc, argv, "s:t:fpkq")) != -1) {
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
		case 'p':
			w->poison = true;
			break;
		case 'k':
			w->keep = true;
			break;
		case 'q':
			w->quiet = true;
			break;
		default:
			return 2;
		}
	}
	printf("seed %lu\n", (long)seed);
	setrlimit(RLIMIT_MEMLOCK, &unlimited);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	me->r = mix(seed ^ 0x77);
	me->fail = -1;
	prepare();
	for (int i = 0; i < ALL; i++)
		pids[i] = start(i, mix(seed + i + (generation++ << 32)));
	kill_at = now() + 3;
	for (double stop = now() + seconds; now() < stop && (!sh->bad || w->keep);) {
		usleep(rnd(me, 300000));
		disturb(me);
		for (int i = 0; i < ALL; i++)
			if (waitpid(pids[i], &status, WNOHANG) == pids[i]) {
				if (!sh->bad)
					BAD("process %d ended with %x", i, status);
				pids[i] = start(i, mix(seed + i + (generation++ << 32)));
			}
		if (now() > kill_at) {
			int i = rnd(me, ALL);

			end(pids[i]);
			w->kills++;
			pids[i] = start(i, mix(seed + i + (generation++ << 32)));
			kill_at = now() + 1 + rnd(me, 5);
		}
	}
	sh->stop = 1;
	for (int i = 0; i < ALL; i++)
		if (waitpid(pids[i], &status, 0) != pids[i] || status)
			BAD("process %d ended with %x", i, status);
	while (waitpid(-1, &status, 0) > 0)
		;
	finish();
	printf("RESULT %d passed, %d failed\n", !sh->bad, !!sh->bad);
	return !!sh->bad;
}
