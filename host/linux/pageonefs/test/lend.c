// SPDX-License-Identifier: GPL-2.0
/*
 * Stores: files whose pages are lent, and are frames of their domain, too.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define DOMAIN "lend"
enum { PAGES = 64 };

/* ---- stores and guests -------------------------------------------------------------- */

static void area_fill(struct lender *a, uint32_t pages)
{
	struct pageonefs_file file;
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };

	a->f = (struct file){ openat(a->control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600), 0, pages };
	if (a->f.fd < 0 || ftruncate(a->f.fd, pages * PAGE) || ioctl(a->control, PAGEONEFS_LIST, &l) || l.filled != 1)
		BAD("a file of %u pages", pages);
	a->f.id = file.id;
	a->m = file_map(a->f);
}

struct lender store_make(struct lender *guest, uint32_t pages)
{
	struct lender a = { ioctl(guest->control, PAGEONEFS_STORE), { 0 }, 0 };

	if (a.control < 0)
		BAD("a store");
	area_fill(&a, pages);
	return a;
}

struct lender guest_make(const char *path, uint32_t pages)
{
	struct lender a = { -1, { 0 }, 0 };

	mkdir(path, 0755);
	if (mount("none", path, "pageonefs", 0, "domain=" DOMAIN))
		BAD("mount");
	a.control = control_open(path);
	area_fill(&a, pages);
	return a;
}

void area_close(struct lender *a, const char *path)
{
	munmap(a->m, a->f.pages * PAGE);
	close(a->f.fd);
	close(a->control);
	if (path)
		CHECK(!umount(path));
}

int slot_make(struct lender *store, uint32_t index, pid_t pid)
{
	struct pageonefs_slot s = { .id = store->f.id, .index = index, .pid = pid };

	return ioctl(store->control, PAGEONEFS_SLOT, &s) ? errno : 0;
}

static int merge(struct lender *a, uint32_t index, uint64_t *frame)
{
	return merge_patiently(a->control, a->f, index, frame);
}

static uint64_t frames_of(struct lender *a)
{
	struct pageonefs_stats s = { 0 };

	CHECK(!ioctl(a->control, PAGEONEFS_STATS, &s));
	return s.frames;
}

static uint64_t pages_of(struct lender *a)
{
	struct pageonefs_file file = { 0 };
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };

	CHECK(!ioctl(a->control, PAGEONEFS_LIST, &l) && l.filled == 1);
	return file.private_pages;
}

/* The number of the page of memory that is mapped there; 0: none. */
static uint64_t memory_at(const char *p)
{
	uint64_t entry = 0;
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	if (pread(fd, &entry, 8, (uintptr_t)p / PAGE * 8) != 8)
		BAD("pagemap");
	close(fd);
	return entry >> 63 ? entry & ((1ull << 55) - 1) : 0;
}

/* The store's pages are lent, and the guest's are merged with them. */
static void lend_all(struct lender *store, struct lender *guest, uint64_t *frames, uint64_t first)
{
	for (uint32_t i = 0; i < store->f.pages; i++) {
		fill(at(store->m, i), first + i);
		frames[i] = 0;
		CHECK(!merge(store, i, &frames[i]) && frames[i]);
	}
	for (uint32_t i = 0; i < guest->f.pages; i++) {
		uint64_t frame = frames[i];

		fill(at(guest->m, i), first + i);
		CHECK(!merge(guest, i, &frame));
	}
}

/* ---- what a lent page is ---------------------------------------------------------------- */

