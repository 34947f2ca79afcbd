// SPDX-License-Identifier: GPL-2.0
/*
 * A worker of the fuzzer of accounts: what it knows of its pages, its files, and its life.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fuzz-accounts-worker.h"

struct hand me;
char buf[MOST * PAGE] __attribute__((aligned(4096)));

static const int weights[OPS] = { 40, 60, 30, 20, 20, 10, 6, 3, 4, 3, 2, 1, 3, 3, 4 };

uint64_t some(uint64_t below)
{
	return rnd(&me.r, below);
}

/* What others have too, mostly: some contents many pages have, and many contents some pages. */
static uint64_t content(void)
{
	uint64_t k = some(20);

	return k < 6 ? some(8) : k < 18 ? 100 + some(600) : me.r | 1ull << 63;
}

/* ---- the model ------------------------------------------------------------------------ */

struct model *model(const struct range *g, uint32_t i)
{
	uint32_t of = g->file ? SHARED_PAGES + me.number % WORKERS * OWN_PAGES : 0;

	return &w->pages[me.tenant][of + g->first + i];
}

char *there(const struct range *g)
{
	return me.map[g->file] + g->first * PAGE;
}

/* Pages that this worker alone changes. */
bool pick(struct range *g, uint32_t most)
{
	g->file = some(2);
	g->n = 1 + some(most);
	if (!g->file) {
		uint32_t k = some(BLOCK);

		g->first = (some(SHARED_PAGES / BLOCK / WORKERS) * WORKERS + me.number % WORKERS) * BLOCK + k;
		g->n = g->n < BLOCK - k ? g->n : BLOCK - k;
		return true;
	}
	if (!w->own[me.number])
		return false;
	g->first = some(w->own[me.number]);
	g->n = g->n < w->own[me.number] - g->first ? g->n : w->own[me.number] - g->first;
	return true;
}

/* Whether the mount surely has room, also for what its workers are just about to have. */
static bool room(void)
{
	uint32_t used = 0;

	for (uint32_t i = 0; i < TENANT_PAGES; i++)
		used += w->pages[me.tenant][i].here != HERE_NO || w->pages[me.tenant][i].looked;
	return used + 2 * WORKERS * MOST < w->size[me.tenant];
}

/* The mount's other worker may give much back in the midst of a call: so, before it, too. */
void look_for_room(void)
{
	me.room = room();
}

void change(const struct range *g, const char *deed, int what)
{
	look_for_room();
	for (uint32_t i = 0; i < g->n; i++) {
		struct model *p = model(g, i);

		p->will = what == SAME ? p->is : what == HOLES ? 0 : content();
		p->deed = deed;
		p->round = w->round;
		p->looked = false;
		if (what == HOLES && p->here == HERE_YES)
			p->here = HERE_MAYBE;
		__atomic_add_fetch(&p->version, 1, 5);
	}
	w->pending[me.number] = *g;
	__atomic_store_n(&w->active[me.number], true, 5);
}

void changed(const struct range *g, int here)
{
	for (uint32_t i = 0; i < g->n; i++) {
		struct model *p = model(g, i);

		p->is = p->will;
		p->here = here;
		__atomic_add_fetch(&p->version, 1, 5);
	}
	__atomic_store_n(&w->active[me.number], false, 5);
}

void wrong(const struct range *g, uint32_t i, const char *how, const char *seen)
{
	struct model *p = model(g, i);

	BAD("tenant %d, worker %d: page %u of file %d is wrong by %s: %016lx for content %lx; before: %s in round %d, now %d%s", me.tenant,
	    me.number, g->first + i, g->file, how, *(long *)seen, (long)p->is, p->deed, p->round, w->round,
	    holds(seen, 0) ? " (zeros)" : "");
}

/* ---- what may be refused ---------------------------------------------------------------- */

/*
 * A call or a fault has failed. tmpfs fails for want of room or memory, and never at a page that is
 * there. What others have committed is no reason: a file's length is committed, too.
 */
