// SPDX-License-Identifier: GPL-2.0
/*
 * What the fuzzer does with mappings. Each operation returns a negative number if the kernel
 * refused it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fuzz.h"

static struct slot *slot_any(struct me *me)
{
	struct slot *s = &me->slots[rnd(me, SLOTS)];

	return s->at ? s : NULL;
}

static int file_any(struct me *me)
{
	int f = rnd(me, SHARED + 1);

	return f < SHARED ? f : SHARED + me->owner;
}

/* Whether the thread owns all of a page, and the file has it. */
static bool whole(struct me *me, int file, uint32_t page)
{
	return mine(me, file, page) && (page + 1) * PAGE <= (page < HEAD && file < SHARED ? HEAD * PAGE : w->size[file]);
}

static long store(struct me *me)
{
	uint64_t from, len;
	int f = file_any(me);
	char *at;
	long ret;

	if (!pick(me, f, 3 * PAGE, &from, &len))
		return 0;
	at = mapped(me, f, from, len, PROT_READ | PROT_WRITE);
	if (!at)
		return -1;
	change(me, f, from, len);
	content(me, w->will[f] + from, len);
	ret = copy_guarded(at, w->will[f] + from, len);
	note(me, "store", f, from, len, ret);
	if (ret && !w->faults)
		BAD("SIGBUS");
	changed(me, !ret);
	return ret;
}

static long foreign(struct me *me)
{
	int f = rnd(me, SHARED);
	uint32_t page = rnd(me, HEAD), before = __atomic_load_n(&w->version[f][page], 5);
	char seen[PAGE], is[PAGE], *at = rnd(me, 2) ? mapped(me, f, page * PAGE, PAGE, PROT_READ) : NULL;
	int owner = page / BLOCK % OWNERS;

	before = __atomic_load_n(&w->version[f][page], 5);
	if (before & 1)
		return 0;
	if (at ? copy_guarded(seen, at, PAGE) : pread(me->fd[f], seen, PAGE, page * PAGE) != (ssize_t)PAGE)
		return -1;
	memcpy(is, w->is[f] + page * PAGE, PAGE);
	if (__atomic_load_n(&w->version[f][page], 5) != before || !memcmp(seen, is, PAGE))
		return 0;
	struct me other = { .owner = owner };

	right(&other, at ? "another's mapping" : "another's read", f, page * PAGE, PAGE, seen);
	return 0;
}

/* ---- private mappings ----------------------------------------------------------- */

static void private_check(struct me *me, struct slot *s, uint32_t i)
{
	bool own = s->cow >> i & 1;
	char *at = s->at + i * PAGE, seen[PAGE];

	if (!(s->prot & PROT_READ) || !whole(me, s->file, s->first + i))
		return;
	if (copy_guarded(seen, at, PAGE)) {
		if (!w->faults)
			BAD("SIGBUS in a private mapping");
	} else if (!own) {
		right(me, "a private mapping", s->file, (s->first + i) * PAGE, PAGE, seen);
	} else if (memcmp(seen, s->copy + i * PAGE, PAGE)) {
		BAD("owner %d: a private mapping's own page %u is wrong", me->owner, s->first + i);
	}
}

static long private(struct me *me)
{
	struct slot *s = NULL;
	int k = rnd(me, SLOTS), f = file_any(me);
	uint64_t from, len;
	uint32_t i;

	for (int n = 0; n < SLOTS && !(s && s->private); n++)
		s = &me->slots[(k + n) % SLOTS];
	if (!s->private) {
		if (!pick(me, f, PAGE, &from, &len))
			return 0;
		i = from / PAGE;
		i = f < SHARED && i + 64 > PAGES ? PAGES - 64 : f >= SHARED ? 0 : i;
		s = slot_new(me, f, i, 64, true);
		return s ? 0 : -1;
	}
	for (int n = 0; n < 6; n++) {
		i = rnd(me, s->pages);
		private_check(me, s, i);
		if (!whole(me, s->file, s->first + i) || ~s->prot & (PROT_READ | PROT_WRITE) || rnd(me, 2))
			continue;
		if (!(s->cow >> i & 1))
			memcpy(s->copy + i * PAGE, w->is[s->file] + (s->first + i) * PAGE, PAGE);
		from = rnd(me, PAGE);
		len = rnd(me, 2) ? PAGE - from : 1;
		memset(s->copy + i * PAGE + from, me->r, len);
		s->cow |= 1ull << i;
		if (copy_guarded(s->at + i * PAGE + from, s->copy + i * PAGE + from, len)) {
			if (!w->faults)
				BAD("SIGBUS at a write to a private mapping");
			slot_drop(s);
			return -1;
		}
	}
	return 0;
}