static void lend(void)
{
	struct lender a = guest_make("/lend-a", PAGES), b = guest_make("/lend-b", PAGES), s = store_make(&a, PAGES);
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP };
	int protector = syscall(SYS_userfaultfd, O_CLOEXEC);
	uint64_t frames[PAGES], frame;
	struct pageonefs_info info;
	char *p, page[PAGE];

	lend_all(&s, &a, frames, 100);
	p = file_map_privately(s.f);
	CHECK(frames_of(&a) == PAGES && pages_of(&s) == PAGES && pages_of(&a) == 0);
	for (int i = 0; i < PAGES; i++) {
		frame = 0;
		CHECK(merge_in(s.control, s.f, i, &frame) == -EEXIST && frame == frames[i]);
		fill(at(b.m, i), 100 + i);
		CHECK(!merge(&b, i, &frame));
		CHECK(holds(at(p, i), 100 + i) && holds(at(a.m, i), 100 + i) && holds(at(b.m, i), 100 + i));
		CHECK(memory_at(at(p, i)) && memory_at(at(p, i)) == memory_at(at(a.m, i)));
		CHECK(memory_at(at(p, i)) == memory_at(at(b.m, i)));
	}
	/* Written by each of them: nobody else sees it. */
	at(p, 1)[9] = at(a.m, 2)[9] = at(b.m, 3)[9] = 'x';
	for (int i = 0; i < PAGES; i++) {
		CHECK(holds(at(p, i), 100 + i) == (i != 1) && holds(at(a.m, i), 100 + i) == (i != 2));
		CHECK(holds(at(b.m, i), 100 + i) == (i != 3) && holds(at(s.m, i), 100 + i));
	}
	/* What would change it in place. */
	CHECK(pwrite(s.f.fd, page, PAGE, 0) < 0 && errno == EPERM);
	CHECK(ftruncate(s.f.fd, PAGE) && errno == EPERM);
	CHECK(fallocate(s.f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 5, PAGE) && errno == EINVAL);
	CHECK(!fcntl(s.f.fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL));
	CHECK(fcntl(s.f.fd, F_GET_SEALS) == (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL));
	/* An agent's windows. */
	CHECK(!ioctl(protector, UFFDIO_API, &api));
	CHECK(!ioctl(protector, UFFDIO_REGISTER,
		     &(struct uffdio_register){ { (uintptr_t)p, PAGES * PAGE },
						UFFDIO_REGISTER_MODE_WP | UFFDIO_REGISTER_MODE_MISSING, 0 }));
	CHECK(!ioctl(protector, UFFDIO_WRITEPROTECT,
		     &(struct uffdio_writeprotect){ { (uintptr_t)p, PAGES * PAGE }, UFFDIO_WRITEPROTECT_MODE_WP }));
	for (int i = 0; i < PAGES; i++)
		CHECK(holds(at(p, i), 100 + i) == (i != 1) && memory_at(at(p, i)));
	close(protector);
	/* Without a domain there is nobody to lend to. */
	if (!ioctl(control_open(MOUNT), PAGEONEFS_INFO, &info) && !info.domain[0])
		CHECK(ioctl(control_open(MOUNT), PAGEONEFS_STORE) < 0 && errno == EINVAL);
	munmap(p, PAGES * PAGE);
	area_close(&s, 0);
	for (int i = 0; i < PAGES; i++)
		CHECK(holds(at(a.m, i), 100 + i) == (i != 2));
	area_close(&a, "/lend-a");
	CHECK(frames_of(&b) == PAGES - 1);
	area_close(&b, "/lend-b");
}

#define SLOT(a, ...) (ioctl((a).control, PAGEONEFS_SLOT, &(struct pageonefs_slot){ __VA_ARGS__ }) ? errno : 0)

