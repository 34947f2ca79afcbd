// SPDX-License-Identifier: GPL-2.0
/*
 * The accounts, looked at while nobody does anything: a walk of all pages says what each has to be.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "fuzz-accounts.h"

#define FRAMES	(1 << 13)
#define SLACK	128	/* pages of a cgroup: what processors have taken ahead, and small things */

/* A frame, as the pages' words name it. */
struct frame {
	uint64_t handle, pfn;
	uint32_t entries, mapped;
	uint8_t of;		/* tenants that use it */
};

static struct {
	int control[TENANTS];
	/* In pages: before any process, and before there is something in files. */
	long nothing, shmem, committed, length;
	long stat[TENANTS + 1];
} was;

/* What there is. */
static struct {
	long used[TENANTS], private[TENANTS], merged[TENANTS], listed_merged[TENANTS];
	long length;	/* of all files */
	bool plain[TENANTS];
	long frames[DOMAINS], charged[TENANTS];
	struct frame frame[DOMAINS][FRAMES];
	uint64_t words[TENANTS][TENANT_PAGES];
} is;

static char why[600];

static bool wrong(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	return false;
}

/* ---- what the kernel says --------------------------------------------------------------- */

struct number {
	char name[32];
	long value;
};

/* A file of lines "NAME[:] NUMBER". */
static int numbers(const char *path, struct number *n, int most)
{
	static char text[1 << 14];
	int fd = open(path, O_RDONLY | O_CLOEXEC), found = 0;
	long got, len = 0;

	while (fd >= 0 && (got = read(fd, text + len, sizeof(text) - 1 - len)) > 0)
		len += got;
	text[len] = 0;
	if (fd >= 0)
		close(fd);
	for (char *line = strtok(text, "\n"); line && found < most; line = strtok(NULL, "\n"))
		if (sscanf(line, "%31[^: ]%*[: ]%ld", n[found].name, &n[found].value) == 2)
			found++;
	return found;
}

static long number(const struct number *n, int found, const char *name)
{
	for (int i = 0; i < found; i++)
		if (!strcmp(n[i].name, name))
			return n[i].value;
	return 0;
}

static long one_number(const char *path)
{
	char text[32] = "";
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || read(fd, text, 31) < 0)
		text[0] = 0;
	if (fd >= 0)
		close(fd);
	return atol(text);
}

long group_stat(const char *group, const char *name)
{
	char path[128];

	snprintf(path, sizeof(path), GROUPS "/%s/%s", group, name);
	return one_number(path);
}

/*
 * Pages that a cgroup pays for, but for its processes' own memory and the kernel's small objects:
 * pages of files, and frames.
 */
static long charged(const char *group)
{
	static const char *const others[] = {
		"anon", "kernel_stack", "pagetables", "sec_pagetables", "percpu", "slab", "sock", "vmalloc",
	};
	struct number n[128];
	char path[128];
	long bytes;
	int found;

	/* Processors count by themselves, and memory.stat adds up only when it is much: this does it. */
	group_stat(group, "cpu.stat");
	bytes = group_stat(group, "memory.current");
	snprintf(path, sizeof(path), GROUPS "/%s/memory.stat", group);
	found = numbers(path, n, 128);
	for (unsigned int i = 0; i < sizeof(others) / sizeof(*others); i++)
		bytes -= number(n, found, others[i]);
	return bytes / (long)PAGE;
}

static long away(const char *group)
{
	struct number n[128];
	char path[128];

	snprintf(path, sizeof(path), GROUPS "/%s/memory.stat", group);
	return number(n, numbers(path, n, 128), "swapcached") / (long)PAGE;
}

static void group_of(int i, char *name)
{
	if (i < TENANTS)
		sprintf(name, "t%d", i);
	else
		strcpy(name, "daemon");
}

/* What processors have taken ahead goes back: where a limit is passed, that comes first. */
void accounts_drain(void)
{
	char name[16];

	for (int i = 0; i <= TENANTS; i++) {
		group_of(i, name);
		group_write(name, "memory.high", group_stat(name, "memory.current") - 16 * PAGE);
		group_write(name, "memory.high", -1);
	}
}