/* ---- mappings as such ---------------------------------------------------------------- */

static long map(struct me *me)
{
	int f = file_any(me);
	uint32_t pages = f < SHARED ? PAGES : TAIL, first = rnd(me, pages), n = 1 + rnd(me, pages - first);

	return slot_new(me, f, first, n, false) ? 0 : -1;
}

static void slot_cut(struct slot *s, uint32_t pages)
{
	s->pages = pages;
	if (s->private && pages < 64)
		s->cow &= (1ull << pages) - 1;
}

static long unmap(struct me *me)
{
	struct slot *s = slot_any(me);
	uint32_t n;
	long ret;

	if (!s || s->pages < 2)
		return 0;
	n = 1 + rnd(me, s->pages - 1);
	if (s->private || rnd(me, 2)) {
		ret = munmap(s->at + (s->pages - n) * PAGE, n * PAGE);
		if (!ret)
			slot_cut(s, s->pages - n);
	} else {
		ret = munmap(s->at, n * PAGE);
		if (!ret) {
			s->at += n * PAGE;
			s->first += n;
			s->pages -= n;
		}
	}
	return ret;
}

static long protect(struct me *me)
{
	struct slot *s = slot_any(me);
	int prot[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE }, to = prot[rnd(me, 4)];
	uint32_t from, n;

	if (!s)
		return 0;
	/* A part, and back; or all of it. */
	if (rnd(me, 2)) {
		from = rnd(me, s->pages);
		n = 1 + rnd(me, s->pages - from);
		if (mprotect(s->at + from * PAGE, n * PAGE, to))
			return -1;
		if (!mprotect(s->at + from * PAGE, n * PAGE, s->prot))
			return 0;
	} else if (!mprotect(s->at, s->pages * PAGE, to)) {
		s->prot = to;
		return 0;
	}
	may_fail(me, false);
	slot_drop(s);
	may_fail(me, true);
	return -1;
}

static long remap(struct me *me)
{
	struct slot *s = slot_any(me);
	uint32_t most, n;
	char *to;

	if (!s)
		return 0;
	most = s->private ? s->pages : (s->file < SHARED ? PAGES : TAIL) - s->first;
	n = rnd(me, 2) ? s->pages : 1 + rnd(me, most);
	to = mremap(s->at, s->pages * PAGE, n * PAGE, MREMAP_MAYMOVE);
	if (to != MAP_FAILED && rnd(me, 2)) {
		char *place = mmap(0, n * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *at;

		s->at = to;
		slot_cut(s, n);
		if (place == MAP_FAILED)
			return -1;
		at = mremap(s->at, n * PAGE, n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
		if (at == MAP_FAILED) {
			/* It may have unmapped what was there. */
			return -1;
		}
		to = at;
	}
	if (to == MAP_FAILED)
		return -1;
	s->at = to;
	slot_cut(s, n);
	return 0;
}

/* MADV_REMOVE: a hole. */
static long removed(struct me *me)
{
	uint64_t from, len;
	int f = file_any(me), ret;
	char *at;

	if (!pick(me, f, 6 * PAGE, &from, &len) || from % PAGE)
		return 0;
	len &= -PAGE;
	at = len ? mapped(me, f, from, len, PROT_READ | PROT_WRITE) : NULL;
	if (!at)
		return 0;
	change(me, f, from, len);
	memset(w->will[f] + from, 0, len);
	ret = madvise(at, len, MADV_REMOVE);
	note(me, "MADV_REMOVE", f, from, len, ret);
	changed(me, !ret);
	return ret;
}

static long advise(struct me *me)
{
	static const int advices[] = {
		MADV_DONTNEED, MADV_WILLNEED, MADV_RANDOM, MADV_SEQUENTIAL, MADV_NORMAL, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_MERGEABLE,
		MADV_DONTFORK, MADV_DOFORK, MADV_FREE, MADV_DONTDUMP, 20 /* COLD */, 21 /* PAGEOUT */, 22 /* POPULATE_READ */,
		23 /* _WRITE */, 24 /* DONTNEED_LOCKED */, 25 /* COLLAPSE */,
	};
	struct slot *s = slot_any(me);
	uint32_t from, n, i;
	int advice;
	long ret;

	if (!s || !rnd(me, 4))
		return removed(me);
	advice = advices[rnd(me, sizeof(advices) / sizeof(*advices))];
	from = rnd(me, s->pages);
	n = 1 + rnd(me, s->pages - from);
	if (!rnd(me, 4))
		return msync(s->at + from * PAGE, n * PAGE, rnd(me, 2) ? MS_SYNC : MS_ASYNC | MS_INVALIDATE);
	if (advice == 23 && s->private)
		return 0;
	if (advice == MADV_DONTFORK || advice == MADV_DOFORK) {
		from = 0;
		n = s->pages;
	}
	ret = madvise(s->at + from * PAGE, n * PAGE, advice);
	if (!ret && (advice == MADV_DONTFORK || advice == MADV_DOFORK))
		s->nofork = advice == MADV_DONTFORK;
	if (s->private && (advice == MADV_DONTNEED || advice == 24)) {
		if (ret) {
			may_fail(me, false);
			slot_drop(s);
			may_fail(me, true);
			return ret;
		}
		for (i = from; i < from + n; i++)
			s->cow &= ~(1ull << i);
	}
	return ret;
}

static long lock(struct me *me)
{
	struct slot *s = slot_any(me);
	unsigned long nodes = 1 + rnd(me, 3);
	uint32_t from, n;

	if (!s || s->private)
		return 0;
	from = rnd(me, s->pages);
	n = 1 + rnd(me, s->pages - from);
	switch (rnd(me, 4)) {
	case 0: /* MPOL_BIND, MPOL_INTERLEAVE; MPOL_MF_MOVE */
		return syscall(SYS_mbind, s->at + from * PAGE, n * PAGE, 2 + rnd(me, 2), &nodes, 64, 2);
	case 1:
		return mlock(s->at + from * PAGE, n * PAGE);
	case 2:
		return syscall(SYS_mlock2, s->at + from * PAGE, n * PAGE, 1 /* MLOCK_ONFAULT */);
	default:
		return munlock(s->at + from * PAGE, n * PAGE);
	}
}

/* ---- processes --------------------------------------------------------------------------- */

static void child(struct me *me, int rounds)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int i = 0; i < SLOTS; i++)
		if (me->slots[i].nofork)
			memset(&me->slots[i], 0, sizeof(me->slots[i]));
	me->child = true;
	me->r ^= 0x5555;
	close(me->fail);
	me->fail = open("/proc/thread-self/make-it-fail", O_WRONLY | O_CLOEXEC);
	work(me, rounds);
	for (int i = 0; i < SLOTS; i++)
		for (uint32_t k = 0; me->slots[i].private && k < me->slots[i].pages; k++)
			private_check(me, &me->slots[i], k);
	_exit(0);
}

