// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Work for a guest whose free pages are recycled: allocates, fills, checks and frees memory in all
 * the ways that a guest does, and says on its console what it found. One static program, the only
 * one beside busybox in the guests of the recycler's tests and benches.
 *
 *   load hungry SECONDS       memory-hungry work with every byte checked; a line for each round, as
 *                             the demo's guests print
 *   load copy SECONDS         fills 6/10 of what is available with files, checks and deletes them,
 *                             rests: copy-and-delete work
 *   load scatter MIB          fills MIB, then frees every second page, one by one
 *   load stretch MIB          fills MIB, then frees it at once
 *   load cycle PERIOD PHASE   PERIOD seconds: a twelfth of it with 3/4 of memory in use, the rest
 *                             with next to nothing
 *   load write MIB RATE       fills MIB, then writes a word into as many of its pages, chosen at
 *                             random, as RATE MiB have, each second, for ever
 *   load work EQUAL OWN       fills EQUAL MiB with pages of which four are equal each, and OWN MiB
 *                             with others; then reads the former and rewrites the latter for ever
 *   load fuzz SECONDS         writes at random into the pool (the memory of every ivshmem device),
 *                             as hostile software could
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#define PAGE 4096ul
#define WORDS (PAGE / 8)
#define MIB (1ul << 20)

static uint64_t random_state = 0x9e3779b97f4a7c15ull;
static unsigned long checks, failures;

static uint64_t draw(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void pause_for(double seconds)
{
	struct timespec t = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9) };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

/* Different in every word, so that no page is like another, and no part of one like
 * another part. */
static void fill(uint64_t *page, uint64_t seed)
{
	for (unsigned long i = 0; i < WORDS; i++)
		page[i] = (seed + i) * 0x9e3779b97f4a7c15ull + 1;
}

static void check(const uint64_t *page, uint64_t seed)
{
	checks++;
	for (unsigned long i = 0; i < WORDS; i++)
		if (page[i] != (seed + i) * 0x9e3779b97f4a7c15ull + 1) {
			failures++;
			return;
		}
}

static unsigned long meminfo(const char *key)
{
	char line[128];
	unsigned long kib = 0;
	FILE *file = fopen("/proc/meminfo", "r");

	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, key, strlen(key)))
			kib = strtoul(line + strlen(key) + 1, NULL, 10);
	if (file)
		fclose(file);
	return kib / 1024;
}

static void tell(const char *path, const char *word)
{
	int fd = open(path, O_WRONLY);

	if (fd >= 0) {
		(void)!write(fd, word, strlen(word));
		close(fd);
	}
}

/* ---- hungry ------------------------------------------------------------ */

struct chunk {
	char *start;
	unsigned long pages;
	uint64_t seed;
};

#define CHUNKS 64
static struct chunk chunks[CHUNKS];

static void chunk_check(const struct chunk *chunk)
{
	for (unsigned long i = 0; i < chunk->pages; i++)
		check((uint64_t *)(chunk->start + i * PAGE), chunk->seed + i * WORDS);
}

static void chunk_make(struct chunk *chunk, unsigned long pages)
{
	chunk->start = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (chunk->start == MAP_FAILED) {
		chunk->pages = 0;
		return;
	}
	/* Huge pages come and go as blocks of the buddy allocator, and by compaction. */
	madvise(chunk->start, pages * PAGE, draw() & 1 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	chunk->pages = pages;
	chunk->seed = draw();
	for (unsigned long i = 0; i < pages; i++)
		fill((uint64_t *)(chunk->start + i * PAGE), chunk->seed + i * WORDS);
}

static void chunk_free(struct chunk *chunk)
{
	/* Now and then in single pages, which leaves the free lists in pieces. */
	if (draw() % 3 == 0)
		for (unsigned long i = 0; i < chunk->pages; i += 2)
			madvise(chunk->start + i * PAGE, PAGE, MADV_DONTNEED);
	munmap(chunk->start, chunk->pages * PAGE);
	chunk->pages = 0;
}

/* A child checks and overwrites its copy; the parent's stays what it is. */
static void fork_check(struct chunk *chunk)
{
	int status;
	pid_t child = fork();

	if (child < 0)
		return;
	if (!child) {
		failures = 0;
		chunk_check(chunk);
		for (unsigned long i = 0; i < chunk->pages; i += 1 + draw() % 3)
			fill((uint64_t *)(chunk->start + i * PAGE), ~chunk->seed + i);
		_exit(failures != 0);
	}
	if (waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status))
		failures++;
	chunk_check(chunk);
}

