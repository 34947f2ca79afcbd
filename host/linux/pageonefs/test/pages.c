// SPDX-License-Identifier: GPL-2.0
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "pages.h"

struct shared *sh;

uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

/* Words [from, to) of a page. */
void fill_words(void *page, uint64_t content, int from, int to)
{
	uint64_t x = content ? mix(content) : 0;
	int i;

	for (i = 0; i < to; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		if (i >= from)
			((volatile uint64_t *)page)[i] = x;
	}
}

void fill(void *page, uint64_t content)
{
	fill_words(page, content, 0, 512);
}

int holds(const void *page, uint64_t content)
{
	uint64_t want[512];

	fill(want, content);
	return !memcmp(page, want, PAGE);
}

double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

struct file file_make(uint32_t pages)
{
	struct file f = { open(MOUNT, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600), 0, pages };

	if (f.fd < 0 || ftruncate(f.fd, pages * PAGE))
		BAD("a file of %u pages", pages);
	f.id = id_of(f.fd);
	return f;
}

static char *map(struct file f, int flags)
{
	char *m = mmap(0, f.pages * PAGE, PROT_READ | PROT_WRITE, flags, f.fd, 0);

	if (m == MAP_FAILED)
		BAD("mmap");
	return m;
}

char *file_map(struct file f)
{
	return map(f, MAP_SHARED);
}

char *file_map_privately(struct file f)
{
	return map(f, MAP_PRIVATE);
}

int path_write(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY), ret = fd < 0 || write(fd, value, strlen(value)) < 0;

	if (fd >= 0)
		close(fd);
	return ret ? -errno : 0;
}

/* The number behind a name, in a file of lines; -1: not there. */
long path_number(const char *path, const char *name)
{
	char line[256], n[64];
	long v, found = -1;
	FILE *f = fopen(path, "r");

	while (f && found < 0 && fgets(line, sizeof(line), f))
		if (sscanf(line, "%63[^: ]%*[: ]%ld", n, &v) == 2 && !strcmp(n, name))
			found = v;
	if (f)
		fclose(f);
	return found;
}

/* ---- memory that may have SIGBUS ------------------------------------------------------ */

static __thread sigjmp_buf jump;
static __thread volatile int guarded;

static void on_fault(int s, siginfo_t *info, void *unused)
{
	(void)unused;
	if (!guarded) {
		BAD("signal %d, code %d, at %p", s, info->si_code, info->si_addr);
		_exit(1);
	}
	siglongjmp(jump, s);
}

void catch_faults(void)
{
	struct sigaction a = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };

	sigaction(SIGBUS, &a, NULL);
	sigaction(SIGSEGV, &a, NULL);
}

/* As memcpy(), memcmp() and madvise(), of memory that may have SIGBUS. */
int copy_guarded(void *to, const void *from, size_t len)
{
	if (sigsetjmp(jump, 1)) {
		guarded = 0;
		return -1;
	}
	guarded = 1;
	memcpy(to, from, len);
	guarded = 0;
	return 0;
}

int compare_guarded(const void *a, const void *b, size_t len)
{
	int ret;

	if (sigsetjmp(jump, 1)) {
		guarded = 0;
		return -1;
	}
	guarded = 1;
	ret = memcmp(a, b, len) != 0;
	guarded = 0;
	return ret;
}

int advise_guarded(void *at, size_t len, int advice)
{
	int ret;

	if (sigsetjmp(jump, 1)) {
		guarded = 0;
		return -1;
	}
	guarded = 1;
	ret = madvise(at, len, advice);
	guarded = 0;
	return ret;
}

/* ---- control ---------------------------------------------------------------------- */