/* A child goes on with what its parent has, and the parent after it; or it is killed. */
static long forked(struct me *me)
{
	int status = 0, rounds = 5 + rnd(me, 40), kills = rnd(me, 3) == 0;
	pid_t pid;

	if (me->child)
		return 0;
	fflush(stdout);
	pid = fork();
	if (!pid)
		child(me, rounds);
	if (pid < 0)
		return -1;
	if (kills) {
		usleep(rnd(me, 30000));
		kill(pid, SIGKILL);
	}
	/* The kernel writes the status to a page that it may have to copy after the fork. */
	may_fail(me, false);
	if (waitpid(pid, &status, 0) != pid || (status && !(kills && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)))
		BAD("a child ended with %x", status);
	may_fail(me, true);
	if (w->pending[me->owner].active)
		settle(me);
	return 0;
}

long op_mappings(struct me *me, int op)
{
	switch (op) {
	case OP_STORE:
		return store(me);
	case OP_FOREIGN:
		return foreign(me);
	case OP_PRIVATE:
		return private(me);
	case OP_MAP:
		return map(me);
	case OP_UNMAP:
		return unmap(me);
	case OP_PROTECT:
		return protect(me);
	case OP_REMAP:
		return remap(me);
	case OP_ADVISE:
		return advise(me);
	case OP_LOCK:
		return lock(me);
	default:
		return forked(me);
	}
}

/* All that the thread owns, and its private mappings. */
void check_all(struct me *me)
{
	char page[PAGE];

	may_fail(me, false);
	for (int f = 0; f < FILES; f++) {
		for (uint32_t i = 0; i < (f < SHARED ? PAGES : TAIL); i++) {
			if (!mine(me, f, i) || i * PAGE >= (f < SHARED && i < HEAD ? HEAD * PAGE : w->size[f]))
				continue;
			memset(page, 0, PAGE);
			if (pread(me->fd[f], page, PAGE, i * PAGE) <= 0)
				BAD("page %u of file %d cannot be read", i, f);
			right(me, "reading at the end", f, i * PAGE, PAGE, page);
		}
	}
	for (int i = 0; i < SLOTS; i++)
		for (uint32_t k = 0; me->slots[i].private && k < me->slots[i].pages; k++)
			private_check(me, &me->slots[i], k);
	may_fail(me, true);
}