/* Pages that a process is to pay for are zeros until they are written; what is wrong makes none. */
static void slots(void)
{
	struct lender a = guest_make("/lend-a", PAGES), s = store_make(&a, PAGES), other = store_make(&a, PAGES);
	uint64_t id = s.f.id, none = other.f.id + 1000;
	pid_t gone = fork_child(), me = getpid();
	char *zeros = calloc(1, PAGE), *p;

	if (!gone)
		_exit(0);
	waitpid(gone, 0, 0);
	CHECK(SLOT(s, .id = none, .pid = me) == ESRCH && SLOT(s, .id = a.f.id, .pid = me) == ESRCH);
	CHECK(SLOT(a, .id = a.f.id, .pid = me) == EINVAL && SLOT(a, .id = a.f.id, .like_id = a.f.id) == EINVAL);
	CHECK(SLOT(s, .id = id, .index = PAGES, .pid = me) == EINVAL && SLOT(s, .id = id, .index = -1ul, .pid = me) == EINVAL);
	CHECK(SLOT(s, .id = id, .pid = -1) == EINVAL && SLOT(s, .id = id, .pid = me, .reserved = 1) == EINVAL);
	CHECK(SLOT(s, .id = id, .pid = me, .like_id = id) == EINVAL && SLOT(s, .id = id, .pid = me, .like = 1) == EINVAL);
	CHECK(SLOT(s, .id = id, .pid = gone) == ESRCH && SLOT(s, .id = id, .pid = 1 << 30) == ESRCH && SLOT(s, .id = id) == ESRCH);
	CHECK(SLOT(s, .id = id, .like_id = none) == ESRCH && SLOT(s, .id = id, .like_id = id) == ESRCH);
	CHECK(SLOT(s, .id = id, .like_id = id, .like = -1ul) == ESRCH && SLOT(s, .id = id, .like_id = other.f.id) == ESRCH);
	CHECK(pages_of(&s) == 0);
	for (int i = 0; i < PAGES / 2; i++)
		CHECK(!slot_make(&s, i, me) && !SLOT(s, .id = id, .index = PAGES / 2 + i, .like_id = id, .like = i));
	CHECK(pages_of(&s) == PAGES);
	p = file_map_privately(s.f);
	for (int i = 0; i < PAGES; i++) {
		CHECK(!memcmp(at(p, i), zeros, PAGE));
		fill(at(s.m, i), 10 + i);
	}
	/* What is there stays, lent or not. */
	for (uint32_t i = 0; i < PAGES; i++) {
		uint64_t frame = 0;

		CHECK(i % 2 || !merge(&s, i, &frame));
		CHECK(!slot_make(&s, i, me) && holds(at(s.m, i), 10 + i) && holds(at(p, i), 10 + i));
	}
	munmap(p, PAGES * PAGE);
	free(zeros);
	area_close(&other, 0);
	area_close(&s, 0);
	area_close(&a, "/lend-a");
}

/* ---- pages that leave the store ---------------------------------------------------------- */

static void lend_cut(void)
{
	struct lender a = guest_make("/lend-a", PAGES), b = guest_make("/lend-b", PAGES), s = store_make(&a, PAGES);
	uint64_t frames[PAGES], other[PAGES];
	char *p;

	lend_all(&s, &a, frames, 100);
	p = file_map_privately(s.f);
	for (int i = 0; i < PAGES; i++)
		CHECK(holds(at(p, i), 100 + i) && holds(at(a.m, i), 100 + i));
	at(p, 5)[0] = 'x';
	CHECK(!fallocate(s.f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGES / 2 * PAGE));
	CHECK(pages_of(&s) == PAGES / 2);
	for (int i = 0; i < PAGES; i++) {
		int gone = i < PAGES / 2 && i != 5;

		CHECK(holds(at(a.m, i), 100 + i) && holds(at(p, i), gone ? 0 : 100 + i) == (i != 5));
		CHECK((memory_at(at(a.m, i)) == memory_at(at(p, i))) == (i >= PAGES / 2));
	}
	/* New pages there are other frames; those of before can be had still. */
	for (int i = 0; i < PAGES / 2; i++) {
		fill(at(s.m, i), 300 + i);
		other[i] = 0;
		CHECK(!merge(&s, i, &other[i]) && other[i] != frames[i]);
		fill(at(b.m, i), 100 + i);
		CHECK(!merge(&b, i, &frames[i]));
	}
	for (int i = 0; i < PAGES; i++) {
		CHECK(holds(at(a.m, i), 100 + i) && holds(at(b.m, i), i < PAGES / 2 ? 100 + i : 0));
		if (i != 5)
			CHECK(holds(at(p, i), (i < PAGES / 2 ? 300 : 100) + i));
	}
	CHECK(frames_of(&a) == PAGES + PAGES / 2);
	/* All of it is punched, and written anew; then the file ends. */
	CHECK(!fallocate(s.f.fd, FALLOC_FL_ZERO_RANGE, 0, PAGES * PAGE));
	CHECK(frames_of(&a) == PAGES);
	for (int i = 0; i < PAGES; i++) {
		CHECK(holds(at(s.m, i), 0) && holds(at(a.m, i), 100 + i));
		fill(at(s.m, i), 500 + i);
		other[i] = 0;
		CHECK(!merge(&s, i, &other[i]));
		fill(at(b.m, i), 500 + i);
		CHECK(!merge(&b, i, &other[i]));
		CHECK(holds(at(b.m, i), 500 + i) && (i == 5 || holds(at(p, i), 500 + i)));
	}
	munmap(p, PAGES * PAGE);
	area_close(&s, 0);
	for (int i = 0; i < PAGES; i++)
		CHECK(holds(at(a.m, i), 100 + i) && holds(at(b.m, i), 500 + i));
	CHECK(frames_of(&a) == 2 * PAGES);
	for (int i = 0; i < PAGES; i++) {
		at(a.m, i)[0]++;
		at(b.m, i)[0]++;
	}
	CHECK(frames_of(&a) == 0);
	area_close(&a, "/lend-a");
	area_close(&b, "/lend-b");
}

