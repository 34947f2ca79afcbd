// SPDX-License-Identifier: GPL-2.0
/*
 * pageonefs-guest SECONDS NUMBER: inside a guest whose memory lies in the file system. Writes and
 * checks memory, much of which other guests have, too; files of /shared, which
 * virtiofsd serves; and
 * the disk /dev/vda, which a vhost-user back end serves. All of it by what it has written before.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pages.h"

#define MEMORY 16384u	/* pages */
#define BLOCKS 16
#define PART (16 * PAGE)

static uint64_t r;

static uint64_t rnd(uint64_t below)
{
	r = mix(r);
	return (r >> 8) % below;
}

/* Half of it is what other guests have. */
static uint64_t choose(uint32_t page, uint64_t number)
{
	return rnd(2) ? 1 + page % 512 : number << 56 | rnd(1ull << 48);
}

static long memory(char *m, uint64_t *is, uint64_t number)
{
	for (int n = 0; n < 400; n++) {
		uint32_t i = rnd(MEMORY);

		if (!holds(at(m, i), is[i]))
			BAD("page %u of memory is wrong", i);
		if (!rnd(8))
			fill(at(m, i), is[i] = choose(i, number));
	}
	return 400;
}

/* A file or a disk in parts of 64 KiB, past the page cache or through it. */
static long blocks(const char *path, int flags, uint64_t *is, char *buffer)
{
	int fd = open(path, O_RDWR | O_CREAT | flags, 0600);
	long done = 0;

	if (fd < 0 && errno == EINVAL)
		fd = open(path, O_RDWR | O_CREAT, 0600);
	if (fd < 0) {
		BAD("open %s", path);
		return 0;
	}
	for (int n = 0; n < 4; n++, done++) {
		uint32_t b = rnd(BLOCKS);

		if (is[b]) {
			memset(buffer, 0x55, PART);
			if (pread(fd, buffer, PART, b * PART) != (ssize_t)PART)
				BAD("read %s", path);
			for (int i = 0; i < 16; i++)
				if (!holds(at(buffer, i), is[b] + i)) {
					BAD("%s is wrong in part %u", path, b);
					break;
				}
		}
		is[b] = 1 + rnd(64);
		for (int i = 0; i < 16; i++)
			fill(at(buffer, i), is[b] + i);
		if (pwrite(fd, buffer, PART, b * PART) != (ssize_t)PART)
			BAD("write %s", path);
	}
	if (fsync(fd))
		BAD("fsync %s", path);
	close(fd);
	return done;
}

int main(int argc, char **argv)
{
	double end = now() + (argc > 1 ? atoi(argv[1]) : 30);
	uint64_t number = argc > 2 ? atoi(argv[2]) : 1, *is = calloc(MEMORY, 8), files[BLOCKS] = { 0 }, disk[BLOCKS] = { 0 };
	char *m = mmap(0, MEMORY * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *buffer = mmap(0, PART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	long checks = 0, parts = 0, sectors = 0;

	sh = calloc(1, sizeof(*sh));
	r = number;
	for (uint32_t i = 0; i < MEMORY; i++)
		fill(at(m, i), is[i] = choose(i, number));
	printf("GUEST %d has filled its memory\n", (int)number);
	fflush(stdout);
	while (now() < end) {
		checks += memory(m, is, number);
		if (!access("/shared/here", F_OK))
			parts += blocks("/shared/file", rnd(2) ? O_DIRECT : 0, files, buffer);
		if (!access("/dev/vda", F_OK))
			sectors += blocks("/dev/vda", O_DIRECT, disk, buffer);
		path_write("/proc/sys/vm/drop_caches", "1");
	}
	for (uint32_t i = 0; i < MEMORY; i++)
		if (!holds(at(m, i), is[i]))
			BAD("at the end page %u of memory is wrong", i);
	printf("GUEST %d: %ld pages checked, %ld parts of files, %ld parts of the disk, %d wrong\n", (int)number, checks, parts, sectors,
	       sh->bad);
	return !!sh->bad;
}