int control_open(const char *mount)
{
	static int fd = -1;

	if (!strcmp(mount, MOUNT) && fd >= 0)
		return fd;
	int new = open(mount, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (new < 0)
		BAD("open %s", mount);
	if (!strcmp(mount, MOUNT))
		fd = new;
	return new;
}

struct pageonefs_stats stats(void)
{
	struct pageonefs_stats s = { 0 };

	if (ioctl(control_open(MOUNT), PAGEONEFS_STATS, &s))
		BAD("stats");
	return s;
}

struct pageonefs_file describe(uint64_t id)
{
	struct pageonefs_file f = { 0 };
	struct pageonefs_list l = { .after = id - 1, .files = (uintptr_t)&f, .room = 1 };

	if (ioctl(control_open(MOUNT), PAGEONEFS_LIST, &l) || l.filled != 1 || f.id != id)
		BAD("file %lu is not listed", (long)id);
	return f;
}

uint64_t id_of(int fd)
{
	struct pageonefs_file files[64];
	struct pageonefs_list l = { .files = (uintptr_t)files, .room = 64 };
	struct stat st;

	fstat(fd, &st);
	do {
		if (ioctl(control_open(MOUNT), PAGEONEFS_LIST, &l))
			BAD("list");
		for (uint32_t i = 0; i < l.filled; i++) {
			if (files[i].inode == st.st_ino)
				return files[i].id;
			l.after = files[i].id;
		}
	} while (l.filled);
	BAD("no id of inode %lu", (long)st.st_ino);
	return 0;
}

int digests(struct file f, uint64_t *out)
{
	struct pageonefs_digest d = { .id = f.id, .pages = f.pages, .out = (uintptr_t)out, .seed = 7 };

	if (ioctl(control_open(MOUNT), PAGEONEFS_DIGEST, &d) && errno != ESRCH)
		BAD("digest");
	return d.digested;
}

int harvest(struct file f, uint64_t *bits)
{
	struct pageonefs_harvest h = { .id = f.id, .pages = (f.pages + 63) & ~63u, .bits = (uintptr_t)bits };

	if (ioctl(control_open(MOUNT), PAGEONEFS_HARVEST, &h))
		BAD("harvest");
	return h.dirty;
}

int merge_in(int mount, struct file f, uint32_t index, uint64_t *frame)
{
	struct pageonefs_entry e = { .index = index, .frame = *frame };
	struct pageonefs_merge m = { .id = f.id, .entries = (uintptr_t)&e, .count = 1 };

	if (ioctl(mount, PAGEONEFS_MERGE, &m))
		BAD("merge");
	*frame = e.frame;
	return e.result;
}

int merge_page(struct file f, uint32_t index, uint64_t *frame)
{
	return merge_in(control_open(MOUNT), f, index, frame);
}

int merge_patiently(int mount, struct file f, uint32_t index, uint64_t *frame)
{
	uint64_t handle = *frame;
	int ret = -EBUSY;

	for (int tries = 0; tries < 200 && (ret == -EBUSY || ret == -EAGAIN); tries++) {
		if (tries > 10)
			usleep(5000);
		*frame = handle;
		ret = merge_in(mount, f, index, frame);
	}
	return ret;
}

/* The bits of the pages that stay. */
uint64_t punch(struct file f, uint32_t start, uint32_t pages)
{
	uint64_t held = 0;
	struct pageonefs_punch p = { .id = f.id, .start = start, .pages = pages, .held = (uintptr_t)&held };

	if (ioctl(control_open(MOUNT), PAGEONEFS_PUNCH, &p) || p.stayed != (uint64_t)__builtin_popcountll(held))
		BAD("punch of %u pages from %u", pages, start);
	return held;
}

/* A process that ends with this one. */
pid_t fork_child(void)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	return pid;
}

/* ---- what a daemon does -------------------------------------------------------------- */

/* Digest -> how many pages, and their frame. */
#define SLOTS (1 << 18)
struct slot {
	uint64_t digest, frame;
	uint32_t count;
};
static struct slot *slots;
static uint32_t used;

static struct slot *slot_find(uint64_t digest)
{
	uint32_t i = mix(digest) % SLOTS;