void refused(const struct range *g, uint32_t i, const char *what, int error)
{
	struct model *p = model(g, i);
	bool tight = w->tight == me.tenant;

	if (w->faults)
		return;
	if (error == ENOMEM ? tight : p->here != HERE_YES && (tight || !me.room || !room()))
		return;
	BAD("tenant %d: %s of page %u of file %d, which is %sthere, is refused (%s)%s; before: %s in round %d, now %d", me.tenant, what,
	    g->first + i, g->file, p->here == HERE_YES ? "" : p->here == HERE_NO ? "not " : "perhaps ",
	    error == EFAULT ? "SIGBUS" : strerror(error), p->here == HERE_YES ? "" : ", and the mount has room", p->deed, p->round,
	    w->round);
}

static bool each_old_or_new(const char *seen, uint64_t is, uint64_t will)
{
	char old[PAGE], new[PAGE];

	fill(old, is);
	fill(new, will);
	for (uint32_t i = 0; i < PAGE; i++)
		if (seen[i] != old[i] && seen[i] != new[i])
			return false;
	return true;
}

/*
 * A call was refused, or its process killed. What is refused changes nothing; `half`: it may have
 * begun.
 */
void settle(const struct range *g, bool half)
{
	may_fail(false);
	for (uint32_t i = 0; i < g->n; i++) {
		struct model *p = model(g, i);
		long got, tries = 0;

		memset(buf, 0, PAGE);
		while ((got = pread(me.fd[g->file], buf, PAGE, (g->first + i) * PAGE)) < 0 && tries++ < 2000)
			usleep(1000);
		if (got < 0)
			BAD("page %u of file %d cannot be read", g->first + i, g->file);
		if (holds(buf, p->is)) {
			;
		} else if (!half) {
			wrong(g, i, "a refused call", buf);
		} else if (holds(buf, p->will)) {
			p->is = p->will;
		} else {
			if (!each_old_or_new(buf, p->is, p->will))
				wrong(g, i, "a call that was ended", buf);
			if (fallocate(me.fd[g->file], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (g->first + i) * PAGE, PAGE))
				BAD("punch");
			p->is = 0;
			p->here = HERE_MAYBE;
		}
		/* Where a call began, there may be a page now. */
		if (p->here == HERE_NO)
			p->here = HERE_MAYBE;
		if (p->version & 1)
			__atomic_add_fetch(&p->version, 1, 5);
	}
	__atomic_store_n(&w->active[me.number], false, 5);
}

void map_file(int file)
{
	uint32_t pages = file ? OWN_PAGES : SHARED_PAGES;

	me.map[file] = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, me.fd[file], 0);
	if (me.map[file] == MAP_FAILED)
		BAD("mmap");
	w->map[me.number][file] = me.map[file];
	w->fd[me.number][file] = me.fd[file];
	w->pid[me.number] = getpid();
}

/* ---- files ------------------------------------------------------------------------------ */

/* As root: which of the mount's files it is. */
static void know(int file)
{
	struct pageonefs_file f[16];
	struct pageonefs_list l = { .files = (uintptr_t)f, .room = 16 };
	struct stat st;

	fstat(me.fd[file], &st);
	me.id[file] = 0;
	w->inode[me.tenant][file ? 1 + me.number % WORKERS : 0] = st.st_ino;
	do {
		if (ioctl(me.control, PAGEONEFS_LIST, &l))
			BAD("list");
		for (uint32_t i = 0; i < l.filled; i++) {
			if (f[i].inode == st.st_ino)
				me.id[file] = f[i].id;
			l.after = f[i].id;
		}
	} while (l.filled && !me.id[file]);
	if (!me.id[file])
		BAD("no id of inode %lu", (long)st.st_ino);
}

