// SPDX-License-Identifier: GPL-2.0
/*
 * The daemon's side of the fuzzer: one process harvests, digests and merges what is equal, and sees
 * that no change lacks its dirty bit; the other one asks for all that it should not.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

enum { RIGHT, WRONG, MOVE, STALE, WILD, PLAIN, POISON, ROUNDS, LENT };

static struct me daemon_me, *me = &daemon_me;
static int control;
static uint64_t handles[64];	/* frames that were seen; some are gone */

static void start(uint64_t seed)
{
	me->r = mix(seed);
	me->fail = w->faults ? open("/proc/thread-self/make-it-fail", O_WRONLY | O_CLOEXEC) : -1;
	control = open(MOUNT, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (control < 0)
		BAD("open the mount");
	may_fail(me, true);
}

/* Whether a call has failed as it may: `other` is one more error that is none. */
static bool refused(int ret, int other, const char *what)
{
	if (ret && errno != other && errno != ESRCH && errno != EINTR && !(w->faults && errno == ENOMEM))
		BAD("%s", what);
	return ret;
}

static bool digest(uint64_t id, uint64_t pages, uint64_t *out)
{
	struct pageonefs_digest d = { .id = id, .pages = pages, .out = (uintptr_t)out, .seed = 7 };

	if (refused(ioctl(control, PAGEONEFS_DIGEST, &d), 0, "digest"))
		return false;
	for (uint64_t i = 0; i < pages; i++)
		if (out[i] & 1 && !rnd(me, 8))
			handles[rnd(me, 64)] = out[i] / 2;
	return true;
}

static bool merge(uint64_t id, struct pageonefs_entry *e, uint32_t n)
{
	struct pageonefs_merge m = { .id = id, .entries = (uintptr_t)e, .count = n };

	if (refused(ioctl(control, PAGEONEFS_MERGE, &m), 0, "merge"))
		return false;
	for (uint32_t i = 0; i < n; i++) {
		switch (e[i].result) {
		case 0:
		case -EEXIST:
		case -EAGAIN:
		case -EBUSY:
		case -ESTALE:
		case -ENOENT:
		case -EMLINK:
			break;
		case -EINVAL:
			if (i && e[i].index <= e[i - 1].index)
				break;
			/* fall through */
		default:
			if (!(e[i].result == -ENOMEM && w->faults) && !(e[i].result == -EHWPOISON && w->poison) && e[i].index < PAGES)
				BAD("merge says %s", strerror(-e[i].result));
		}
	}
	return true;
}

/* ---- what is equal ------------------------------------------------------------------ */

static struct {
	uint64_t digest, frame, round;
} known[1 << 14];

static void merge_equal(uint64_t id, uint64_t pages, const uint64_t *d)
{
	struct pageonefs_entry e[PAGES];
	static uint64_t round;
	uint32_t n = 0, k;

	round++;
	for (uint32_t i = 0; i < pages; i++) {
		k = mix(d[i]) % (1 << 14);
		if (d[i] <= PAGEONEFS_PAGE_AWAY || d[i] & 1)
			continue;
		if (known[k].digest != d[i]) {
			known[k].digest = d[i];
			known[k].frame = 0;
			known[k].round = round;
			continue;
		}
		if (known[k].frame || known[k].round != round || !rnd(me, 4))
			e[n++] = (struct pageonefs_entry){ .index = i, .frame = known[k].frame };
	}
	if (!n || !merge(id, e, n))
		return;
	for (uint32_t i = 0; i < n; i++) {
		k = mix(d[e[i].index]) % (1 << 14);
		if (known[k].digest != d[e[i].index])
			continue;
		if (!e[i].result) {
			known[k].frame = e[i].frame;
			w->made[RIGHT]++;
		} else if (e[i].result == -ENOENT || e[i].result == -EMLINK || e[i].result == -ESTALE) {
			known[k].frame = 0;
			known[k].round = 0;
		}
	}
}

/* ---- harvests ---------------------------------------------------------------------------- */

struct watched {
	uint64_t id, base[PAGES], new[PAGES], a[PAGES / 64], b[PAGES / 64];
	bool based;
};

static bool bits(uint64_t id, uint64_t *out)
{
	struct pageonefs_harvest h = { .id = id, .pages = PAGES, .bits = (uintptr_t)out };

	return !refused(ioctl(control, PAGEONEFS_HARVEST, &h), 0, "harvest");
}

/* A page whose digest has changed is named by one of the harvests around the digests. */
static void watch(struct watched *f, int file)
{
	if (!bits(f->id, f->a) || !digest(f->id, PAGES, f->new) || !bits(f->id, f->b))
		goto lost;
	for (uint32_t i = 0; f->based && i < PAGES; i++) {
		if (f->base[i] <= 2 || f->new[i] <= 2 || (f->base[i] | f->new[i]) & 1 || f->base[i] == f->new[i])
			continue;
		w->dirty_checks++;
		if ((f->a[i / 64] | f->b[i / 64]) >> (i & 63) & 1)
			continue;
		BAD("page %u of file %d changed from %lx to %lx and is not dirty", i, file, (long)f->base[i], (long)f->new[i]);
		/* What is under way has no name yet. */
		sleep(1);
		history(i < HEAD ? (int)(i / BLOCK % OWNERS) : file, file, i * PAGE, PAGE);
	}
	f->based = digest(f->id, PAGES, f->base);
	if (f->based)
		merge_equal(f->id, PAGES, f->base);
	w->made[ROUNDS]++;
	return;
lost:
	f->based = false;
}

void daemon_harvests(uint64_t seed)
{
	static struct watched files[SHARED];
	char path[64];

	start(seed);
	for (int f = 0; f < SHARED; f++) {
		snprintf(path, sizeof(path), MOUNT "/fuzz/%d", f);
		may_fail(me, false);
		int fd = open(path, O_RDONLY | O_CLOEXEC);

		files[f].id = id_of(fd);
		close(fd);
		may_fail(me, true);
	}
	while (!sh->stop) {
		for (int f = 0; f < SHARED; f++)
			watch(&files[f], f);
		if (!rnd(me, 4))
			usleep(rnd(me, 20000));
	}
	_exit(0);
}

/* ---- all else ---------------------------------------------------------------------- */

static void odd_pairs(const struct pageonefs_file *file)
{
	uint64_t d[PAGES], pages = file->size / PAGE < PAGES ? file->size / PAGE : PAGES;
	struct pageonefs_entry e[PAGES];
	uint32_t n = 0;

	if (!digest(file->id, pages, d))
		return;
	for (uint64_t i = rnd(me, 8); i < pages; i += 1 + rnd(me, 12)) {
		uint64_t frame = handles[rnd(me, 64)];

		switch (rnd(me, 5)) {
		case 0:
			frame = 0;
			break;
		case 1:
			frame = me->r;
			w->made[STALE]++;
			break;
		}
		w->made[d[i] & 1 ? MOVE : WRONG]++;
		e[n++] = (struct pageonefs_entry){ .index = i, .frame = frame };
	}
	if (n && merge(file->id, e, n))
		for (uint32_t i = 0; i < n; i++)
			if (!e[i].result)
				handles[rnd(me, 64)] = e[i].frame;
	if (!rnd(me, 3))
		merge_equal(file->id, pages, d);
}

/* Requests that make no sense: an error, and nothing else. */
static void wild(const struct pageonefs_file *file)
{
	char *page = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void *places[] = {
		NULL, (void *)8, page, page + PAGE - 24, page + 2 * PAGE - 24, (void *)0xffff888000000000ul, (void *)~0ul,
	};
	uint64_t ids[] = { file->id, file->id, file->id, 0, ~0ul, me->r }, id = ids[rnd(me, 6)];
	uint64_t values[] = { 0, 1, 63, 64, 320, 1ul << 32, 1ul << 51, 1ul << 52, ~0ul, ~63ul, me->r };
	void *place = places[rnd(me, 7)];
	int ret = 0;

	if (page == MAP_FAILED)
		return;
	munmap(page + PAGE, PAGE);
	for (int i = 0; i < 128; i++)
		((uint64_t *)page)[i * 4] = values[rnd(me, 11)];
#define ANY values[rnd(me, 11)]
	switch (rnd(me, 6)) {
	case 0:
		ret = ioctl(control, PAGEONEFS_MERGE, &(struct pageonefs_merge){
			.id = id, .entries = (uintptr_t)place, .count = rnd(me, 2) ? 100 : ANY });
		break;
	case 1: {
		struct pageonefs_harvest h = { .id = id, .start = ANY, .pages = rnd(me, 2) ? 320 : ANY & 0xfffff,
					       .bits = (uintptr_t)place, .flags = rnd(me, 2) };

		/* It takes bits: not of files that are watched. */
		ret = id == file->id && id <= SHARED ? 0 : ioctl(control, PAGEONEFS_HARVEST, &h);
		break;
	}
	case 2: {
		struct pageonefs_digest d = { .id = id, .start = ANY, .pages = rnd(me, 2) ? 320 : ANY & 0xfffff, .out = (uintptr_t)place,
					      .only = rnd(me, 2) ? 0 : (uintptr_t)places[rnd(me, 7)], .seed = ANY };

		ret = ioctl(control, PAGEONEFS_DIGEST, &d);
		break;
	}
	case 3:
		ret = ioctl(control, PAGEONEFS_LIST, &(struct pageonefs_list){ .after = ANY, .files = (uintptr_t)place, .room = ANY });
		break;
	case 4:
		ret = ioctl(control, (me->r & 0xffff00ff) | '1' << 8, rnd(me, 2) ? place : page);
		if (!ret)
			BAD("a number that is none of ours did something");
		break;
	default:
		ret = ioctl(control, _IOWR('1', 1 + rnd(me, 8), char[200]), place);
	}
	(void)ret;
	w->made[WILD]++;
	munmap(page, PAGE);
}

/* Broken memory, of a content that no other page has: its readers get errors, and a hole heals. */
static void poison(void)
{
	static uint64_t unique;
	struct pageonefs_entry e[4] = { { 0 } };
	char page[PAGE], *m;
	struct stat st;
	struct pageonefs_file file;
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };
	int fd = open(MOUNT, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600), ret;

	fill(page, 1ull << 62 | (uint64_t)getpid() << 32 | ++unique);
	for (int i = 0; i < 4; i++)
		if (pwrite(fd, page, PAGE, i * PAGE) != (long)PAGE)
			goto out;
	fstat(fd, &st);
	do {
		if (ioctl(control, PAGEONEFS_LIST, &l) || !l.filled)
			goto out;
		l.after = file.id;
	} while (file.inode != st.st_ino);
	m = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (m == MAP_FAILED)
		goto out;
	for (int tries = 0; tries < 20 && !(e[0].frame && !e[3].result && tries); tries++) {
		for (int i = 0; i < 4; i++)
			e[i] = (struct pageonefs_entry){ .index = i, .frame = e[0].frame };
		merge(file.id, e, 1);
		for (int i = 1; i < 4; i++)
			e[i].frame = e[0].frame;
		if (e[0].frame)
			merge(file.id, e + 1, 3);
		usleep(2000);
	}
	if (!copy_guarded(page, m + PAGE, 8)) {
		ret = advise_guarded(m + PAGE, PAGE, rnd(me, 3) ? 100 /* MADV_HWPOISON */ : 101 /* SOFT_OFFLINE */);
		if (!ret)
			w->made[POISON]++;
		copy_guarded(page, m + PAGE, PAGE);
		copy_guarded(m, page, 8);
		pread(fd, page, PAGE, 2 * PAGE);
		if (!madvise(m, 4 * PAGE, MADV_REMOVE) && (copy_guarded(page, m + PAGE, PAGE) || !holds(page, 0)))
			BAD("a hole is not well again");
	}
	munmap(m, 4 * PAGE);
out:
	close(fd);
}