	while (slots[i].digest && slots[i].digest != digest)
		i = (i + 1) % SLOTS;
	used += !slots[i].digest;
	slots[i].digest = digest;
	return &slots[i];
}

static void merge_batch(struct file f, struct pageonefs_entry *e, struct slot **of, uint32_t n, uint32_t *merged)
{
	struct pageonefs_merge m = { .id = f.id, .entries = (uintptr_t)e, .count = n };

	if (!n)
		return;
	/* A file may have gone. */
	if (ioctl(control_open(MOUNT), PAGEONEFS_MERGE, &m) && errno != ESRCH)
		BAD("merge");
	*merged += m.merged;
	for (uint32_t i = 0; i < n; i++) {
		if (!e[i].result)
			of[i]->frame = e[i].frame;
		else if (e[i].result == -ENOENT || e[i].result == -EMLINK)
			of[i]->frame = 0;
		else if (e[i].result != -EBUSY && e[i].result != -EAGAIN && e[i].result != -EEXIST && e[i].result != -ESTALE)
			BAD("page %lu: merge says %s", (long)e[i].index, strerror(-e[i].result));
	}
}

int merge_round(struct file f)
{
	enum { BATCH = 4096 };
	static struct pageonefs_entry *e;
	static struct slot **of;
	uint64_t *d = calloc(f.pages, 8);
	uint32_t merged = 0, n, pass, i;

	if (!slots || used > SLOTS / 4) {
		free(slots);
		slots = calloc(SLOTS, sizeof(*slots));
		used = 0;
	}
	if (!e) {
		e = malloc(sizeof(*e) * BATCH);
		of = malloc(sizeof(*of) * BATCH);
	}
	digests(f, d);
	for (i = 0; i < f.pages; i++)
		if (d[i] > PAGEONEFS_PAGE_AWAY && !(d[i] & 1))
			slot_find(d[i])->count++;
	/* First one page of each content that has no frame, then the others. */
	for (pass = 0; pass < 2; pass++) {
		for (i = n = 0; i < f.pages; i++) {
			struct slot *s;

			if (d[i] <= PAGEONEFS_PAGE_AWAY || d[i] & 1)
				continue;
			s = slot_find(d[i]);
			if (!pass && (s->frame || s->count < 2))
				continue;
			if (pass && !s->frame)
				continue;
			if (!pass)
				s->count = 0;
			e[n] = (struct pageonefs_entry){ .index = i, .frame = s->frame };
			of[n++] = s;
			if (n == BATCH) {
				merge_batch(f, e, of, n, &merged);
				n = 0;
			}
		}
		merge_batch(f, e, of, n, &merged);
	}
	for (i = 0; i < f.pages; i++)
		if (d[i] > PAGEONEFS_PAGE_AWAY && !(d[i] & 1))
			slot_find(d[i])->count = 0;
	free(d);
	return merged;
}

void all_merged(struct file f, char *memory, uint64_t content)
{
	int merged, tries;

	for (uint32_t i = 0; i < f.pages; i++)
		fill(at(memory, i), content);
	/* Pages that another processor has just made are in its batches, for a while. */
	for (tries = 0; tries < 50 && describe(f.id).merged_pages != f.pages; tries++) {
		merged = merge_round(f);
		if (!merged)
			usleep(20000);
	}
	if (describe(f.id).merged_pages != f.pages)
		BAD("%lu of %u pages are merged", (long)describe(f.id).merged_pages, f.pages);
}

void say(const char *test)
{
	struct pageonefs_stats s = stats();

	printf("    %s: merges %lu moves %lu copies %lu busy %lu differ %lu late %lu frame faults %lu around %lu first writes %lu frames %lu; checks %ld writes %ld bad %d\n",
	       test, (long)s.merges, (long)s.moves, (long)s.copies, (long)s.busy, (long)s.differ, (long)s.late,
	       (long)s.frame_faults, (long)s.around, (long)s.first_writes, (long)s.frames, sh->checks, sh->writes, sh->bad);
}