/* In pages. */
static void machine(long *shmem, long *committed)
{
	struct number n[128];
	int found = numbers("/proc/meminfo", n, 128);

	*shmem = number(n, found, "Shmem") / 4;
	*committed = number(n, found, "Committed_AS") / 4;
}

/* ---- the walk --------------------------------------------------------------------------- */

static struct frame *frame_of(int domain, uint64_t handle)
{
	uint32_t i = mix(handle) % FRAMES;

	while (is.frame[domain][i].handle && is.frame[domain][i].handle != handle)
		i = (i + 1) % FRAMES;
	if (!is.frame[domain][i].handle) {
		is.frame[domain][i].handle = handle;
		is.frames[domain]++;
	}
	return &is.frame[domain][i];
}

static void walk_file(int t, const struct pageonefs_file *f)
{
	uint64_t d[SHARED_PAGES];
	uint32_t pages = f->size / PAGE < SHARED_PAGES ? f->size / PAGE : SHARED_PAGES;
	struct pageonefs_digest digest = { .id = f->id, .pages = pages, .out = (uintptr_t)d, .seed = 7 };
	struct pageonefs_harvest h = { .id = f->id, .pages = SHARED_PAGES };

	/* Who uses a frame comes to pay for it. */
	for (int i = 0; i < 2; i++)
		if (ioctl(was.control[t], PAGEONEFS_HARVEST, &h) && !w->faults)
			BAD("harvest");
	if (pages && ioctl(was.control[t], PAGEONEFS_DIGEST, &digest))
		BAD("digest");
	is.plain[t] |= f->plain;
	is.length += (f->size + PAGE - 1) / PAGE;
	/* Also those that have no content yet. */
	is.private[t] += f->private_pages;
	is.used[t] += f->private_pages;
	is.listed_merged[t] += f->merged_pages;
	for (uint32_t i = 0; i < pages; i++) {
		is.used[t] += d[i] & 1 || d[i] == PAGEONEFS_PAGE_AWAY;
		if (d[i] & 1) {
			struct frame *frame = frame_of(DOMAIN_OF(t), d[i] / 2);

			is.merged[t]++;
			frame->entries++;
			frame->of |= 1 << t;
		}
	}
	for (int k = 0; k <= WORKERS; k++)
		if (f->inode == w->inode[t][k])
			memcpy(is.words[t] + (k ? SHARED_PAGES + (k - 1) * OWN_PAGES : 0), d, pages * 8);
}

static void walk(void)
{
	struct pageonefs_file files[16];
	struct stat st;
	char path[64];

	/* tmpfs counts pages that reclaim has dropped, zeros that were only read, until it is asked. */
	for (int h = 0; h < HANDS * 2; h++) {
		snprintf(path, sizeof(path), "/proc/%d/fd/%d", w->pid[h / 2], w->fd[h / 2][h % 2]);
		stat(path, &st);
	}
	memset(&is, 0, sizeof(is));
	for (int t = 0; t < TENANTS; t++) {
		struct pageonefs_list l = { .files = (uintptr_t)files, .room = 16 };

		do {
			if (ioctl(was.control[t], PAGEONEFS_LIST, &l))
				BAD("list");
			for (uint32_t i = 0; i < l.filled; i++) {
				walk_file(t, &files[i]);
				l.after = files[i].id;
			}
		} while (l.filled);
	}
}

/* Before there are processes; and again, before they fill files. */
void accounts_begin(bool processes)
{
	char path[64], name[16];

	machine(&was.shmem, processes ? &was.committed : &was.nothing);
	if (processes) {
		long sum = LONG_MAX, before;

		/* Without what processors have taken ahead: that goes back some day. */
		do {
			before = sum;
			usleep(100000);
			accounts_drain();
			sum = 0;
			for (int i = 0; i <= TENANTS; i++) {
				group_of(i, name);
				was.stat[i] = charged(name);
				sum += was.stat[i];
			}
		} while (sum < before);
		walk();
		was.length = is.length;
		return;
	}
	/* The shared files' lengths. */
	was.nothing -= TENANTS * SHARED_PAGES;
	for (int t = 0; t < TENANTS; t++) {
		mount_path(path, t);
		was.control[t] = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (was.control[t] < 0)
			BAD("open %s", path);
	}
}

/* ---- what has to hold ------------------------------------------------------------------- */

