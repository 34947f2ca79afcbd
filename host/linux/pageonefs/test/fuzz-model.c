// SPDX-License-Identifier: GPL-2.0
/*
 * What the fuzzer knows: the content of each file, who may change which page, and the mappings of a
 * thread.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

struct world *w;

uint64_t rnd(struct me *me, uint64_t below)
{
	me->r = mix(me->r);
	return (me->r >> 8) % below;
}

/* From now on the kernel's allocations for this thread may fail, or not. */
void may_fail(struct me *me, bool on)
{
	if (w->faults && me->fail >= 0 && pwrite(me->fail, on ? "1" : "0", 1, 0) != 1)
		BAD("make-it-fail");
}

static void open_all(struct me *me)
{
	char path[64];

	me->fail = w->faults ? open("/proc/thread-self/make-it-fail", O_WRONLY | O_CLOEXEC) : -1;
	me->disk = open("/dev/slow", O_RDONLY | O_DIRECT | O_CLOEXEC);
	me->scratch = open("/dev/scratch", O_RDWR | O_DIRECT | O_CLOEXEC);
	for (int f = 0; f < SHARED; f++) {
		snprintf(path, sizeof(path), MOUNT "/fuzz/%d", f);
		me->fd[f] = open(path, O_RDWR | O_CLOEXEC);
		me->direct[f] = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
		if (me->fd[f] < 0)
			BAD("open %s", path);
	}
}

void me_open(struct me *me, int owner, uint64_t seed)
{
	memset(me, 0, sizeof(*me));
	me->owner = owner;
	me->r = mix(seed ^ mix(owner + 1));
	for (int f = 0; f < FILES; f++)
		me->fd[f] = me->direct[f] = -1;
	open_all(me);
	own_file(me);
}