/* Writes a file in memory; returns its pages. */
static unsigned long file_write(const char *path, unsigned long pages, uint64_t seed)
{
	static uint64_t buffer[WORDS];
	unsigned long i;
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);

	for (i = 0; fd >= 0 && i < pages; i++) {
		fill(buffer, seed + i * WORDS);
		if (write(fd, buffer, PAGE) != (ssize_t)PAGE)
			break;
	}
	if (fd >= 0)
		close(fd);
	return i;
}

/* Reads it back and deletes it. */
static void file_check(const char *path, unsigned long pages, uint64_t seed)
{
	static uint64_t buffer[WORDS];
	int fd = open(path, O_RDONLY);

	for (unsigned long i = 0; i < pages; i++) {
		if (fd < 0 || read(fd, buffer, PAGE) != (ssize_t)PAGE)
			failures++;
		check(buffer, seed + i * WORDS);
	}
	if (fd >= 0)
		close(fd);
	unlink(path);
}

static void verdict(unsigned long round)
{
	if (failures)
		printf("PAGEONE-ROUND %lu CORRUPT checks=%lu failures=%lu file=memory\n", round, checks, failures);
	else
		printf("PAGEONE-ROUND %lu PASS checks=%lu\n", round, checks);
	fflush(stdout);
	checks = failures = 0;
}

static void hungry(double seconds)
{
	/* What may be in use, so that nothing is ever short of memory for long. */
	unsigned long most = meminfo("MemAvailable:") * 7 / 10, round = 0;
	double end = now() + seconds;

	tell("/sys/kernel/mm/transparent_hugepage/enabled", "madvise");
	tell("/sys/kernel/mm/transparent_hugepage/defrag", "madvise");
	while (now() < end) {
		double until = now() + 3;

		while (now() < until) {
			struct chunk *chunk = &chunks[draw() % CHUNKS];
			unsigned long used = 0;

			for (int i = 0; i < CHUNKS; i++)
				used += chunks[i].pages / 256;
			if (chunk->pages) {
				chunk_check(chunk);
				if (draw() % 4 == 0)
					fork_check(chunk);
				chunk_free(chunk);
			} else if (used < most) {
				unsigned long size = 1 + draw() % 12;

				chunk_make(chunk, (size < most - used ? size : most - used) * 256);
			}
			if (draw() % 8 == 0) {
				uint64_t seed = draw();

				file_check("/tmp/file", file_write("/tmp/file", 256 * (1 + draw() % 8), seed), seed);
			}
			if (draw() % 32 == 0)
				tell("/proc/sys/vm/compact_memory", "1");
			if (draw() % 64 == 0)
				tell("/proc/sys/vm/drop_caches", "3");
		}
		/* All of it goes now and then, so that the host has much to take. */
		for (int i = 0; i < CHUNKS; i++)
			if (chunks[i].pages && (round % 3 == 2 || draw() % 2)) {
				chunk_check(&chunks[i]);
				chunk_free(&chunks[i]);
			}
		verdict(round++);
	}
	for (int i = 0; i < CHUNKS; i++)
		if (chunks[i].pages) {
			chunk_check(&chunks[i]);
			chunk_free(&chunks[i]);
		}
	verdict(round);
	printf("LOAD hungry done\n");
}

/* ---- the others ------------------------------------------------------------ */

static void copy(double seconds)
{
	unsigned long round = 0, files = meminfo("MemAvailable:") * 6 / 10;
	double end = now() + seconds;

	/* Many files of 1 MiB: written, then checked and deleted. */
	while (now() < end) {
		uint64_t seed = draw();
		unsigned long pages[1024];
		char path[32];

		for (unsigned long i = 0; i < files && i < 1024; i++) {
			snprintf(path, sizeof(path), "/tmp/copy%lu", i);
			pages[i] = file_write(path, 256, seed + i);
		}
		for (unsigned long i = 0; i < files && i < 1024; i++) {
			snprintf(path, sizeof(path), "/tmp/copy%lu", i);
			file_check(path, pages[i], seed + i);
		}
		verdict(round++);
		pause_for(3);
	}
	printf("LOAD copy done\n");
}