static bool mounts_are_right(void)
{
	for (int t = 0; t < TENANTS; t++) {
		struct pageonefs_stats s = { 0 };
		struct statfs f;
		char path[64];
		long left = w->size[t] - is.used[t];

		mount_path(path, t);
		if (statfs(path, &f) || ioctl(was.control[t], PAGEONEFS_STATS, &s))
			return wrong("statfs, or STATS: %s", strerror(errno));
		if ((long)f.f_blocks != w->size[t])
			return wrong("mount %d has %ld blocks, not %u", t, (long)f.f_blocks, w->size[t]);
		/* Some threads may be in a race; and on 6.1 faults of plain files are tmpfs's own. */
		if ((long)f.f_bfree != left && !(left < 0 && (left > -2 * WORKERS || is.plain[t]) && !f.f_bfree))
			return wrong("mount %d has %ld free blocks of %u, and %ld pages are there (%ld of them merged)", t, (long)f.f_bfree, w->size[t],
				     is.used[t], is.merged[t]);
		if (is.listed_merged[t] != is.merged[t] || (long)s.merged_pages != is.merged[t])
			return wrong("mount %d: %ld merged pages by LIST, %ld by STATS, %ld by DIGEST", t, is.listed_merged[t], (long)s.merged_pages,
				     is.merged[t]);
		if ((long)s.frames != is.frames[DOMAIN_OF(t)])
			return wrong("mount %d: %ld frames by STATS, %ld by DIGEST", t, (long)s.frames, is.frames[DOMAIN_OF(t)]);
	}
	return true;
}

/*
 * Who pays: each page once, by one who has it; or, while somebody may have no room, by one who made
 * it.
 */
static bool charges_are_right(void)
{
	long sum = 0, private = 0, frames = is.frames[0] + is.frames[1], slack, out = 0;
	long may[TENANTS] = { 0 };
	char name[16];

	for (int d = 0; d < DOMAINS; d++)
		for (int i = 0; i < FRAMES; i++)
			for (int t = 0; is.frame[d][i].handle && t < TENANTS; t++)
				may[t] += is.frame[d][i].of >> t & 1 ||
					  (w->tight >= 0 && w->maker[d][is.frame[d][i].handle & 0xffff] == t + 1);
	for (int t = 0; t < TENANTS; t++) {
		long here;

		group_of(t, name);
		here = charged(name) - was.stat[t];
		is.charged[t] = here;
		sum += here;
		out += away(name);
		private += is.private[t];
		slack = SLACK + (is.private[t] + may[t]) / 20;
		if (here > is.private[t] + may[t] + slack + away(name))
			return wrong("tenant %d is charged %ld pages: it has %ld of its own, and may pay for %ld frames", t, here, is.private[t], may[t]);
		if (here < is.private[t] - slack)
			return wrong("tenant %d is charged %ld pages: it has %ld of its own", t, here, is.private[t]);
	}
	if (charged("daemon") - was.stat[TENANTS] > SLACK)
		return wrong("the daemon is charged %ld pages that are not its own memory; there are %ld frames", charged("daemon") - was.stat[TENANTS],
			     frames);
	slack = SLACK + (private + frames) / 20;
	if (sum < private + frames - slack || sum > private + frames + slack + out)
		return wrong("tenants are charged %ld pages (%ld, %ld, %ld): they have %ld of their own and %ld frames", sum, is.charged[0],
			     is.charged[1], is.charged[2], private, frames);
	return true;
}

static bool machine_is_right(void)
{
	long shmem, committed, private = 0, merged = 0, used = 0, frames = is.frames[0] + is.frames[1];

	machine(&shmem, &committed);
	for (int t = 0; t < TENANTS; t++) {
		private += is.private[t];
		merged += is.merged[t];
		used += is.used[t];
	}
	shmem -= was.shmem;
	if (labs(shmem - private - frames) > 256 + (private + frames) / 20)
		return wrong("meminfo has %ld pages of shared memory: %ld are private, and %ld frames", shmem, private, frames);
	/* All of a file's length is committed: so no page of it fails for that. */
	committed -= was.committed - was.length;
	if (labs(committed - is.length) > 256)
		return wrong("%ld pages are committed: files are %ld pages long, %ld are there, %ld of them merged", committed, is.length, used,
			     merged);
	return true;
}