/* ---- a store ------------------------------------------------------------------------- */

enum { LENDER_PAGES = 64 };
static struct {
	int control, fd;
	uint64_t id;
	char *m;
} lender;
static int shared_fd[SHARED];
static uint64_t shared_id[SHARED];

/* A store of the mount's domain; the mount may have none. */
static void lender_open(void)
{
	struct pageonefs_file file;
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };
	struct pageonefs_info info;
	char path[64];

	may_fail(me, false);
	if (ioctl(control, PAGEONEFS_INFO, &info) || !info.domain[0])
		goto out;
	lender.control = ioctl(control, PAGEONEFS_STORE);
	lender.fd = openat(lender.control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	if (ftruncate(lender.fd, LENDER_PAGES * PAGE) || ioctl(lender.control, PAGEONEFS_LIST, &l) || l.filled != 1)
		BAD("a store");
	lender.id = file.id;
	lender.m = mmap(0, LENDER_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, lender.fd, 0);
	for (int f = 0; f < SHARED; f++) {
		snprintf(path, sizeof(path), MOUNT "/fuzz/%d", f);
		shared_fd[f] = open(path, O_RDONLY | O_CLOEXEC);
		shared_id[f] = id_of(shared_fd[f]);
	}
out:
	may_fail(me, true);
}

