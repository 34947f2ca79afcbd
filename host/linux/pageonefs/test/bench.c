// SPDX-License-Identifier: GPL-2.0
/*
 * bench ksm|pageonefs random|clones|zero PAGES PROCESSES: merges the memory of some processes,
 * and says what it cost. Each line is "COST who kind what nanoseconds": in a guest with -icount
 * shift=0 these are instructions. scripts/lanes/pageonefs-bench.sh runs it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pages.h"

static uint32_t per, processes;
static const char *who, *kind;
static int ksm;

static uint64_t ns(clockid_t c)
{
	struct timespec t;

	clock_gettime(c, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}
#define CPU() ns(CLOCK_PROCESS_CPUTIME_ID)

static void die(const char *what)
{
	printf("BENCH-FAILED %s: %s\n", what, strerror(errno));
	exit(1);
}

static void cost(const char *what, uint64_t total, uint64_t pages)
{
	printf("COST %s %s %s %lu.%02lu\n", who, kind, what, (long)(total / pages), (long)(total * 100 / pages % 100));
}

/*
 * Which content page i of process p has; 0 is zeros. `random`: as many contents as a process has
 * pages.
 */
static uint64_t content(uint32_t p, uint32_t i)
{
	uint64_t any = !strcmp(kind, "clones") ? i : mix((uint64_t)p << 32 | i) % per;

	return strcmp(kind, "zero") ? any + 1 : 0;
}

static long number(const char *path)
{
	char b[64] = "";
	int fd = open(path, O_RDONLY);

	if (fd < 0 || read(fd, b, 63) < 0)
		return -1;
	close(fd);
	return atol(b);
}

static void set(const char *path, const char *value)
{
	if (path_write(path, value))
		die(path);
}

/* Kernel memory of the slabs that grow with merged pages, in bytes. */
static uint64_t slabs(void)
{
	static const char *names[] = { "radix_tree_node", "ksm_rmap_item", "ksm_stable_node", "ksm_mm_slot" };
	char line[512], n[64];
	uint64_t sum = 0, active, total, size;
	FILE *f = fopen("/proc/slabinfo", "r") ?: fopen("/dev/null", "r");

	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%63s %lu %lu %lu", n, &active, &total, &size) != 4)
			continue;
		for (unsigned int i = 0; i < sizeof(names) / sizeof(*names); i++)
			if (!strcmp(n, names[i]))
				sum += active * size;
	}
	fclose(f);
	return sum;
}

/* ---- the processes whose memory it is ------------------------------------------- */

struct child {
	pid_t pid;
	int to, from;
	struct file file;
};
static struct child children[16];

static uint64_t command(struct child *c, char what)
{
	uint64_t r = 0;

	if (write(c->to, &what, 1) != 1 || read(c->from, &r, 8) != 8)
		die("child");
	return r;
}

static uint64_t all(char what)
{
	uint64_t sum = 0;

	for (uint32_t p = 0; p < processes; p++)
		sum += command(&children[p], what);
	return sum;
}

static uint64_t write_pages(char *ram, int word, uint32_t from, uint32_t to, uint32_t step)
{
	uint64_t t = CPU();

	for (uint32_t i = from; i < to; i += step)
		((volatile uint64_t *)at(ram, i))[word] = 1;
	return CPU() - t;
}