/* The owner's own file begins anew, with or without a name. */
void own_file(struct me *me)
{
	int f = SHARED + me->owner;
	char name[64], other[64];

	for (int i = 0; i < SLOTS; i++)
		if (me->slots[i].at && me->slots[i].file == f)
			slot_drop(&me->slots[i]);
	if (me->fd[f] >= 0)
		close(me->fd[f]);
	if (me->direct[f] >= 0)
		close(me->direct[f]);
	snprintf(name, sizeof(name), MOUNT "/fuzz/own%d", me->owner);
	snprintf(other, sizeof(other), MOUNT "/fuzz/new%d", me->owner);
	if (rnd(me, 3) == 0) {
		unlink(name);
		me->fd[f] = open(MOUNT "/fuzz", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
		me->direct[f] = -1;
	} else {
		me->fd[f] = open(other, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
		if (me->fd[f] >= 0 && rename(other, name))
			BAD("rename");
		me->direct[f] = open(name, O_RDWR | O_DIRECT | O_CLOEXEC);
	}
	if (me->fd[f] < 0)
		BAD("a file of owner %d", me->owner);
	memset(w->is[f], 0, TAIL * PAGE);
	memset(w->will[f], 0, TAIL * PAGE);
	w->size[f] = 0;
	if (!ftruncate(me->fd[f], TAIL * PAGE))
		w->size[f] = TAIL * PAGE;
}

/* ---- who owns what ------------------------------------------------------------------- */

static bool owns_tail(struct me *me, int file)
{
	return file < SHARED ? me->owner == file : true;
}

bool mine(struct me *me, int file, uint32_t page)
{
	if (file >= SHARED)
		return file == SHARED + me->owner;
	return page < HEAD ? (int)(page / BLOCK % OWNERS) == me->owner : owns_tail(me, file);
}

/* Some bytes that this thread owns and that the file has, at most so many. */
bool pick(struct me *me, int file, uint64_t most, uint64_t *from, uint64_t *len)
{
	uint64_t start, end;

	if (file >= SHARED) {
		start = 0;
		end = w->size[file];
	} else if (owns_tail(me, file) && rnd(me, 2)) {
		start = HEAD * PAGE;
		end = w->size[file];
	} else {
		start = (rnd(me, HEAD / BLOCK / OWNERS) * OWNERS + me->owner) * BLOCK * PAGE;
		end = start + BLOCK * PAGE;
	}
	if (end <= start)
		return false;
	/* Whole pages, mostly. */
	if (rnd(me, 3)) {
		*from = start + rnd(me, (end - start + PAGE - 1) / PAGE) * PAGE;
		*len = (1 + rnd(me, most / PAGE)) * PAGE;
	} else {
		*from = start + rnd(me, end - start);
		*len = 1 + rnd(me, most);
	}
	if (*len > end - *from)
		*len = end - *from;
	return true;
}

/* What others have too, mostly. */
void content(struct me *me, char *to, uint64_t len)
{
	char page[PAGE];

	for (uint64_t at = 0; at < len; at += PAGE) {
		fill(page, rnd(me, 10) < 7 ? rnd(me, 6) : me->r | 1ull << 63);
		memcpy(to + at, page, len - at < PAGE ? len - at : PAGE);
	}
}

/* ---- changes -------------------------------------------------------------------------- */

void note(struct me *me, const char *what, int file, uint64_t from, uint64_t len, long ret)
{
	w->history[me->owner][w->deeds[me->owner]++ % HISTORY] = (struct deed){ what, file, from, len, ret };
}

static void versions(const struct pending *p, bool odd)
{
	for (uint64_t i = p->from / PAGE; i < (p->to + PAGE - 1) / PAGE; i++)
		if ((w->version[p->file][i] & 1) != odd)
			__atomic_add_fetch(&w->version[p->file][i], 1, 5);
}

/* The caller fills w->will of this range after change(), and says how it went by changed(). */
void change(struct me *me, int file, uint64_t from, uint64_t len)
{
	struct pending *p = &w->pending[me->owner];

	memcpy(w->will[file] + from, w->is[file] + from, len);
	p->file = file;
	p->from = from;
	p->to = from + len;
	versions(p, true);
	__atomic_store_n(&p->active, 1, 5);
}

void changed(struct me *me, bool wholly)
{
	struct pending *p = &w->pending[me->owner];

	if (!wholly) {
		settle(me);
		return;
	}
	memcpy(w->is[p->file] + p->from, w->will[p->file] + p->from, p->to - p->from);
	__atomic_store_n(&p->active, 0, 5);
	versions(p, false);
}

/* A call failed, or its process was killed: each byte is what it was, or what it was to be. */
void settle(struct me *me)
{
	struct pending *p = &w->pending[me->owner];
	char page[PAGE], *is = w->is[p->file], *will = w->will[p->file];
	struct stat st;

	may_fail(me, false);
	if (owns_tail(me, p->file) && !fstat(me->fd[p->file], &st))
		w->size[p->file] = st.st_size;
	for (uint64_t at = p->from & -PAGE; p->active && at < p->to; at += PAGE) {
		memset(page, 0, PAGE);
		if (at < w->size[p->file] && pread(me->fd[p->file], page, PAGE, at) < 0)
			BAD("page %lu cannot be read", (long)(at / PAGE));
		for (uint64_t i = 0; i < PAGE; i++) {
			if (page[i] == is[at + i] || (at + i >= p->from && at + i < p->to && page[i] == will[at + i]))
				continue;
			note(me, "unsettled", p->file, at + i, 1, 0);
			right(me, "a call that failed", p->file, at, PAGE, page);
			break;
		}
		memcpy(is + at, page, PAGE);
	}
	__atomic_store_n(&p->active, 0, 5);
	for (uint32_t i = 0; i < PAGES; i++)
		for (int f = 0; f < SHARED; f++)
			if (mine(me, f, i) && w->version[f][i] & 1)
				__atomic_add_fetch(&w->version[f][i], 1, 5);
	may_fail(me, true);
}

/* ---- looking ---------------------------------------------------------------------------- */

/* What the owner did with these bytes, the last first. */
void history(int owner, int file, uint64_t from, uint64_t len)
{
	uint32_t deeds = w->deeds[owner];
	int shown = 0;

	for (uint32_t k = deeds; k-- > 0 && deeds - k < HISTORY && shown < 12;) {
		struct deed *d = &w->history[owner][k % HISTORY];

		if (d->file != file || d->from >= from + len || d->from + d->len <= from)
			continue;
		printf("        %u before: %s [%lx, %lx) returned %ld\n", deeds - k, d->what, (long)d->from, (long)(d->from + d->len), d->ret);
		shown++;
	}
	fflush(stdout);
}

/* Whether these bytes of a file are right. If not, what its owner did there last is printed. */
bool right(struct me *me, const char *how, int file, uint64_t from, uint64_t len, const char *seen)
{
	const char *is = w->is[file] + from;
	uint64_t i, wrong = 0, first = len;

	if (!memcmp(is, seen, len))
		return true;
	for (i = 0; i < len; i++) {
		wrong += is[i] != seen[i];
		if (is[i] != seen[i] && first == len)
			first = i;
	}
	BAD("owner %d, file %d, page %lu: %lu of %lu bytes are wrong from byte %lu on, by %s: %02x for %02x", me->owner, file,
	    (long)((from + first) / PAGE), (long)wrong, (long)len, (long)((from + first) % PAGE), how, seen[first] & 255, is[first] & 255);
	history(me->owner, file, from, len);
	return false;
}

/* ---- mappings ----------------------------------------------------------------------- */

void slot_drop(struct slot *s)
{
	if (s->at && munmap(s->at, s->pages * PAGE))
		BAD("munmap");
	free(s->copy);
	memset(s, 0, sizeof(*s));
}

/* Maps so many pages of a file, in place of another mapping. NULL: the kernel did not. */
struct slot *slot_new(struct me *me, int file, uint32_t page, uint32_t pages, bool private)
{
	struct slot *s = &me->slots[rnd(me, SLOTS)];
	/* Populating a private mapping copies the pages, as writing it does. */
	int flags = private ? MAP_PRIVATE : MAP_SHARED | (rnd(me, 6) ? 0 : MAP_POPULATE);
	char *at;

	may_fail(me, false);
	slot_drop(s);
	may_fail(me, true);
	at = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, flags, me->fd[file], page * PAGE);
	if (at == MAP_FAILED) {
		if (!w->faults)
			BAD("mmap");
		return NULL;
	}
	if (rnd(me, 3))
		madvise(at, pages * PAGE, MADV_HUGEPAGE);
	*s = (struct slot){ .at = at, .file = file, .first = page, .pages = pages, .private = private };
	s->prot = PROT_READ | PROT_WRITE;
	if (private)
		s->copy = malloc(pages * PAGE);
	return s;
}

/* Where these bytes are mapped, shared, with these rights; NULL: nowhere. */
char *mapped(struct me *me, int file, uint64_t from, uint64_t len, int prot)
{
	uint32_t page = from / PAGE, end = (from + len + PAGE - 1) / PAGE, k = rnd(me, SLOTS), pages = file < SHARED ? PAGES : TAIL, low;
	struct slot *s;

	for (int i = 0; i < SLOTS && rnd(me, 8); i++) {
		s = &me->slots[(k + i) % SLOTS];
		if (s->at && s->file == file && !s->private && (s->prot & prot) == prot && s->first <= page && s->first + s->pages >= end)
			return s->at + (from - s->first * PAGE);
	}
	/* All of it, or a part. */
	low = rnd(me, 3) ? 0 : rnd(me, page + 1);
	s = slot_new(me, file, low, rnd(me, 3) ? pages - low : end - low + rnd(me, pages - end + 1), false);
	return s ? s->at + (from - low * PAGE) : NULL;
}
