// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that is committed: a file's length, once, and no pages.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "areas.h"

static long committed(void)
{
	return path_number("/proc/meminfo", "Committed_AS") / 4;
}

/* Commits all that there is, but for 64 KiB. Returns how many pieces. */
static int commit_rest(char **piece, size_t *size, int most)
{
	size_t next = 1 << 20;
	int n = 0;

	while (n < most && next >= PAGE) {
		piece[n] = mmap(0, next, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		size[n] = next;
		if (piece[n] == MAP_FAILED)
			next /= 16;
		else
			n++;
	}
	for (int i = 0; i < n; i++)
		if (size[i] == 1 << 16) {
			munmap(piece[i], size[i]);
			piece[i] = piece[--n];
			size[i] = size[n];
			break;
		}
	return n;
}

/* With vm.overcommit_memory=2, when others have committed the rest. */
static void commit(void)
{
	enum { PIECES = 512, NEAR = 64 };
	long clean = committed(), start, used;
	struct area a = { file_make(MANY), 0 };
	char value[32], *piece[PIECES];
	size_t size[PIECES];
	struct stat st;
	int n, failed = 0, other;

	control = control_open(MOUNT);
	other = openat(control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	a.m = file_map(a.f);
	fill_area(&a);
	signal(SIGBUS, on_bus);
	start = committed();
	CHECK(start - clean >= MANY && start - clean < MANY + NEAR);
	/* As long as the file, whoever makes it longer. */
	CHECK(!ftruncate(other, 4000 * PAGE + 1) && labs(committed() - start - 4001) < NEAR);
	CHECK(pwrite(other, "x", 1, 8000 * PAGE) == 1 && labs(committed() - start - 8001) < NEAR);
	CHECK(!fallocate(other, 0, 8000 * PAGE, 4 * PAGE) && labs(committed() - start - 8004) < NEAR);
	CHECK(!ftruncate(other, 10) && labs(committed() - start - 1) < NEAR);
	snprintf(value, sizeof(value), "%ld", (committed() + 4096) * 4);
	CHECK(!path_write("/proc/sys/vm/overcommit_kbytes", value) && !path_write("/proc/sys/vm/overcommit_memory", "2"));
	n = commit_rest(piece, size, PIECES);
	used = committed();
	merge_area(&a);
	for (uint32_t i = 0; i < MANY; i++)
		failed += i % 2 ? write_fails(at(a.m, i), 7) : pwrite(a.f.fd, "7", 1, i * PAGE) != 1;
	/* What is new is refused, and nothing is changed. */
	CHECK(ftruncate(a.f.fd, 64 * MANY * PAGE) && errno == ENOMEM);
	CHECK(pwrite(a.f.fd, "x", 1, 64 * MANY * PAGE) < 0 && errno == ENOMEM);
	CHECK(fallocate(a.f.fd, 0, 0, 64 * MANY * PAGE) && errno == ENOMEM);
	CHECK(!fstat(a.f.fd, &st) && st.st_size == MANY * (off_t)PAGE && st.st_blocks == MANY * 8);
	CHECK(labs(committed() - used) < NEAR);
	CHECK(!path_write("/proc/sys/vm/overcommit_memory", "0"));
	if (failed)
		BAD("%d of %d writes, with %d pieces committed", failed, MANY, n);
	while (n--)
		munmap(piece[n], size[n]);
	area_end(&a);
	close(other);
	CHECK(labs(committed() - clean) < NEAR);
}

/* No length commits fewer pages than none. */
static void commit_far(void)
{
	const long most = INT64_MAX & ~(PAGE - 1);
	long start = committed();
	struct stat st;
	int fd;

	control = control_open(MOUNT);
	fd = openat(control, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	CHECK(fd >= 0 && !ftruncate(fd, 5 * PAGE));
	for (int mode = 0; mode < 3; mode++) {
		char value[] = { '0' + mode, 0 };

		CHECK(!path_write("/proc/sys/vm/overcommit_memory", value));
		CHECK(ftruncate(fd, INT64_MAX) && errno == EFBIG && ftruncate(fd, most + 1) && errno == EFBIG);
		CHECK(pwrite(fd, "x", 1, INT64_MAX - 1) < 0 && errno == EFBIG && pwrite(fd, "x", 1, most) < 0 && errno == EFBIG);
		/* With that guard off the next call never ends: the offset behind it is negative. */
		if (sh->bad)
			break;
		CHECK(fallocate(fd, 0, INT64_MAX - 1, 1) && errno == EFBIG);
		CHECK(fallocate(fd, FALLOC_FL_ZERO_RANGE, most, 1) && errno == EFBIG);
		CHECK(!fstat(fd, &st) && st.st_size == 5 * (off_t)PAGE && st.st_blocks == 0);
		CHECK(labs(committed() - start - 5) < 64);
		if (mode != 1)
			CHECK(ftruncate(fd, most) && errno == ENOMEM);
		else
			CHECK(!ftruncate(fd, most) && labs(committed() - start - most / (long)PAGE) < 64 && !ftruncate(fd, 5 * PAGE));
	}
	CHECK(!path_write("/proc/sys/vm/overcommit_memory", "0"));
	close(fd);
	CHECK(labs(committed() - start) < 64);
}

const struct test committed_tests[] = { { "commit", commit }, { "commit_far", commit_far }, { 0 } };
