// SPDX-License-Identifier: GPL-2.0
/*
 * What the workers of the fuzzer of accounts do.
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

/* ---- by mappings ------------------------------------------------------------------------ */

static long store(void)
{
	struct range g;

	if (!pick(&g, 6))
		return 0;
	for (uint32_t left = g.n; left; left--, g.first++) {
		g.n = 1;
		change(&g, "store", CONTENTS);
		fill(buf, model(&g, 0)->will);
		if (copy_guarded(there(&g), buf, PAGE)) {
			refused(&g, 0, "a store", EFAULT);
			settle(&g, true);
			return -1;
		}
		changed(&g, HERE_YES);
	}
	return 0;
}

/* Writes what is there: the page is copied, and keeps its content. */
static int touch_one(const struct range *g)
{
	uint32_t k = some(512) * 8;

	fill(buf, model(g, 0)->is);
	return copy_guarded(there(g) + k, buf + k, 8);
}

static long touch(void)
{
	struct range g;

	if (!pick(&g, 8))
		return 0;
	for (uint32_t left = g.n; left; left--, g.first++) {
		g.n = 1;
		change(&g, "touch", SAME);
		if (touch_one(&g)) {
			refused(&g, 0, "a write", EFAULT);
			settle(&g, false);
			return -1;
		}
		changed(&g, HERE_YES);
	}
	return 0;
}

static int load_one(const struct range *g, const char *how)
{
	static char seen[PAGE];

	look_for_room();
	if (copy_guarded(seen, there(g), PAGE)) {
		refused(g, 0, how, EFAULT);
		return -1;
	}
	if (!holds(seen, model(g, 0)->is))
		wrong(g, 0, how, seen);
	return 0;
}

static long load(void)
{
	struct range g;

	if (!pick(&g, 8))
		return 0;
	for (uint32_t left = g.n; left; left--, g.first++) {
		g.n = 1;
		if (load_one(&g, "a load"))
			return -1;
		if (model(&g, 0)->here == HERE_NO)
			model(&g, 0)->here = HERE_MAYBE;
	}
	return 0;
}

/* Others' pages: what they hold while their version stays. */
static long look(void)
{
	for (int n = 1 + some(16); n > 0; n--) {
		struct range g = { 0, some(SHARED_PAGES), 1 };
		struct model *p = model(&g, 0);
		uint32_t version = __atomic_load_n(&p->version, 5);
		uint64_t is = p->is;
		bool bus;

		if (version & 1 || p->here != HERE_YES)
			continue;
		bus = copy_guarded(buf, there(&g), PAGE);
		if (__atomic_load_n(&p->version, 5) != version) {
			p->looked = true;
			continue;
		}
		if (bus) {
			refused(&g, 0, "a load of another's", EFAULT);
			return -1;
		}
		if (!holds(buf, is))
			wrong(&g, 0, "a load of another's", buf);
	}
	return 0;
}

