// SPDX-License-Identifier: GPL-2.0
/*
 * The bounds of frames and domains, unmounting, and broken memory.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

/* ---- frames and domains --------------------------------------------------------- */

/* A frame has bounded users; equal frames are joined; a handle of the dead finds nothing. */
static void frames(void)
{
	struct file f = file_make(64);
	char *m = file_map(f);
	uint64_t first = 0, second = 0, handle, before = stats().frames;
	int i, tries;

	CHECK(!path_write(PARAMETERS "max_users", "10"));
	for (i = 0; i < 64; i++)
		fill(at(m, i), 5);
	merge_round(f);
	for (tries = 0; tries < 50 && describe(f.id).merged_pages < 64; tries++) {
		merge_round(f);
		usleep(20000);
	}
	CHECK(stats().frames - before >= 7 && describe(f.id).merged_pages == 64);
	CHECK(!path_write(PARAMETERS "max_users", "256"));
	/* All to the frame of page 0. */
	handle = 0;
	CHECK(merge_page(f, 0, &handle) == -EEXIST && handle);
	for (i = 1; i < 64; i++) {
		uint64_t h = handle;
		int ret = merge_page(f, i, &h);

		CHECK(!ret || ret == -EEXIST);
	}
	CHECK(stats().frames - before == 1);
	for (i = 0; i < 64; i++)
		CHECK(holds(at(m, i), 5));
	/* Other content: no. */
	for (tries = 0; tries < 50; tries++) {
		fill(at(m, 1), 6);
		first = handle;
		i = merge_page(f, 1, &first);
		if (i != -EBUSY)
			break;
		usleep(20000);
	}
	CHECK(i == -ESTALE && holds(at(m, 1), 6));
	for (tries = 0; tries < 50 && (i = merge_page(f, 1, &second)) == -EBUSY; tries++)
		usleep(20000);
	CHECK(!i && second && second != handle);
	first = second;
	CHECK(merge_page(f, 2, &second) == -EEXIST && second == handle);
	/* The last user takes the frame with it. */
	fill(at(m, 1), 7);
	CHECK(stats().frames - before == 1);
	i = -EBUSY;
	for (tries = 0; tries < 50 && i == -EBUSY; tries++) {
		second = first;
		i = merge_page(f, 1, &second);
		usleep(20000);
	}
	CHECK(i == -ENOENT);
	CHECK(merge_page(f, 1 << 20, &second) < 0);
	close(f.fd);
	munmap(m, 64 * PAGE);
	for (tries = 0; tries < 50 && stats().frames != before; tries++)
		usleep(20000);
	CHECK(stats().frames == before);
}

/* Whoever names a full frame gets another of its content, and few of them are made. */
static void full(void)
{
	struct file f = file_make(256);
	char *m = file_map(f);
	uint64_t first = 0, frame, uses[256] = { 0 }, before = stats().frames;
	int mount = control_open(MOUNT);

	CHECK(!path_write(PARAMETERS "max_users", "8"));
	for (int i = 0; i < 256; i++)
		fill(at(m, i), 5);
	CHECK(!merge_patiently(mount, f, 0, &first));
	for (int i = 1; i < 256; i++) {
		frame = first;
		CHECK(!merge_patiently(mount, f, i, &frame));
		CHECK(frame >= first && frame - first < 256);
		if (frame >= first && frame - first < 256)
			uses[frame - first]++;
	}
	CHECK(stats().frames - before == 32 && uses[0] == 7);
	for (int i = 0; i < 256; i++)
		CHECK(holds(at(m, i), 5) && uses[i] <= 8);
	/* Of other content: no, and no frame is left for it. */
	fill(at(m, 9), 6);
	frame = first;
	CHECK(merge_patiently(mount, f, 9, &frame) == -ESTALE && holds(at(m, 9), 6) && stats().frames - before == 32);
	CHECK(!path_write(PARAMETERS "max_users", "256"));
	munmap(m, 256 * PAGE);
	close(f.fd);
}

/* How often the page is mapped, in all processes, that is mapped here. */
static long mappings(const volatile char *page)
{
	static int pagemap = -1, counts;
	uint64_t entry = 0, count = 0;

	if (pagemap < 0) {
		pagemap = open("/proc/self/pagemap", O_RDONLY);
		counts = open("/proc/kpagecount", O_RDONLY);
	}
	(void)*page;
	if (pread(pagemap, &entry, 8, (uintptr_t)page / PAGE * 8) != 8 || !(entry >> 63) ||
	    pread(counts, &count, 8, (entry & ((1ull << 55) - 1)) * 8) != 8)
		BAD("a page's mappings");
	return count;
}