/* Users of frames, and their mappings. */
static bool frames_are_right(const pid_t *pids)
{
	uint64_t entry[SHARED_PAGES], count;
	int kpagecount = open("/proc/kpagecount", O_RDONLY | O_CLOEXEC), looked = 0;
	bool right = true;

	for (int h = 0; h < HANDS; h++) {
		int t = h / WORKERS, fd;
		char path[64];

		snprintf(path, sizeof(path), "/proc/%d/pagemap", pids[h]);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		for (int file = 0; fd >= 0 && file < 2; file++) {
			uint32_t n = file ? OWN_PAGES : SHARED_PAGES;
			const uint64_t *words = is.words[t] + (file ? SHARED_PAGES + h % WORKERS * OWN_PAGES : 0);

			if (pread(fd, entry, n * 8, (uintptr_t)w->map[h][file] / PAGE * 8) != (long)(n * 8))
				continue;
			for (uint32_t i = 0; i < n; i++) {
				uint64_t pfn = entry[i] & ((1ull << 55) - 1);
				struct frame *f;

				if (!(entry[i] >> 63) || !pfn || !(words[i] & 1))
					continue;
				f = frame_of(DOMAIN_OF(t), words[i] / 2);
				if (f->pfn && f->pfn != pfn)
					right = wrong("frame %lx of domain %d is mapped as two pages", (long)f->handle, DOMAIN_OF(t));
				f->pfn = pfn;
				f->mapped++;
			}
		}
		if (fd >= 0)
			close(fd);
	}
	for (int d = 0; right && d < DOMAINS; d++)
		for (int i = 0; right && i < FRAMES; i++) {
			struct frame *f = &is.frame[d][i];

			if (f->entries > w->max_users)
				right = wrong("a frame of domain %d has %u users: it may have %u", d, f->entries, w->max_users);
			if (!f->pfn || looked++ >= 200 || pread(kpagecount, &count, 8, f->pfn * 8) != 8)
				continue;
			if (count != f->mapped)
				right = wrong("a frame of domain %d has %ld mappings by kpagecount, and %u are there", d, (long)count, f->mapped);
		}
	close(kpagecount);
	return right;
}

const char *accounts_wrong(const pid_t *pids, long *used)
{
	walk();
	memcpy(used, is.used, sizeof(is.used));
	if (mounts_are_right() && frames_are_right(pids) && machine_is_right() && charges_are_right())
		return NULL;
	return why;
}

/*
 * What was written, or allocated, is there. Where a hole was read may be a page, until memory is
 * short; elsewhere is none, unless who was killed had just read there.
 */
void models_agree(void)
{
	static long kills;
	bool sure = !w->faults && w->kills == kills;

	kills = w->kills;
	for (int t = 0; t < TENANTS; t++)
		for (uint32_t i = 0; i < TENANT_PAGES; i++) {
			struct model *p = &w->pages[t][i];
			bool there = is.words[t][i] != PAGEONEFS_PAGE_NONE;

			if (p->here == HERE_YES && !there)
				BAD("page %u of tenant %d has gone; before: %s in round %d", i, t, p->deed, p->round);
			if (p->here == HERE_NO && there && !p->looked && sure)
				BAD("page %u of tenant %d has come by itself; before: %s in round %d", i, t, p->deed, p->round);
			p->looked = false;
			if (p->here != HERE_YES)
				p->here = there ? HERE_MAYBE : HERE_NO;
		}
}

/* All files are gone, and all processes. */
const char *accounts_left(void)
{
	long shmem, committed;
	char name[16];

	walk();
	machine(&shmem, &committed);
	for (int t = 0; t < TENANTS; t++)
		if (is.used[t])
			return wrong("mount %d still has %ld pages", t, is.used[t]), why;
	if (!mounts_are_right())
		return why;
	for (int i = 0; i <= TENANTS; i++) {
		group_of(i, name);
		if (charged(name) - was.stat[i] > SLACK)
			return wrong("%s is still charged %ld pages", name, charged(name) - was.stat[i]), why;
	}
	if (labs(committed - was.nothing) > 64)
		return wrong("%ld pages are committed more than before", committed - was.nothing), why;
	if (shmem > was.shmem + 256)
		return wrong("%ld pages of shared memory are left", shmem - was.shmem), why;
	return NULL;
}