/* Frees every second page of so much memory, or all of it at once. */
static void release(unsigned long mib, int scattered)
{
	unsigned long pages = mib * 256;
	char *start = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	madvise(start, pages * PAGE, MADV_NOHUGEPAGE);
	for (unsigned long i = 0; i < pages; i++)
		fill((uint64_t *)(start + i * PAGE), i * WORDS);
	printf("LOAD filled pages=%lu\n", pages);
	fflush(stdout);
	pause_for(8);
	if (scattered) {
		for (unsigned long i = 0; i < pages; i += 2)
			madvise(start + i * PAGE, PAGE, MADV_DONTNEED);
	} else {
		madvise(start, pages * PAGE, MADV_DONTNEED);
	}
	printf("LOAD freed pages=%lu\n", scattered ? pages / 2 : pages);
	fflush(stdout);
	pause_for(12);
	for (unsigned long i = scattered; scattered && i < pages; i += 2)
		check((uint64_t *)(start + i * PAGE), i * WORDS);
	verdict(0);
	munmap(start, pages * PAGE);
	printf("LOAD unmapped\n");
	fflush(stdout);
}

static void cycle(double period, double phase)
{
	unsigned long pages = meminfo("MemTotal:") * 256, round = 0;
	double next = now() + phase;

	/* Of what the kernel has left after it took its own part. */
	pages = pages * 3 / 4;
	for (;;) {
		char *start;
		double peak;

		pause_for(next > now() ? next - now() : 0);
		peak = now();
		start = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		random_state += (uint64_t)getpid() + round;
		uint64_t seed = draw() ^ ((uint64_t)(peak * 1e9) << 20);

		for (unsigned long i = 0; i < pages; i++)
			fill((uint64_t *)(start + i * PAGE), seed + i * WORDS);
		pause_for(peak + period / 12 > now() ? peak + period / 12 - now() : 0);
		for (unsigned long i = 0; i < pages; i += 16)
			check((uint64_t *)(start + i * PAGE), seed + i * WORDS);
		munmap(start, pages * PAGE);
		verdict(round++);
		next += period;
	}
}

static void write_for_ever(unsigned long mib, double rate)
{
	unsigned long pages = mib * 256, done = 0;
	char *start = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	double begin, said;

	for (unsigned long i = 0; i < pages; i++)
		fill((uint64_t *)(start + i * PAGE), i * WORDS);
	printf("LOAD filled pages=%lu\n", pages);
	for (begin = said = now();;) {
		double time = now() - begin;

		for (; done < time * rate * 256; done++)
			*(uint64_t *)(start + draw() % pages * PAGE) = draw();
		if (now() - said >= 5) {
			said = now();
			printf("LOAD writes pages=%lu seconds=%.0f\n", done, time);
		}
		pause_for(0.005);
	}
}

/* Each round checks 1,024 pages that can be merged, and rewrites 256 that cannot. Times are in the
 * processor's ticks, which are read without leaving the guest. */