/* What moves, swaps and collects pages leaves those alone that are lent. */
static void lend_stays(void)
{
	enum { HUGE = 512 };
	struct lender a = guest_make("/lend-a", HUGE), s = store_make(&a, HUGE);
	static uint64_t frames[HUGE], memory[HUGE];
	char *p = file_map_privately(s.f);

	/* Of a huge page, where there can be one. */
	fill(s.m, 1);
	if (!madvise(s.m, HUGE * PAGE, MADV_COLLAPSE))
		printf("    the store has a huge page\n");
	lend_all(&s, &a, frames, 100);
	for (int i = 0; i < HUGE; i++) {
		CHECK(holds(at(p, i), 100 + i) && holds(at(a.m, i), 100 + i));
		memory[i] = memory_at(at(a.m, i));
	}
	CHECK(madvise(s.m, HUGE * PAGE, MADV_COLLAPSE));
	madvise(p, HUGE * PAGE, MADV_PAGEOUT);
	madvise(s.m, HUGE * PAGE, MADV_PAGEOUT);
	path_write("/proc/sys/vm/compact_memory", "1");
	path_write("/proc/sys/vm/drop_caches", "3");
	pid_t child = fork_child();

	if (!child) {
		for (int i = 0; i < HUGE; i++)
			CHECK(holds(at(p, i), 100 + i) && holds(at(a.m, i), 100 + i));
		at(p, 7)[0]++;
		CHECK(holds(at(s.m, 7), 107) && holds(at(a.m, 7), 107));
		_exit(0);
	}
	waitpid(child, 0, 0);
	for (int i = 0; i < HUGE; i++) {
		CHECK(holds(at(a.m, i), 100 + i) && holds(at(p, i), 100 + i) && holds(at(s.m, i), 100 + i));
		CHECK(memory_at(at(a.m, i)) == memory[i] && memory_at(at(p, i)) == memory[i]);
	}
	munmap(p, HUGE * PAGE);
	area_close(&s, 0);
	path_write("/proc/sys/vm/compact_memory", "1");
	path_write("/proc/sys/vm/drop_caches", "3");
	for (int i = 0; i < HUGE; i++)
		CHECK(holds(at(a.m, i), 100 + i));
	area_close(&a, "/lend-a");
}

/* ---- all at once ------------------------------------------------------------------------- */

static int stop(void)
{
	return __atomic_load_n(&sh->stop, __ATOMIC_RELAXED);
}

/* A slot's turn: odd while the daemon punches it and writes it anew. */
static uint32_t *turns;
static long *merged;

static uint32_t turn_of(int slot)
{
	return __atomic_load_n(&turns[slot], __ATOMIC_SEQ_CST);
}

/* A process with an agent: reads, forks, and writes what is its own then. */
static void agent(struct lender *s)
{
	uint64_t x = getpid();

	while (!stop()) {
		char *p = file_map_privately(s->f);

		for (int n = 0; n < 200; n++) {
			int i = (x = mix(x)) % PAGES;
			uint32_t turn = turn_of(i);
			int right = holds(at(p, i), i + 1);

			if (!right && turn % 2 == 0 && turn_of(i) == turn)
				BAD("page %d of the store is wrong", i);
			__atomic_add_fetch(&sh->checks, 1, __ATOMIC_RELAXED);
		}
		for (int i = 0; i < PAGES; i += 16)
			at(p, i)[8]++;
		pid_t child = fork_child();

		if (!child)
			_exit(0);
		munmap(p, PAGES * PAGE);
		waitpid(child, 0, 0);
	}
}