/* A frame is mapped by faults alone, which count: fork(2) copies nothing of a shared mapping. */
static void references(void)
{
	enum { CHILDREN = 20, PRIVATE = 60 };
	struct file f = file_make(64), g = file_make(4);
	char *m = file_map(f), *n = file_map(g);
	pid_t children[CHILDREN];
	long most = 0;

	all_merged(f, m, 5);
	for (int i = 0; i < 64; i++)
		CHECK(holds(at(m, i), 5));
	CHECK(mappings(m) == 64);
	for (int i = 0; i < CHILDREN; i++) {
		children[i] = fork_child();
		if (!children[i])
			for (;;)
				pause();
	}
	CHECK(mappings(m) == 64);
	for (int i = 0; i < CHILDREN; i++) {
		kill(children[i], SIGKILL);
		waitpid(children[i], 0, 0);
	}
	/* Of a private mapping it does, once something was written there: so these have fewer. */
	CHECK(!path_write(PARAMETERS "max_users", "4"));
	all_merged(g, n, 6);
	for (int i = 0; i < PRIVATE; i++) {
		char *p = file_map_privately(g);

		for (int j = 0; j < 4; j++) {
			long now = mappings(at(p, j));

			most = now > most ? now : most;
			CHECK(holds(at(p, j), 6));
		}
	}
	CHECK(!path_write(PARAMETERS "max_users", "256"));
	printf("    %d private mappings of four pages: a frame is mapped %ld times at most\n", PRIVATE, most);
	CHECK(most > 16 && most <= 128);
	close(f.fd);
	close(g.fd);
}

struct place {
	int control, fd;
	uint64_t id;
};

static struct place place_make(const char *path, const char *options)
{
	struct pageonefs_file file;
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };
	struct place p;
	char name[64], page[PAGE];

	mkdir(path, 0755);
	if (mount("none", path, "pageonefs", 0, options))
		BAD("mount %s", options);
	p.control = control_open(path);
	snprintf(name, sizeof(name), "%s/f", path);
	p.fd = open(name, O_RDWR | O_CREAT, 0600);
	fill(page, 5);
	for (int i = 0; i < 4; i++)
		CHECK(pwrite(p.fd, page, PAGE, i * PAGE) == (ssize_t)PAGE);
	CHECK(!ioctl(p.control, PAGEONEFS_LIST, &l) && l.filled == 1);
	p.id = file.id;
	return p;
}

static int place_merge(struct place p, uint64_t index, uint64_t *frame)
{
	struct pageonefs_entry e = { .index = index };
	struct pageonefs_merge m = { .id = p.id, .entries = (uintptr_t)&e, .count = 1 };

	for (int tries = 0; tries < 50; tries++) {
		e.frame = *frame;
		if (ioctl(p.control, PAGEONEFS_MERGE, &m))
			BAD("merge");
		if (e.result != -EBUSY)
			break;
		usleep(20000);
	}
	*frame = e.frame;
	return e.result;
}

/* Frames are shared by mounts of one domain, and by no others. Handles start where they like. */
static void domains(void)
{
	struct place a = place_make("/da", "domain=x"), b = place_make("/db", "domain=x");
	struct place c = place_make("/dc", "domain=y"), d = place_make("/dd", "");
	uint64_t frame = 0, other, again;
	struct pageonefs_digest digest = { .id = a.id, .pages = 1, .out = (uintptr_t)&again };

	CHECK(!place_merge(a, 0, &frame) && !place_merge(b, 0, &frame));
	other = frame;
	CHECK(place_merge(c, 0, &other) == -ENOENT);
	other = frame;
	CHECK(place_merge(d, 0, &other) == -ENOENT);
	/* A file of one mount is none of another's. */
	CHECK(ioctl(b.control, PAGEONEFS_DIGEST, &digest) && errno == ESRCH);
	CHECK(!ioctl(a.control, PAGEONEFS_DIGEST, &digest) && again == frame * 2 + 1);
	/* A frame outlives the mount that it was made in. */
	close(a.fd);
	close(a.control);
	CHECK(!umount("/da"));
	char page[PAGE];

	CHECK(pread(b.fd, page, PAGE, 0) == (ssize_t)PAGE && holds(page, 5));
	CHECK(!place_merge(b, 1, &frame));
	for (int i = 0; i < 3; i++) {
		struct place *p[] = { &b, &c, &d };
		const char *path[] = { "/db", "/dc", "/dd" };

		close(p[i]->fd);
		close(p[i]->control);
		CHECK(!umount(path[i]));
	}
}