static long remap(void)
{
	int file = some(2);
	uint64_t len = (file ? OWN_PAGES : SHARED_PAGES) * PAGE;
	char *place;

	may_fail(false);
	if (some(2)) {
		munmap(me.map[file], len);
		map_file(file);
	} else {
		place = mmap(0, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (place != MAP_FAILED && mremap(me.map[file], len, len, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place)
			BAD("mremap");
		else if (place != MAP_FAILED)
			w->map[me.number][file] = me.map[file] = place;
	}
	return 0;
}

/* A private mapping: of it one page is written, and the file's is not. */
static long private(void)
{
	struct range g, one;
	char *m;
	long ret = -1;

	if (!pick(&g, 8))
		return 0;
	for (uint32_t i = 0; i < g.n; i++)
		if (model(&g, i)->here != HERE_YES)
			return 0;
	m = mmap(0, g.n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, me.fd[g.file], g.first * PAGE);
	if (m == MAP_FAILED)
		return -1;
	for (uint32_t i = 0, wrote = some(g.n); i < g.n; i++) {
		one = (struct range){ g.file, g.first + i, 1 };
		if ((i == wrote && copy_guarded(m + i * PAGE, "private", 8)) || copy_guarded(buf, m + i * PAGE, PAGE)) {
			refused(&one, 0, "a private mapping", EFAULT);
			goto out;
		}
		if (i == wrote ? strcmp(buf, "private") : !holds(buf, model(&one, 0)->is))
			wrong(&one, 0, "a private mapping", buf);
		if (i == wrote && load_one(&one, "a load beside a private mapping"))
			goto out;
	}
	ret = 0;
out:
	munmap(m, g.n * PAGE);
	return ret;
}

/* ---- readers that come and go ----------------------------------------------------------- */

/* fork(2) copies nothing of a shared mapping: each entry would be one more reference of a frame. */
static void nothing_is_copied(void)
{
	static uint64_t entry[SHARED_PAGES];
	int fd, copied = 0;

	/* Or it is root's: the worker has changed its user. */
	prctl(PR_SET_DUMPABLE, 1);
	fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (fd < 0 || pread(fd, entry, sizeof(entry), (uintptr_t)me.map[0] / PAGE * 8) != (long)sizeof(entry)) {
		if (!w->faults)
			BAD("a page map");
	} else {
		for (uint32_t i = 0; i < SHARED_PAGES; i++)
			copied += entry[i] >> 63;
	}
	if (copied)
		BAD("fork copied %d entries of a shared mapping", copied);
	close(fd);
}

/* The worker waits meanwhile: nobody changes its pages. */
static void reader(int more)
{
	struct range g;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	nothing_is_copied();
	me.r = mix(me.r ^ getpid());
	while (more && !some(2) && !fork())
		more--;
	for (int n = 200 + some(400); n > 0 && !w->parking && !sh->stop; n--) {
		if (!pick(&g, 1) || model(&g, 0)->here != HERE_YES)
			continue;
		if (some(8)) {
			load_one(&g, "a child's load");
		} else if (touch_one(&g)) {
			refused(&g, 0, "a child's write", EFAULT);
		}
	}
	while (waitpid(-1, NULL, 0) > 0)
		;
	_exit(0);
}

static long fork_readers(void)
{
	int n = 1 + some(6), status;
	long ret = 0;

	for (int i = 0; i < n; i++) {
		pid_t pid = fork();

		if (!pid)
			reader(2);
		if (pid < 0) {
			if (!w->faults && !w->commit && w->tight != me.tenant)
				BAD("fork");
			ret = -1;
		}
	}
	while (waitpid(-1, &status, 0) > 0)
		if (status && !(status == SIGKILL && w->tight == me.tenant))
			BAD("a child ended with %x", status);
	return ret;
}

/* ---- by calls --------------------------------------------------------------------------- */

static long write_some(void)
{
	struct range g, rest;
	long ret;

	if (!pick(&g, MOST))
		return 0;
	change(&g, "pwrite", CONTENTS);
	for (uint32_t i = 0; i < g.n; i++)
		fill(buf + i * PAGE, model(&g, i)->will);
	ret = pwrite(me.fd[g.file], buf, g.n * PAGE, g.first * PAGE);
	if (ret == (long)(g.n * PAGE)) {
		changed(&g, HERE_YES);
		return 0;
	}
	rest = g;
	refused(&g, ret < 0 ? 0 : ret / PAGE, "a pwrite", ret < 0 ? errno : w->tight == me.tenant ? ENOMEM : ENOSPC);
	settle(&rest, true);
	return -1;
}

static long read_some(void)
{
	struct range g;
	long ret;

	if (!pick(&g, MOST))
		return 0;
	ret = pread(me.fd[g.file], buf, g.n * PAGE, g.first * PAGE);
	if (ret < 0) {
		refused(&g, 0, "a pread", errno);
		return -1;
	}
	for (uint32_t i = 0; (i + 1) * PAGE <= (uint64_t)ret; i++)
		if (!holds(buf + i * PAGE, model(&g, i)->is))
			wrong(&g, i, "a pread", buf + i * PAGE);
	return 0;
}

static long cut(bool unpinned)
{
	struct range g;
	uint64_t held = 0;
	long ret;

	if (!pick(&g, 8))
		return 0;
	change(&g, unpinned ? "punch unless pinned" : "punch", HOLES);
	if (unpinned) {
		struct pageonefs_punch p = { .id = me.id[g.file], .start = g.first, .pages = g.n, .held = (uintptr_t)&held };

		/* As the daemon does. A reader has a page for a moment. */
		become(0);
		do
			ret = ioctl(me.control, PAGEONEFS_PUNCH, &p);
		while (!ret && held);
		become(1000 + me.tenant);
		/* A plain file is not punched so. */
		if (ret && errno == EBUSY && g.file) {
			settle(&g, false);
			return -1;
		}
	} else {
		ret = fallocate(me.fd[g.file], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, g.first * PAGE, g.n * PAGE);
	}
	if (ret) {
		if (!w->faults)
			BAD("a punch");
		settle(&g, true);
		return -1;
	}
	changed(&g, HERE_NO);
	return 0;
}

static long allocate(bool zero)
{
	struct range g;
	uint32_t i;

	if (!pick(&g, 8))
		return 0;
	change(&g, zero ? "zero range" : "allocate", SAME);
	if (zero)
		for (i = 0; i < g.n; i++)
			model(&g, i)->will = 0;
	if (!fallocate(me.fd[g.file], FALLOC_FL_KEEP_SIZE | (zero ? FALLOC_FL_ZERO_RANGE : 0), g.first * PAGE, g.n * PAGE)) {
		changed(&g, HERE_YES);
		return 0;
	}
	/* The page that there was no room for. */
	for (i = 0; i < g.n - 1 && model(&g, i)->here == HERE_YES; i++)
		;
	refused(&g, i, zero ? "a zero range" : "an allocation", errno);
	settle(&g, w->faults);
	return -1;
}

static long truncate_own(void)
{
	uint32_t old = w->own[me.number], new = some(2) ? OWN_PAGES : some(OWN_PAGES + 1);
	struct range g = { 1, new, old > new ? old - new : 0 };

	change(&g, "truncate", HOLES);
	if (ftruncate(me.fd[1], new * PAGE)) {
		if (!w->faults && !(new > old && errno == ENOMEM && w->commit))
			BAD("truncate");
		settle(&g, false);
		return -1;
	}
	w->own[me.number] = new;
	changed(&g, HERE_NO);
	return 0;
}

long do_one(int op)
{
	switch (op) {
	case OP_STORE:
		return store();
	case OP_TOUCH:
		return touch();
	case OP_LOAD:
		return load();
	case OP_LOOK:
		return look();
	case OP_PWRITE:
		return write_some();
	case OP_PREAD:
		return read_some();
	case OP_PUNCH:
	case OP_PUNCH_UNPINNED:
		return cut(op == OP_PUNCH_UNPINNED);
	case OP_ALLOCATE:
	case OP_ZERO:
		return allocate(op == OP_ZERO);
	case OP_TRUNCATE:
		return truncate_own();
	case OP_RENEW:
		return some(4) || w->commit ? 0 : renew();
	case OP_FORK:
		return fork_readers();
	case OP_REMAP:
		return remap();
	default:
		return private();
	}
}