static void work_for_ever(unsigned long equal_mib, unsigned long own_mib)
{
	unsigned long equals = equal_mib * 256, owns = own_mib * 256, rounds = 0;
	char *equal = mmap(NULL, equals * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *own = mmap(NULL, owns * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *seeds = calloc(owns, sizeof(*seeds)), read = 0, written = 0;
	double said;

	for (unsigned long i = 0; i < equals; i++)
		fill((uint64_t *)(equal + i * PAGE), i % (equals / 4) * WORDS);
	for (unsigned long i = 0; i < owns; i++)
		fill((uint64_t *)(own + i * PAGE), seeds[i] = draw());
	printf("LOAD filled pages=%lu\n", equals + owns);
	for (said = now();; rounds++) {
		uint64_t start = __rdtsc(), middle;

		for (int i = 0; i < 1024; i++) {
			unsigned long page = draw() % equals;

			check((uint64_t *)(equal + page * PAGE), page % (equals / 4) * WORDS);
		}
		middle = __rdtsc();
		for (int i = 0; i < 256; i++) {
			unsigned long page = draw() % owns;

			check((uint64_t *)(own + page * PAGE), seeds[page]);
			fill((uint64_t *)(own + page * PAGE), seeds[page] = draw());
		}
		read += middle - start, written += __rdtsc() - middle;
		if (failures)
			verdict(rounds);
		if (rounds % 16 == 0 && now() - said >= 0.25) {
			said = now();
			printf("LOAD work %lu %lu %lu\n", rounds + 1, read, written);
		}
	}
}

static void fuzz(double seconds)
{
	const char *root = "/sys/bus/pci/devices";
	volatile uint64_t *pools[4];
	unsigned long words[4];
	int count = 0;
	struct dirent *entry;
	DIR *dir = opendir(root);
	double end = now() + seconds;

	while (dir && (entry = readdir(dir)) && count < 4) {
		char path[512], vendor[16] = "", device[16] = "";
		FILE *file;
		struct stat stat;
		int fd;

		snprintf(path, sizeof(path), "%s/%s/vendor", root, entry->d_name);
		file = fopen(path, "r");
		if (!file || !fgets(vendor, sizeof(vendor), file) || fclose(file))
			continue;
		snprintf(path, sizeof(path), "%s/%s/device", root, entry->d_name);
		file = fopen(path, "r");
		if (!file || !fgets(device, sizeof(device), file) || fclose(file))
			continue;
		if (strncmp(vendor, "0x1af4", 6) || strncmp(device, "0x1110", 6))
			continue;
		snprintf(path, sizeof(path), "%s/%s/enable", root, entry->d_name);
		tell(path, "1");
		snprintf(path, sizeof(path), "%s/%s/resource2", root, entry->d_name);
		fd = open(path, O_RDWR);
		if (fd < 0 || fstat(fd, &stat))
			continue;
		pools[count] = mmap(NULL, stat.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		words[count] = stat.st_size / 8;
		if (pools[count] != MAP_FAILED)
			count++;
	}
	printf("LOAD fuzz pools=%d\n", count);
	fflush(stdout);
	while (count && now() < end) {
		for (int i = 0; i < 2000; i++) {
			uint64_t value = draw(), *all = (uint64_t *)pools[value % count];
			/* Not the header, until the end. */
			unsigned long at = 512 + (value >> 8) % (words[value % count] - 512);

			switch (value >> 60 & 3) {
			case 0: __atomic_store_n(&all[at], value, __ATOMIC_SEQ_CST); break;
			case 1: __atomic_store_n(&all[at], ~0ull, __ATOMIC_SEQ_CST); break;
			case 2: __atomic_store_n(&all[at], 0, __ATOMIC_SEQ_CST); break;
			default: __atomic_fetch_xor(&all[at], value, __ATOMIC_SEQ_CST); break;
			}
		}
	}
	for (int i = 0; i < count; i++)
		for (int field = 0; field < 12; field++)
			pools[i][field] = draw();
	printf("LOAD fuzz done\n");
	fflush(stdout);
	pause_for(1e6);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	double first = argc > 2 ? atof(argv[2]) : 0, second = argc > 3 ? atof(argv[3]) : 0;

	random_state ^= (uint64_t)(now() * 1e9) * 0x2545f4914f6cdd1dull;
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(what, "hungry"))
		hungry(first);
	else if (!strcmp(what, "copy"))
		copy(first);
	else if (!strcmp(what, "scatter") || !strcmp(what, "stretch"))
		release((unsigned long)first, what[1] == 'c');
	else if (!strcmp(what, "cycle"))
		cycle(first, second);
	else if (!strcmp(what, "write"))
		write_for_ever((unsigned long)first, second);
	else if (!strcmp(what, "work"))
		work_for_ever((unsigned long)first, (unsigned long)second);
	else if (!strcmp(what, "fuzz"))
		fuzz(first);
	else
		return 2;
	return 0;
}