/* Unmounted while it is mapped and merged. */
static void unmounting(void)
{
	struct place p = place_make("/gone", "domain=gone");
	char *m = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, p.fd, 0);
	uint64_t frame = 0;

	CHECK(!place_merge(p, 0, &frame) && !place_merge(p, 1, &frame));
	CHECK(umount("/gone") && errno == EBUSY && !umount2("/gone", MNT_DETACH));
	CHECK(!place_merge(p, 2, &frame));
	close(p.fd);
	close(p.control);
	for (int i = 0; i < 4; i++)
		CHECK(holds(at(m, i), 5));
	fill(at(m, 1), 6);
	CHECK(holds(at(m, 1), 6) && holds(at(m, 0), 5));
	munmap(m, 4 * PAGE);
}

/* ---- broken memory -------------------------------------------------------------- */

static sigjmp_buf jump;
static void on_bus(int s)
{
	siglongjmp(jump, s);
}

static int reads(volatile char *p)
{
	signal(SIGBUS, on_bus);
	if (sigsetjmp(jump, 1))
		return 0;
	return *p || 1;
}

static void poison(void)
{
	struct file f = file_make(16);
	char *m = file_map(f);
	uint64_t frame = 0;
	int ret;

	all_merged(f, m, 5);
	CHECK(holds(at(m, 3), 5));
	if (madvise(at(m, 3), PAGE, 100 /* MADV_HWPOISON */) && errno == EINVAL) {
		printf("    SKIPPED: this kernel has no CONFIG_MEMORY_FAILURE\n");
		return;
	}
	/*
	 * All pages that use the frame are lost, whoever has not mapped it yet gets SIGBUS, and no new
	 * page joins.
	 */
	CHECK(!madvise(m, 16 * PAGE, MADV_DONTNEED) && !reads(at(m, 4)) && !reads(at(m, 3)));
	CHECK(pread(f.fd, (char[PAGE]){ 0 }, PAGE, 5 * PAGE) < 0 && errno == EIO);
	struct file g = file_make(16);
	char *n = file_map(g);

	for (int i = 0; i < 16; i++)
		fill(at(n, i), 5);
	merge_page(f, 0, &frame);
	for (int tries = 0; tries < 50; tries++) {
		uint64_t h = frame;

		ret = merge_page(g, 0, &h);
		if (ret != -EBUSY)
			break;
		usleep(20000);
	}
	CHECK(ret == -ENOENT && holds(at(n, 0), 5));
	/* What is punched is well again. */
	CHECK(!madvise(m, 16 * PAGE, MADV_REMOVE) && reads(at(m, 4)) && holds(at(m, 4), 0));
	munmap(m, 16 * PAGE);
	munmap(n, 16 * PAGE);
	close(f.fd);
	close(g.fd);
}

/*
 * Writes in sequence make more pages private at once, but no more than were written; scattered
 * writes do not. All other pages keep their bytes, in other mappings too.
 */
static void sequence(void)
{
	struct file f = file_make(512);
	char *m = file_map(f), *other = file_map(f);
	uint64_t faults;

	all_merged(f, m, 5);
	for (uint32_t i = 0; i < 512; i++)
		CHECK(holds(at(m, i), 5) && holds(at(other, i), 5));
	for (uint32_t i = 0; i < 64; i += 3)
		at(m, i * 37 % 64)[0] = 1;
	CHECK(describe(f.id).merged_pages == 512 - 22);
	faults = stats().private_faults;
	/* Not where one of these was the one before. */
	for (uint32_t i = 66; i < 500; i++) {
		at(m, i)[0] = i;
		if (512 - 22 - describe(f.id).merged_pages > 2 * (i - 65))
			BAD("%lu pages are merged when %u were written", (long)describe(f.id).merged_pages, i - 65);
		if (at(other, i)[0] != (char)i)
			BAD("page %u is not what was written, elsewhere", i);
	}
	CHECK(describe(f.id).merged_pages < 512 - 22 - (500 - 66) + 16);
	CHECK(stats().private_faults - faults < 100);
	for (uint32_t i = 0; i < 512; i++) {
		int written = i >= 66 ? i < 500 : at(m, i)[0] == 1;
		char first = written ? (i < 66 ? 1 : i) : 0, page[PAGE];

		fill(page, 5);
		if (written)
			page[0] = first;
		if (memcmp(page, at(m, i), PAGE) || memcmp(page, at(other, i), PAGE))
			BAD("page %u is wrong", i);
	}
	munmap(m, 512 * PAGE);
	munmap(other, 512 * PAGE);
	close(f.fd);
}

const struct test frame_tests[] = {
	{ "frames", frames }, { "full", full }, { "references", references }, { "domains", domains }, { "unmounting", unmounting }, { "sequence", sequence }, { "poison", poison }, { 0 },
};
