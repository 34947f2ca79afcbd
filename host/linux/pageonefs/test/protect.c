// SPDX-License-Identifier: GPL-2.0
/*
 * Mappings that userfaultfd write-protects asynchronously, private ones and shared ones, where the
 * kernel lets it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pages.h"

/* What the headers of older kernels lack. */
#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif
#ifndef PAGEMAP_SCAN
#define PAGE_IS_WRITTEN		(1 << 1)
#define PAGE_IS_FILE		(1 << 2)
#define PAGE_IS_PRESENT		(1 << 3)
#define PAGE_IS_SWAPPED		(1 << 4)
#define PM_SCAN_WP_MATCHING	(1 << 0)
#define PM_SCAN_CHECK_WPASYNC	(1 << 1)
struct page_region {
	uint64_t start, end, categories;
};
struct pm_scan_arg {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#endif

#define WP_DONE (PAGE_IS_PRESENT | PAGE_IS_FILE)

/* ---- write protection --------------------------------------------------------------- */

/* A userfaultfd of this process; -1: the kernel has no asynchronous write protection. */
static int protector(void)
{
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_WP_ASYNC };
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC);

	if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
		close(fd);
		return -1;
	}
	return fd;
}

/* This memory may be protected. */
static int protector_add(int fd, char *p, uint32_t pages)
{
	struct uffdio_register all = { { (uintptr_t)p, pages * PAGE }, UFFDIO_REGISTER_MODE_WP, 0 };

	return ioctl(fd, UFFDIO_REGISTER, &all);
}

static long scan(struct pm_scan_arg *arg)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	long ret = ioctl(fd, PAGEMAP_SCAN, arg);

	close(fd);
	return ret;
}

static int write_protect(char *p, uint32_t pages)
{
	struct pm_scan_arg arg = {
		.size = sizeof(arg), .flags = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
		.start = (uintptr_t)p, .end = (uintptr_t)p + pages * PAGE,
	};

	return scan(&arg) < 0;
}

/* What is said of one page. */
static uint64_t categories(char *p)
{
	uint64_t all = PAGE_IS_WRITTEN | PAGE_IS_FILE | PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
	struct page_region region = { 0 };
	struct pm_scan_arg arg = {
		.size = sizeof(arg), .flags = PM_SCAN_CHECK_WPASYNC, .start = (uintptr_t)p, .end = (uintptr_t)p + PAGE,
		.vec = (uintptr_t)&region, .vec_len = 1, .category_anyof_mask = all, .return_mask = all,
	};

	if (scan(&arg) < 0)
		BAD("PAGEMAP_SCAN");
	return region.categories;
}

static void rewrite(struct file f, uint32_t index, uint64_t content)
{
	char page[PAGE];

	fill(page, content);
	if (pwrite(f.fd, page, PAGE, index * PAGE) != (ssize_t)PAGE)
		BAD("pwrite");
}

enum { MANY = 128 };

static void private_wp(void)
{
	struct file a = file_make(MANY), b = file_make(MANY);
	char *m = file_map(a), *p = file_map_privately(a);
	int fd = protector();
	uint64_t is[MANY], frame;

	if (fd < 0 || protector_add(fd, p, MANY)) {
		printf("    SKIPPED: this kernel does not write-protect such mappings\n");
		return;
	}
	/* Where nobody makes the fault again and again. */
	alarm(120);
	for (int i = 0; i < MANY; i++) {
		fill(at(m, i), is[i] = 100 + i);
		rewrite(b, i, is[i]);
	}
	for (int i = 0; i < MANY; i++)
		CHECK(holds(at(p, i), is[i]));
	CHECK(!write_protect(p, MANY));
	for (int i = 0; i < MANY; i++)
		CHECK(categories(at(p, i)) == WP_DONE);
	/* Merged: nothing is mapped, and the protection is remembered. */
	for (int i = 0; i < MANY; i++) {
		frame = 0;
		CHECK(!merge_patiently(control_open(MOUNT), a, i, &frame) && frame && !merge_patiently(control_open(MOUNT), b, i, &frame));
		CHECK(categories(at(p, i)) == PAGE_IS_SWAPPED);
	}
	CHECK(describe(a.id).merged_pages == MANY && describe(b.id).merged_pages == MANY);
	for (int i = 0; i < MANY; i++) {
		CHECK(holds(at(p, i), is[i]));
		CHECK(categories(at(p, i)) == WP_DONE);
	}
	/* Written: of what is mapped, of what is not, merged or private. */
	rewrite(a, 5, is[5]);
	rewrite(a, 6, is[6]);
	frame = 0;
	CHECK(!merge_patiently(control_open(MOUNT), a, 6, &frame));
	CHECK(categories(at(p, 5)) == PAGE_IS_SWAPPED && categories(at(p, 6)) == PAGE_IS_SWAPPED);
	for (int i = 4; i < 8; i++)
		at(p, i)[9] = 'x';
	for (int i = 0; i < MANY; i++) {
		char page[PAGE];

		fill(page, is[i]);
		CHECK(!memcmp(at(m, i), page, PAGE));
		if (i >= 4 && i < 8)
			page[9] = 'x';
		CHECK(!memcmp(at(p, i), page, PAGE));
		CHECK(categories(at(p, i)) == (i >= 4 && i < 8 ? PAGE_IS_PRESENT | PAGE_IS_WRITTEN : WP_DONE));
	}
	CHECK(describe(a.id).merged_pages == MANY - 1);
	/* What the file gets is seen in pages that were not written, whatever maps them. */
	for (int i = 0; i < 64; i++)
		rewrite(a, i, is[i] = 1000 + i);
	fill(at(m, 70), is[70] = 1070);
	for (int i = 0; i < MANY; i++) {
		if (i >= 4 && i < 8) {
			CHECK(at(p, i)[9] == 'x' && !holds(at(p, i), is[i]));
			continue;
		}
		CHECK(holds(at(p, i), is[i]) && !(categories(at(p, i)) & PAGE_IS_WRITTEN));
	}
	/* Marks that are left when nobody protects any more. */
	for (int i = 8; i < MANY; i++)
		rewrite(a, i, is[i] = 2000 + i);
	close(fd);
	for (int i = 8; i < MANY; i++)
		CHECK(holds(at(p, i), is[i]));
	munmap(p, MANY * PAGE);
	munmap(m, MANY * PAGE);
	close(a.fd);
	close(b.fd);
}