/* What a page held a moment ago is lent, and the page merged with it; then it is another's turn. */
static void lend(void)
{
	int f = rnd(me, SHARED), slot = rnd(me, LENDER_PAGES);
	struct pageonefs_entry e = { .index = slot }, of = { .index = rnd(me, PAGES) };
	struct pageonefs_merge m = { .id = lender.id, .entries = (uintptr_t)&e, .count = 1 };
	/* This process pays, or who pays for another page. */
	struct pageonefs_slot made = { .id = lender.id, .index = slot, .pid = rnd(me, 2) ? getpid() : 0 };
	char page[PAGE];
	int cut;

	may_fail(me, false);
	if (!made.pid) {
		made.like_id = lender.id;
		made.like = rnd(me, LENDER_PAGES);
	}
	cut = lender.m && !fallocate(lender.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, slot * PAGE, PAGE);
	may_fail(me, true);
	if (!cut)
		return;
	/* Where that page is not there, the next write makes this one. */
	refused(ioctl(lender.control, PAGEONEFS_SLOT, &made), ENOMEM, "slot");
	may_fail(me, false);
	if (pread(shared_fd[f], page, PAGE, of.index * PAGE) != (long)PAGE || copy_guarded(lender.m + slot * PAGE, page, PAGE)) {
		may_fail(me, true);
		return;
	}
	may_fail(me, true);
	if (refused(ioctl(lender.control, PAGEONEFS_MERGE, &m), 0, "lend") || e.result) {
		if (e.result != -EAGAIN && e.result != -EBUSY && !(e.result == -ENOMEM && w->faults))
			BAD("lend says %s", strerror(-e.result));
		return;
	}
	handles[rnd(me, 64)] = of.frame = e.frame;
	if (merge(shared_id[f], &of, 1) && !of.result)
		w->made[LENT]++;
	if (memcmp(lender.m + slot * PAGE, page, PAGE))
		BAD("slot %d of the store has changed", slot);
}