/* The worker's own file begins anew, all holes. */
long renew(void)
{
	struct range all = { 1, 0, OWN_PAGES };
	char path[64];

	may_fail(false);
	change(&all, "new file", HOLES);
	if (me.map[1])
		munmap(me.map[1], OWN_PAGES * PAGE);
	if (me.fd[1] > 0)
		close(me.fd[1]);
	changed(&all, HERE_NO);
	mount_path(path, me.tenant);
	me.fd[1] = open(path, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	if (me.fd[1] < 0 || ftruncate(me.fd[1], OWN_PAGES * PAGE))
		BAD("a file");
	w->own[me.number] = OWN_PAGES;
	map_file(1);
	become(0);
	know(1);
	become(1000 + me.tenant);
	return 0;
}

/* All pages are right, by read(2): holes stay holes. */
static void check_all(void)
{
	struct range g = { .n = 1 };

	for (g.file = 0; g.file < 2; g.file++)
		for (g.first = 0; g.first < (g.file ? w->own[me.number] : SHARED_PAGES); g.first++) {
			if (!g.file && (int)(g.first / BLOCK % WORKERS) != me.number % WORKERS)
				continue;
			memset(buf, 0, PAGE);
			if (pread(me.fd[g.file], buf, PAGE, g.first * PAGE) != (long)PAGE)
				BAD("a pread at the end");
			else if (!holds(buf, model(&g, 0)->is))
				wrong(&g, 0, "a pread at the end", buf);
		}
}

/* No growth of the stack is refused where all is committed. */
static void grow_stack(void)
{
	volatile char room[256 << 10];

	for (uint32_t i = 0; i < sizeof(room); i += PAGE)
		room[i] = 1;
}

void worker_runs(int number, uint64_t seed, bool first)
{
	char path[64], group[16];
	int sum = 0, op;

	me.number = number;
	me.tenant = number / WORKERS;
	me.r = seed;
	snprintf(group, sizeof(group), "t%d", me.tenant);
	if (group_write(group, "cgroup.procs", getpid()))
		BAD("a cgroup");
	mount_path(path, me.tenant);
	me.control = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	strcat(path, "/shared");
	me.fd[0] = open(path, O_RDWR | O_CLOEXEC);
	if (me.control < 0 || me.fd[0] < 0)
		BAD("open %s", path);
	know(0);
	if (setresuid(1000 + me.tenant, 1000 + me.tenant, 0))
		BAD("setresuid");
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	catch_faults();
	grow_stack();
	map_file(0);
	/* What the one before has left undone. Its own file has gone. */
	if (w->active[number] && !w->pending[number].file)
		settle(&w->pending[number], true);
	w->active[number] = false;
	for (uint32_t i = 0; i < OWN_PAGES; i++) {
		struct range g = { 1, i, 1 };

		model(&g, 0)->version &= ~1u;
	}
	renew();
	for (op = 0; op < OPS; op++)
		sum += weights[op];
	/* Nothing is there yet when it is first looked. */
	go_on(number);
	/* All that it has. */
	for (int file = 0; file < 2; file++)
		for (uint32_t i = 0; first && i < (file ? OWN_PAGES : SHARED_PAGES); i++) {
			struct range g = { file, i, 1 };

			if (!file && (int)(i / BLOCK % WORKERS) != number % WORKERS)
				continue;
			change(&g, "first store", CONTENTS);
			fill(buf, model(&g, 0)->will);
			if (copy_guarded(there(&g), buf, PAGE))
				BAD("a first store");
			changed(&g, HERE_YES);
		}
	while (go_on(number)) {
		may_fail(true);
		int k = some(sum);

		for (op = 0; k >= weights[op]; op++)
			k -= weights[op];
		long ret = do_one(op);

		may_fail(false);
		__atomic_add_fetch(ret < 0 ? &w->failed[op] : &w->done[op], 1, __ATOMIC_RELAXED);
	}
	check_all();
	fflush(stdout);
	_exit(0);
}