/* A guest: what it has written is there until it writes again. `want` says what that is. */
static void guest(struct lender *a, uint8_t *want)
{
	uint64_t x = getpid();

	while (!stop()) {
		int i = (x = mix(x)) % PAGES;

		if (!holds(at(a->m, i), want[i]))
			BAD("page %d does not hold %d", i, want[i]);
		__atomic_add_fetch(&sh->checks, 1, __ATOMIC_RELAXED);
		if (x >> 62)
			continue;
		want[i] = 1 + (x >> 32) % PAGES;
		fill(at(a->m, i), want[i]);
		__atomic_add_fetch(&sh->writes, 1, __ATOMIC_RELAXED);
	}
}

/* The slot is this process's alone, until its turn ends. False: it is another's. */
static int turn_begin(int slot)
{
	uint32_t turn = turn_of(slot);

	return turn % 2 == 0 && __atomic_compare_exchange_n(&turns[slot], &turn, turn + 1, 0, 5, 5);
}

static void turn_end(int slot)
{
	__atomic_add_fetch(&turns[slot], 1, __ATOMIC_SEQ_CST);
}

/* Slot i of the store holds content i + 1: the guests' pages are merged with it. */
static void merger(struct lender *s, struct lender *guests, uint8_t *wants)
{
	uint64_t x = getpid();

	while (!stop()) {
		int g = (x = mix(x)) & 1, i = (x >> 8) % PAGES, slot = (wants[g * PAGES + i] + PAGES - 1) % PAGES;
		uint64_t frame = 0;
		int ret;

		if (!turn_begin(slot))
			continue;
		ret = merge_in(s->control, s->f, slot, &frame);
		turn_end(slot);
		if (ret && ret != -EEXIST)
			continue;
		ret = merge_in(guests[g].control, guests[g].f, i, &frame);
		if (ret && ret != -EEXIST && ret != -ESTALE && ret != -EBUSY && ret != -EAGAIN && ret != -ENOENT)
			BAD("merge says %s", strerror(-ret));
		if (!ret)
			__atomic_add_fetch(merged, 1, __ATOMIC_RELAXED);
	}
}

/* The daemon: slots are punched, and written anew. */
static void daemon_of(struct lender *s)
{
	uint64_t x = getpid();

	while (!stop()) {
		int slot = (x = mix(x)) % PAGES;

		if (!turn_begin(slot))
			continue;
		CHECK(!fallocate(s->f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, slot * PAGE, PAGE));
		fill(at(s->m, slot), slot + 1);
		turn_end(slot);
		if (x >> 60 == 0)
			path_write("/proc/sys/vm/compact_memory", "1");
	}
}

static void lend_hammer(void)
{
	struct lender guests[2] = { guest_make("/lend-a", PAGES), guest_make("/lend-b", PAGES) };
	struct lender s = store_make(&guests[0], PAGES);
	char *both = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint8_t *wants = (uint8_t *)both;
	pid_t children[7];
	int n = 0;

	turns = (uint32_t *)at(both, 1);
	merged = (long *)at(both, 1) + 256;
	for (int i = 0; i < PAGES; i++)
		fill(at(s.m, i), i + 1);
	for (int g = 0; g < 2; g++)
		if (!(children[n++] = fork_child()))
			guest(&guests[g], wants + g * PAGES), _exit(0);
	for (int k = 0; k < 2; k++) {
		if (!(children[n++] = fork_child()))
			agent(&s), _exit(0);
		if (!(children[n++] = fork_child()))
			merger(&s, guests, wants), _exit(0);
	}
	if (!(children[n++] = fork_child()))
		daemon_of(&s), _exit(0);
	sleep(8);
	__atomic_store_n(&sh->stop, 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < n; i++)
		waitpid(children[i], 0, 0);
	printf("    lend_hammer: %ld merged, %ld checks, %ld writes\n", *merged, sh->checks, sh->writes);
	CHECK(*merged > 100);
	area_close(&s, 0);
	for (int g = 0; g < 2; g++)
		for (int i = 0; i < PAGES; i++)
			CHECK(holds(at(guests[g].m, i), wants[g * PAGES + i]));
	area_close(&guests[0], "/lend-a");
	area_close(&guests[1], "/lend-b");
}

const struct test lend_tests[] = {
	{ "lend", lend },
	{ "slots", slots },
	{ "lend_cut", lend_cut },
	{ "lend_stays", lend_stays },
	{ "lend_hammer", lend_hammer },
	{ 0, 0 },
};