void daemon_merges(uint64_t seed)
{
	struct pageonefs_file files[64];

	start(seed);
	lender_open();
	while (!sh->stop) {
		struct pageonefs_list l = { .files = (uintptr_t)files, .room = 64 };
		struct pageonefs_stats s;

		if (refused(ioctl(control, PAGEONEFS_LIST, &l), 0, "list") || !l.filled)
			continue;
		struct pageonefs_file *f = &files[rnd(me, l.filled)];

		for (uint32_t i = 0; i < SHARED && i < l.filled; i++)
			if (files[i].plain && files[i].id <= SHARED)
				BAD("file %lu is plain (%u): nothing is tested", (long)files[i].id, files[i].plain);
		switch (rnd(me, 16)) {
		case 0:
		case 1:
		case 2:
			wild(f);
			break;
		case 3:
			refused(ioctl(control, PAGEONEFS_STATS, &s), 0, "stats");
			usleep(rnd(me, 5000));
			break;
		case 4:
			/* A file of an owner's, that comes and goes. */
			if (rnd(me, 8) || f->id <= SHARED)
				break;
			refused(ioctl(control, PAGEONEFS_MAKE_PLAIN, &(struct pageonefs_plain){ .id = f->id }), 0, "make plain");
			w->made[PLAIN]++;
			break;
		case 6:
		case 7:
			for (int n = rnd(me, 32); n > 0; n--)
				lend();
			break;
		case 5:
			if (w->poison && !rnd(me, 50))
				poison();
			break;
		default:
			odd_pairs(f);
		}
	}
	_exit(0);
}