/* Shared mappings, where the kernel protects these too, go on as well, and leave dirty bits. */
static void shared_wp(void)
{
	struct file f = file_make(64);
	char *m = file_map(f), *w = file_map(f);
	int fd = protector();
	uint64_t bits;

	if (fd < 0 || protector_add(fd, w, 64)) {
		printf("    SKIPPED: this kernel does not write-protect such mappings\n");
		return;
	}
	alarm(60);
	for (int i = 0; i < 64; i++)
		fill(at(w, i), 5);
	CHECK(!write_protect(w, 64));
	all_merged(f, m, 5);
	for (int tries = 0; tries < 50 && harvest(f, &bits); tries++)
		usleep(20000);
	for (int i = 0; i < 32; i++)
		CHECK(holds(at(w, i), 5) && !(categories(at(w, i)) & PAGE_IS_WRITTEN));
	for (int i = 0; i < 64; i += 4)
		at(w, i)[0] = i;
	CHECK(harvest(f, &bits) == 16 && bits == 0x1111111111111111);
	for (int i = 0; i < 64; i++)
		CHECK(at(m, i)[0] == at(w, i)[0] && (i % 4 ? holds(at(w, i), 5) : at(w, i)[0] == i));
	close(fd);
	munmap(m, 64 * PAGE);
	munmap(w, 64 * PAGE);
	close(f.fd);
}

/* ---- frames that are mapped late ------------------------------------------------------ */

enum { READ = 16, READERS = 2 };

/* The version that a page has for sure, since its write has returned. */
static struct {
	struct file f;
	char *p;
	uint64_t sure[READ];
} race;

static void *reader(void *arg)
{
	long checks = 0;
	(void)arg;

	while (!sh->stop) {
		for (int i = 0; i < READ; i++) {
			uint64_t sure = __atomic_load_n(&race.sure[i], __ATOMIC_SEQ_CST);
			uint64_t seen = __atomic_load_n((uint64_t *)at(race.p, i), __ATOMIC_SEQ_CST);

			if (seen < sure && sh->bad < 10)
				BAD("page %d has version %ld, and %ld was written", i, (long)seen, (long)sure);
			checks++;
		}
	}
	__atomic_add_fetch(&sh->checks, checks, 5);
	return NULL;
}

static void *renewer(void *arg)
{
	(void)arg;
	while (!sh->stop) {
		CHECK(!write_protect(race.p, READ));
		usleep(500);
	}
	return NULL;
}

/*
 * Merges pages of a file, writes them, and knows that from then on nobody reads what they held.
 * Readers make faults whose page table has a mark.
 */
static void private_hammer(void)
{
	pthread_t threads[READERS + 1];
	uint64_t page[512], given = stats().frame_faults;
	int fd;

	race.f = file_make(READ);
	race.p = file_map_privately(race.f);
	fd = protector();
	if (fd < 0 || protector_add(fd, race.p, READ)) {
		printf("    SKIPPED: this kernel does not write-protect such mappings\n");
		return;
	}
	for (int i = 0; i <= READERS; i++)
		pthread_create(&threads[i], NULL, i < READERS ? reader : renewer, NULL);
	uint64_t version = 1;

	for (double end = now() + 15; now() < end; version++) {
		for (int i = 0; i < READ; i++) {
			uint64_t frame = 0;

			for (int k = 0; k < 512; k++)
				page[k] = version;
			if (pwrite(race.f.fd, page, PAGE, i * PAGE) != (ssize_t)PAGE)
				BAD("pwrite");
			__atomic_store_n(&race.sure[i], version, __ATOMIC_SEQ_CST);
			merge_page(race.f, i, &frame);
			sh->writes++;
		}
		if (version % 4 == 0)
			usleep(1000);
	}
	sh->stop = 1;
	for (int i = 0; i <= READERS; i++)
		pthread_join(threads[i], NULL);
	printf("    %ld frames mapped\n", (long)(stats().frame_faults - given));
	say("private_hammer");
	CHECK(sh->writes > 100 && sh->checks > 100);
	munmap(race.p, READ * PAGE);
	close(fd);
	close(race.f.fd);
}

const struct test protect_tests[] = {
	{ "private_wp", private_wp }, { "shared_wp", shared_wp }, { "private_hammer", private_hammer }, { 0 },
};