static void child_main(uint32_t p, int in, int out, struct file f)
{
	char *ram = ksm ? mmap(0, per * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : file_map(f), what;
	uint64_t r = 1, sum = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	madvise(ram, per * PAGE, MADV_NOHUGEPAGE);
	for (uint32_t i = 0; i < per; i++)
		fill(at(ram, i), content(p, i));
	if (ksm && madvise(ram, per * PAGE, MADV_MERGEABLE))
		die("MADV_MERGEABLE");
	if (write(out, &r, 8) != 8)
		_exit(1);
	while (read(in, &what, 1) == 1) {
		r = CPU();
		switch (what) {
		case 'r': /* reads in sequence */
			for (uint32_t i = 0; i < per; i++)
				sum += *(volatile uint64_t *)at(ram, i);
			r = CPU() - r;
			break;
		case 'w': /* of the first half every fourth page, which was read before */
		case 's': /* every twentieth, which was written before */
			r = write_pages(ram, what == 'w' ? 511 : 510, 0, per / 2, what == 'w' ? 4 : 20);
			break;
		case 'q': /* the second half, in sequence */
			r = write_pages(ram, 511, per / 2, per, 1);
			break;
		case 'c':
			r = 0;
			for (uint32_t i = 0; i < per; i++)
				r += !holds(at(ram, i), content(p, i));
			break;
		}
		if (write(out, &r, 8) != 8)
			break;
	}
	_exit(sum == 1);
}

static void start(void)
{
	for (uint32_t p = 0; p < processes; p++) {
		struct child *c = &children[p];
		int a[2], b[2];
		uint64_t r;

		if (!ksm)
			c->file = file_make(per);
		if (pipe(a) || pipe(b))
			die("pipe");
		fflush(stdout);
		c->pid = fork();
		if (!c->pid)
			child_main(p, a[0], b[1], c->file);
		c->to = a[1];
		c->from = b[0];
		if (read(c->from, &r, 8) != 8)
			die("start");
	}
}

/* ---- KSM ------------------------------------------------------------------------ */

static uint64_t ksmd_time(void)
{
	static char path[64];
	char p[300], b[64] = "";
	struct dirent *e;
	DIR *d = path[0] ? NULL : opendir("/proc");

	while (d && (e = readdir(d))) {
		int fd;

		snprintf(p, sizeof(p), "/proc/%s/comm", e->d_name);
		fd = open(p, O_RDONLY);
		memset(b, 0, sizeof(b));
		if (fd >= 0 && read(fd, b, 31) > 0 && !strcmp(b, "ksmd\n"))
			snprintf(path, sizeof(path), "/proc/%.20s/schedstat", e->d_name);
		if (fd >= 0)
			close(fd);
	}
	if (d)
		closedir(d);
	int fd = open(path, O_RDONLY);

	if (fd < 0 || read(fd, b, 63) < 0)
		die("schedstat");
	close(fd);
	return strtoull(b, 0, 10);
}

#define KSM "/sys/kernel/mm/ksm/"

/* Returns the pages that are merged, those that stay as the one copy included. */
static uint64_t merge_by_ksm(uint64_t gone)
{
	uint64_t t = ksmd_time(), start = ns(CLOCK_MONOTONIC), merged;
	int zero = !strcmp(kind, "zero");

	set(KSM "sleep_millisecs", "0");
	set(KSM "pages_to_scan", "1000000");
	set(KSM "use_zero_pages", "1");
	set(KSM "run", "1");
	do {
		usleep(20000);
		merged = zero ? number(KSM "ksm_zero_pages") : number(KSM "pages_sharing");
	} while (merged < gone / 100 * 99 && ns(CLOCK_MONOTONIC) - start < 600000000000ull);
	t = ksmd_time() - t;
	set(KSM "run", "0");
	merged += zero ? 0 : number(KSM "pages_shared");
	cost("merge", t, merged);
	return merged;
}

/* ---- pageonefs ------------------------------------------------------------------ */

/*
 * As the daemon does: pages are digested and looked up; a content that comes again becomes a frame.
 * Where page after page held content after content, as these were seen, the next pages are merged
 * undigested. What turns out to be another content is digested.
 */
#define CHUNK	512
#define PROVEN	8
#define AHEAD	64

struct content {
	uint64_t frame;			/* 0: none yet */
	uint32_t process, page;		/* where it was seen first */
};
static struct content *contents;
static uint32_t seen, mask;

/* Digest -> content, counted from 1. */
struct slot {
	uint64_t digest;
	uint32_t content;
};
static struct slot *table;

struct prediction {
	uint32_t page, content;		/* the last */
	uint32_t step, len, ahead;
};

struct wanted {
	uint32_t page, content;
};

static uint64_t digesting, merging, merged_pages, digested_pages;

static struct slot *slot(uint64_t digest)
{
	uint32_t i = digest * 0x9e3779b97f4a7c15ull >> 32 & mask;

	while (table[i].digest && table[i].digest != digest)
		i = (i + 1) & mask;
	table[i].digest = digest;
	return &table[i];
}

static void merge_call(uint32_t p, struct pageonefs_entry *e, uint32_t n)
{
	struct pageonefs_merge m = { .id = children[p].file.id, .entries = (uintptr_t)e, .count = n };
	uint64_t t = CPU();

	if (n && ioctl(control_open(MOUNT), PAGEONEFS_MERGE, &m))
		die("merge");
	merging += CPU() - t;
	merged_pages += m.merged;
}

/* Makes frames of the pages in which contents were seen first, file by file. */
static void make_frames(struct wanted *w, uint32_t n)
{
	static struct pageonefs_entry e[CHUNK];
	uint32_t of[CHUNK], i, k, m;

	for (uint32_t p = 0; p < processes; p++) {
		for (i = m = 0; i < n; i++) {
			struct content *c = &contents[w[i].content];

			if (c->frame || c->process != p)
				continue;
			c->frame = 1;
			/* In ascending order. */
			for (k = m++; k && e[k - 1].index > c->page; k--) {
				e[k] = e[k - 1];
				of[k] = of[k - 1];
			}
			e[k] = (struct pageonefs_entry){ .index = c->page };
			of[k] = w[i].content;
		}
		if (!m)
			continue;
		merge_call(p, e, m);
		for (i = 0; i < m; i++)
			contents[of[i]].frame = e[i].result ? 0 : e[i].frame;
	}
}

/* Returns the first page that held another content, or `per`. */
static uint32_t merge_wanted(uint32_t p, struct wanted *w, uint32_t n)
{
	static struct pageonefs_entry e[CHUNK];
	uint32_t m = 0, wrong = per, of[CHUNK];

	make_frames(w, n);
	for (uint32_t i = 0; i < n; i++)
		if (contents[of[m] = w[i].content].frame)
			e[m++] = (struct pageonefs_entry){ .index = w[i].page, .frame = contents[w[i].content].frame };
	merge_call(p, e, m);
	for (uint32_t i = 0; i < m; i++) {
		if (!e[i].result)
			contents[of[i]].frame = e[i].frame;
		else if (e[i].result == -ESTALE && wrong == per)
			wrong = e[i].index;
	}
	return wrong;
}

static uint32_t predict(struct prediction *guess, struct wanted *w, uint32_t from)
{
	uint32_t n = 0;

	if (guess->len < PROVEN || from != guess->page + 1)
		return 0;
	while (n < guess->ahead && guess->page + 1 < per && guess->content + guess->step <= seen) {
		guess->page++;
		guess->content += guess->step;
		w[n++] = (struct wanted){ guess->page, guess->content };
	}
	return n;
}

/* The pages from `from` on, as far as one call digests them. Returns those of known contents. */
static uint32_t look_up(uint32_t p, uint32_t from, struct prediction *guess, struct wanted *w)
{
	uint64_t d[CHUNK], t = CPU();
	struct pageonefs_digest ask = { .id = children[p].file.id, .start = from, .out = (uintptr_t)d, .seed = 7,
					.pages = per - from < CHUNK ? per - from : CHUNK };
	uint32_t n = 0;

	if (ioctl(control_open(MOUNT), PAGEONEFS_DIGEST, &ask))
		die("digest");
	digesting += CPU() - t;
	digested_pages += ask.digested;
	for (uint32_t i = 0; i < ask.pages; i++) {
		struct slot *s = slot(d[i]);
		uint32_t step = s->content - guess->content;

		if (!s->content) {
			s->content = ++seen;
			contents[seen] = (struct content){ 0, p, from + i };
			guess->len = 0;
			continue;
		}
		w[n++] = (struct wanted){ from + i, s->content };
		if (guess->len && from + i == guess->page + 1 && step <= 1 && (step == guess->step || guess->len == 1))
			guess->step = step, guess->len++;
		else
			guess->len = 1, guess->ahead = AHEAD;
		guess->page = from + i;
		guess->content = s->content;
	}
	return n;
}

static void merge_file(uint32_t p)
{
	struct prediction guess = { .ahead = AHEAD };
	struct wanted w[CHUNK];
	uint32_t from = 0, n;

	while (from < per) {
		n = predict(&guess, w, from);
		if (n) {
			uint32_t wrong = merge_wanted(p, w, n);

			from = wrong < per ? wrong : w[n - 1].page + 1;
			if (wrong < per)
				guess = (struct prediction){ .ahead = AHEAD };
			else if (guess.ahead < CHUNK)
				guess.ahead *= 2;
			continue;
		}
		n = look_up(p, from, &guess, w);
		merge_wanted(p, w, n);
		from += per - from < CHUNK ? per - from : CHUNK;
	}
}

static uint64_t merge_by_pageonefs(void)
{
	uint32_t total = per * processes;
	uint64_t t = CPU();

	for (mask = 1; mask < total * 2; mask *= 2)
		;
	table = calloc(mask--, sizeof(*table));
	contents = calloc(total + 1, sizeof(*contents));
	for (uint32_t p = 0; p < processes; p++)
		merge_file(p);
	t = CPU() - t;
	printf("pageonefs %s: %lu pages were digested\n", kind, (long)digested_pages);
	cost("digest", digesting, merged_pages);
	cost("merge-call", merging, merged_pages);
	cost("map", t - digesting - merging, merged_pages);
	cost("merge", t, merged_pages);
	return merged_pages;
}

/* All files; `pages`: what the cost is counted by, or 0 for the dirty pages. */
static void harvest_all(const char *what, uint64_t pages)
{
	uint64_t *bits = calloc(per / 64, 8), dirty = 0, t = CPU();

	for (uint32_t p = 0; p < processes; p++)
		dirty += harvest(children[p].file, bits);
	cost(what, CPU() - t, pages ?: dirty ?: 1);
	free(bits);
}

int main(int argc, char **argv)
{
	uint32_t *uses;
	uint64_t different = 0, merged, before, wrong;

	setvbuf(stdout, 0, _IOLBF, 0);
	if (argc < 5)
		return 2;
	sh = calloc(1, sizeof(*sh));
	who = argv[1];
	ksm = !strcmp(who, "ksm");
	kind = argv[2];
	per = atoi(argv[3]) & ~63;
	processes = atoi(argv[4]);
	uses = calloc(per + 1, 4);
	for (uint32_t p = 0; p < processes; p++)
		for (uint32_t i = 0; i < per; i++)
			different += !uses[content(p, i)]++;
	start();
	all('r');
	cost("read-before", all('r'), (uint64_t)per * processes);
	/* Whoever merges has taken the dirty bits before, to know what is at rest. */
	if (!ksm) {
		harvest_all("harvest-runs", 0);
		all('r');
	}
	before = slabs();
	merged = ksm ? merge_by_ksm((uint64_t)per * processes - different) : merge_by_pageonefs();
	printf("%s %s: %lu of %u pages are merged, of %lu contents\n", who, kind, (long)merged, per * processes, (long)different);
	printf("COST %s %s kernel-bytes %.1f\n", who, kind, (double)(int64_t)(slabs() - before) / merged);
	cost("first-read", all('r'), (uint64_t)per * processes);
	cost("read-again", all('r'), (uint64_t)per * processes);
	wrong = all('c');
	if (!ksm)
		harvest_all("harvest-clean", (uint64_t)per * processes);
	cost("write", all('w'), (uint64_t)per * processes / 8);
	if (!ksm) {
		harvest_all("harvest-scattered", 0);
		cost("write-again", all('s'), (uint64_t)per * processes / 40);
	}
	cost("write-in-sequence", all('q'), (uint64_t)per * processes / 2);
	if (wrong || sh->bad)
		printf("BENCH-FAILED %lu pages are wrong\n", (long)wrong);
	for (uint32_t p = 0; p < processes; p++) {
		kill(children[p].pid, SIGKILL);
		waitpid(children[p].pid, 0, 0);
	}
	if (ksm)
		set(KSM "run", "2"), set(KSM "run", "0");
	return !!wrong;
}
