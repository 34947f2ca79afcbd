// SPDX-License-Identifier: GPL-2.0
/*
 * What any file system has to do: names, rights, lengths, holes, limits. Then the same with
 * merged pages.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "pages.h"

static int make(const char *path, int flags)
{
	return open(path, O_RDWR | O_CREAT | O_CLOEXEC | flags, 0640);
}

static void names(void)
{
	char buffer[64];
	struct stat st, other;
	int fd = make(MOUNT "/a", O_EXCL), second;

	CHECK(fd >= 0 && make(MOUNT "/a", O_EXCL) < 0 && errno == EEXIST);
	CHECK(write(fd, "hello", 5) == 5);
	CHECK(!rename(MOUNT "/a", MOUNT "/b") && access(MOUNT "/a", F_OK) && !access(MOUNT "/b", F_OK));
	CHECK(!link(MOUNT "/b", MOUNT "/c") && !stat(MOUNT "/c", &st) && st.st_nlink == 2);
	CHECK(!symlink("c", MOUNT "/s") && readlink(MOUNT "/s", buffer, 64) == 1);
	CHECK(!mkdir(MOUNT "/d", 0755) && !mkdir(MOUNT "/d/e", 0755) && rmdir(MOUNT "/d") && errno == ENOTEMPTY);
	second = make(MOUNT "/d/e/f", 0);
	CHECK(second >= 0 && id_of(second));
	CHECK(!rename(MOUNT "/d/e/f", MOUNT "/b") && !stat(MOUNT "/b", &other) && other.st_ino != st.st_ino);
	CHECK(!mknod(MOUNT "/p", S_IFIFO | 0600, 0) && !stat(MOUNT "/p", &st) && S_ISFIFO(st.st_mode));
	CHECK(!mknod(MOUNT "/r", S_IFREG | 0600, 0));
	close(second);
	second = open(MOUNT "/r", O_RDWR);
	CHECK(second >= 0 && id_of(second));
	CHECK(!setxattr(MOUNT "/r", "trusted.x", "1", 1, 0) && getxattr(MOUNT "/r", "trusted.x", buffer, 64) == 1);
	CHECK(open(MOUNT "/none", O_RDWR) < 0 && errno == ENOENT);
	/* A name that goes and comes again is another file. */
	CHECK(!unlink(MOUNT "/r") && access(MOUNT "/r", F_OK) && errno == ENOENT);
	close(second);
	second = make(MOUNT "/r", O_EXCL);
	CHECK(second >= 0 && id_of(second));
	/* Unlinked, and still there for whoever has it open. */
	CHECK(!unlink(MOUNT "/c") && pread(fd, buffer, 64, 0) == 5 && !memcmp(buffer, "hello", 5));
	CHECK(!unlink(MOUNT "/b") && !unlink(MOUNT "/s") && !unlink(MOUNT "/p") && !unlink(MOUNT "/r"));
	CHECK(!rmdir(MOUNT "/d/e") && !rmdir(MOUNT "/d"));
	close(fd);
	close(second);
}

static int as_user(uid_t uid, int (*does)(void))
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		if (setgid(uid) || setuid(uid))
			_exit(9);
		_exit(does());
	}
	waitpid(pid, &status, 0);
	return status;
}

static int user_denied(void)
{
	struct pageonefs_stats s;
	int root = open(MOUNT, O_RDONLY | O_DIRECTORY);

	if (open(MOUNT "/mine", O_RDWR) >= 0 || errno != EACCES)
		return 1;
	if (open(MOUNT "/mine", O_RDONLY) >= 0)
		return 2;
	/* The control interface is for the daemon. */
	if (root < 0 || !ioctl(root, PAGEONEFS_STATS, &s) || errno != EPERM)
		return 3;
	return unlink(MOUNT "/mine") ? 0 : 4;
}

static int user_own(void)
{
	int fd = open(MOUNT "/theirs", O_RDWR);
	struct pageonefs_stats s;

	if (fd < 0 || write(fd, "x", 1) != 1)
		return 1;
	/* A file has no ioctl, whoever has it open. */
	return ioctl(fd, PAGEONEFS_STATS, &s) && errno == ENOTTY ? 0 : 2;
}

static void rights(void)
{
	int fd = make(MOUNT "/mine", 0), other = make(MOUNT "/theirs", 0);
	struct stat st;

	fchmod(fd, 0600);
	CHECK(!fchown(other, 1000, 1000));
	CHECK(!stat(MOUNT, &st) && (st.st_mode & 07777) == 0755 && st.st_uid == 0);
	CHECK(as_user(1000, user_denied) == 0);
	CHECK(as_user(1000, user_own) == 0);
	CHECK(!unlink(MOUNT "/mine") && !unlink(MOUNT "/theirs"));
	close(fd);
	close(other);
}

/* Options, limits, statfs, remounting. */
static void limits(void)
{
	struct statfs sf;
	struct stat st;
	struct pageonefs_info info = { 0 };
	char big[PAGE * 4], *m;
	int fd, control;

	mkdir("/limits", 0755);
	CHECK(mount("none", "/limits", "pageonefs", 0, "huge=always") && errno == EINVAL);
	CHECK(mount("none", "/limits", "pageonefs", 0, "nonsense=1") && errno == EINVAL);
	CHECK(mount("none", "/limits", "pageonefs", 0, "domain=") && errno == EINVAL);
	CHECK(!mount("none", "/limits", "pageonefs", 0, "domain=guests,size=64k,mode=0711,uid=5,gid=6"));
	CHECK(!stat("/limits", &st) && (st.st_mode & 07777) == 0711 && st.st_uid == 5 && st.st_gid == 6);
	CHECK(!statfs("/limits", &sf) && sf.f_blocks == 16 && sf.f_bfree == 16 && sf.f_bsize == PAGE);
	control = control_open("/limits");
	CHECK(!ioctl(control, PAGEONEFS_INFO, &info) && info.version == PAGEONEFS_VERSION && !strcmp(info.domain, "guests"));
	fd = make("/limits/f", 0);
	memset(big, 1, sizeof(big));
	for (int i = 0; i < 4; i++)
		CHECK(write(fd, big, sizeof(big)) == sizeof(big));
	CHECK(write(fd, big, 1) < 0 && errno == ENOSPC);
	CHECK(!statfs("/limits", &sf) && sf.f_bfree == 0);
	CHECK(fallocate(fd, 0, 0, 17 * PAGE) && errno == ENOSPC);
	/* Merged pages are charged as before, and the last one can still be written. */
	struct pageonefs_file file;
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };

	CHECK(!ioctl(control, PAGEONEFS_LIST, &l) && l.filled == 1 && file.size == 16 * PAGE && file.private_pages == 16);
	uint64_t frame = 0;

	for (int i = 0; i < 16; i++) {
		struct pageonefs_entry e = { .index = i, .frame = frame };
		struct pageonefs_merge mg = { .id = file.id, .entries = (uintptr_t)&e, .count = 1 };

		for (int tries = 0; tries < 50; tries++) {
			if (ioctl(control, PAGEONEFS_MERGE, &mg) || !e.result)
				break;
			usleep(20000);
		}
		CHECK(!e.result);
		frame = e.frame;
	}
	CHECK(!statfs("/limits", &sf) && sf.f_bfree == 0);
	CHECK(!fstat(fd, &st) && st.st_blocks == 16 * 8);
	CHECK(ftruncate(fd, 17 * PAGE) == 0 && pwrite(fd, big, 1, 16 * PAGE) < 0 && errno == ENOSPC);
	CHECK(pwrite(fd, "2", 1, 5 * PAGE) == 1 && !statfs("/limits", &sf) && sf.f_bfree == 0);
	m = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	for (int i = 0; i < 16; i++)
		m[i * PAGE + 7] = 3;
	for (int i = 0; i < 16; i++)
		CHECK(m[i * PAGE] == (i == 5 ? '2' : 1) && m[i * PAGE + 7] == 3 && m[i * PAGE + 8] == 1);
	munmap(m, 16 * PAGE);
	CHECK(!statfs("/limits", &sf) && sf.f_bfree == 0);
	CHECK(!mount("none", "/limits", 0, MS_REMOUNT, "size=128k") && pwrite(fd, big, 1, 16 * PAGE) == 1);
	CHECK(mount("none", "/limits", 0, MS_REMOUNT, "size=32k") && errno == EINVAL);
	CHECK(mount("none", "/limits", 0, MS_REMOUNT, "domain=others") && errno == EINVAL);
	CHECK(!mount("none", "/limits", 0, MS_REMOUNT | MS_RDONLY, 0) || errno == EBUSY);
	CHECK(!unlink("/limits/f") || errno == EROFS);
	close(fd);
	close(control);
	CHECK(!umount("/limits"));
}

static sigjmp_buf jump;
static void on_bus(int s)
{
	siglongjmp(jump, s);
}

static int faults(volatile char *p)
{
	signal(SIGBUS, on_bus);
	if (sigsetjmp(jump, 1))
		return 1;
	*p = 1;
	return 0;
}

/* Made as long as it is: the rest of its last page is cleared, and what lies behind goes. */
static void same_length(struct file f, char *m, int merged)
{
	int mount = control_open(MOUNT);
	uint64_t rest = 0;
	struct stat st;

	CHECK(!ftruncate(f.fd, 9 * PAGE - 100));
	memset(at(m, 8), 0xee, PAGE);
	CHECK(!fallocate(f.fd, FALLOC_FL_KEEP_SIZE, 10 * PAGE, 4 * PAGE));
	if (merged)
		CHECK(!merge_patiently(mount, f, 8, &rest));
	CHECK(!ftruncate(f.fd, 9 * PAGE - 100));
	CHECK(!fstat(f.fd, &st) && st.st_blocks == 9 * PAGE / 512);
	CHECK(!ftruncate(f.fd, 16 * PAGE));
	CHECK((unsigned char)at(m, 9)[-101] == 0xee);
	for (size_t i = 1; i <= 100; i++)
		CHECK(!at(m, 9)[-i]);
}

/* Lengths and holes; `merged`: all pages are merged before each. */
static void lengths_of(int merged)
{
	struct file f = file_make(16);
	char *m = file_map(f), buffer[3 * PAGE], zeros[PAGE] = { 0 };
	struct stat st;

	/* Punched: whole pages and parts of two. */
	if (merged)
		all_merged(f, m, 5);
	else
		for (int i = 0; i < 16; i++)
			fill(at(m, i), 5);
	CHECK(!fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2 * PAGE + 100, 3 * PAGE));
	CHECK(!memcmp(at(m, 2) + 100, zeros, PAGE - 100) && holds(at(m, 3), 0) && holds(at(m, 4), 0) && !memcmp(at(m, 5), zeros, 100));
	fill(buffer, 5);
	CHECK(!memcmp(at(m, 2), buffer, 100) && !memcmp(at(m, 5) + 100, buffer + 100, PAGE - 100) && holds(at(m, 6), 5));
	CHECK(!fstat(f.fd, &st) && st.st_size == 16 * PAGE);
	/* Zeroed, within a page and over several. */
	if (merged)
		all_merged(f, m, 6);
	else
		for (int i = 0; i < 16; i++)
			fill(at(m, i), 6);
	CHECK(!fallocate(f.fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, PAGE + 8, 16));
	fill(buffer, 6);
	memset(buffer + 8, 0, 16);
	CHECK(!memcmp(at(m, 1), buffer, PAGE) && holds(at(m, 2), 6));
	CHECK(!fallocate(f.fd, FALLOC_FL_ZERO_RANGE, 14 * PAGE, 4 * PAGE) && !fstat(f.fd, &st) && st.st_size == 18 * PAGE);
	CHECK(holds(at(m, 14), 0) && holds(at(m, 15), 0) && holds(at(m, 13), 6));
	CHECK(fallocate(f.fd, FALLOC_FL_COLLAPSE_RANGE, 0, PAGE) && errno == EOPNOTSUPP);
	CHECK(!ftruncate(f.fd, 16 * PAGE));
	/* Shrunk in the middle of a page, and grown: what was cut is zeros. */
	if (merged)
		all_merged(f, m, 7);
	else
		for (int i = 0; i < 16; i++)
			fill(at(m, i), 7);
	CHECK(!ftruncate(f.fd, 8 * PAGE + 50));
	CHECK(faults(at(m, 9)) && faults(at(m, 15)));
	CHECK(pread(f.fd, buffer, PAGE, 8 * PAGE) == 50 && !pread(f.fd, buffer, PAGE, 9 * PAGE));
	CHECK(!ftruncate(f.fd, 16 * PAGE));
	fill(buffer, 7);
	CHECK(holds(at(m, 7), 7) && !memcmp(at(m, 8), buffer, 50) && !memcmp(at(m, 8) + 50, zeros, PAGE - 50));
	for (int i = 9; i < 16; i++)
		CHECK(holds(at(m, i), 0));
	same_length(f, m, merged);
	/* Written and read by calls, across pages; MADV_REMOVE and MADV_DONTNEED. */
	if (merged)
		all_merged(f, m, 8);
	else
		for (int i = 0; i < 16; i++)
			fill(at(m, i), 8);
	memset(buffer, 'w', sizeof(buffer));
	CHECK(pwrite(f.fd, buffer, 2 * PAGE, 3 * PAGE + 10) == 2 * PAGE);
	fill(buffer, 8);
	CHECK(!memcmp(at(m, 3), buffer, 10) && at(m, 3)[10] == 'w' && at(m, 5)[9] == 'w');
	CHECK(!memcmp(at(m, 5) + 10, buffer + 10, PAGE - 10) && holds(at(m, 2), 8) && holds(at(m, 6), 8));
	CHECK(pread(f.fd, buffer, 3 * PAGE, 6 * PAGE) == 3 * PAGE && holds(buffer, 8) && holds(buffer + 2 * PAGE, 8));
	CHECK(!madvise(m, 16 * PAGE, MADV_DONTNEED) && holds(at(m, 9), 8));
	CHECK(!madvise(at(m, 10), 2 * PAGE, MADV_REMOVE) && holds(at(m, 10), 0) && holds(at(m, 11), 0) && holds(at(m, 12), 8));
	/* All of it is data to whoever copies it. */
	CHECK(lseek(f.fd, 0, SEEK_DATA) == 0 && lseek(f.fd, 0, SEEK_HOLE) == (off_t)(16 * PAGE));
	CHECK(lseek(f.fd, 16 * PAGE, SEEK_DATA) < 0 && errno == ENXIO && lseek(f.fd, -PAGE, SEEK_END) == (off_t)(15 * PAGE));
	/* sendfile and splice. */
	int pipes[2];
	off_t from = 12 * PAGE;

	CHECK(!pipe(pipes) && sendfile(pipes[1], f.fd, &from, 2 * PAGE) == (ssize_t)(2 * PAGE));
	CHECK(read(pipes[0], buffer, PAGE) == (ssize_t)PAGE && holds(buffer, 8));
	fill(at(m, 13), 9);
	CHECK(read(pipes[0], buffer, PAGE) == (ssize_t)PAGE && (holds(buffer, 8) || holds(buffer, 9)));
	CHECK(!fsync(f.fd) && !fdatasync(f.fd) && !msync(m, 16 * PAGE, MS_SYNC));
	/* Allocated beforehand: private, with its content. */
	if (merged)
		all_merged(f, m, 4);
	CHECK(!fallocate(f.fd, 0, 0, 20 * PAGE) && !fstat(f.fd, &st) && st.st_size == 20 * PAGE);
	CHECK(describe(f.id).merged_pages == 0);
	if (merged)
		for (int i = 0; i < 16; i++)
			CHECK(holds(at(m, i), 4));
	/* O_APPEND and a bad buffer. */
	int append = fcntl(f.fd, F_SETFL, O_APPEND);

	CHECK(!append && write(f.fd, "end", 3) == 3 && !fstat(f.fd, &st) && st.st_size == 20 * (off_t)PAGE + 3);
	char *volatile nowhere = (char *)8;

	CHECK(write(f.fd, nowhere, 10) < 0 && errno == EFAULT && pread(f.fd, nowhere, 10, 0) < 0 && errno == EFAULT);
	munmap(m, 16 * PAGE);
	close(f.fd);
}

static void lengths(void)
{
	lengths_of(0);
}

static void lengths_merged(void)
{
	lengths_of(1);
}

/* Private mappings see the file, and keep their own writes. */
static void private_mappings(void)
{
	struct file f = file_make(16);
	char *m = file_map(f), *p = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, f.fd, 0);

	all_merged(f, m, 5);
	CHECK(p != MAP_FAILED && holds(at(p, 3), 5));
	at(p, 3)[1] = 'x';
	at(p, 4)[1] = 'x';
	CHECK(holds(at(m, 3), 5) && holds(at(m, 4), 5) && at(p, 3)[1] == 'x' && at(p, 4)[1] == 'x');
	CHECK(describe(f.id).merged_pages == 16);
	fill(at(m, 3), 6);
	fill(at(m, 5), 6);
	CHECK(at(p, 3)[1] == 'x' && holds(at(p, 5), 6));
	all_merged(f, m, 7);
	CHECK(at(p, 3)[1] == 'x' && holds(at(p, 5), 7) && holds(at(m, 3), 7));
	munmap(m, 16 * PAGE);
	munmap(p, 16 * PAGE);
	close(f.fd);
}

/* ---- news ------------------------------------------------------------------------ */

static uint64_t news(int fd)
{
	uint64_t n = 0;

	return read(fd, &n, sizeof(n)) == sizeof(n) ? n : 0;
}

static int notify(int control, int fd)
{
	struct pageonefs_notify n = { fd, 0 };

	return ioctl(control, PAGEONEFS_NOTIFY, &n) ? -errno : 0;
}

/* A new file, a plain one, one that goes, and the mount's end are told, and nothing else. */
static void notifying(void)
{
	int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), other = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	int control = control_open(MOUNT);
	struct pageonefs_notify bad = { fd, 1 };

	CHECK(!notify(control, fd) && news(fd) == 0);
	struct file f = file_make(64);
	char *m = file_map(f);
	struct pageonefs_plain plain = { .id = f.id };

	/* It comes, and gets its length. */
	CHECK(news(fd) == 2);
	all_merged(f, m, 5);
	at(m, 3)[0] = 1;
	CHECK(mkdir(MOUNT "/news", 0700) == 0 && rmdir(MOUNT "/news") == 0 && news(fd) == 0);
	CHECK(!ioctl(control, PAGEONEFS_MAKE_PLAIN, &plain) && news(fd) == 1);
	CHECK(!ftruncate(f.fd, 32 * PAGE) && news(fd) == 1);
	CHECK(!fallocate(f.fd, 0, 0, 64 * PAGE) && news(fd) == 1);
	munmap(m, 64 * PAGE);
	close(f.fd);
	CHECK(news(fd) == 1);
	/* Another takes its place; no descriptor, another kind of file, and what is reserved. */
	CHECK(!notify(control, other));
	close(file_make(1).fd);
	CHECK(news(fd) == 0 && news(other) == 3);
	f = (struct file){ open(MOUNT, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600), 0, 0 };
	CHECK(news(other) == 1 && write(f.fd, "x", 1) == 1 && news(other) == 1 && write(f.fd, "x", 1) == 1);
	CHECK(news(other) == 0 && !close(f.fd) && news(other) == 1);
	CHECK(notify(control, 999) == -EBADF && notify(control, control) == -EINVAL);
	CHECK(ioctl(control, PAGEONEFS_NOTIFY, &bad) && errno == EINVAL);
	CHECK(!notify(control, -1));
	close(file_make(1).fd);
	CHECK(news(other) == 0);
	/* It does not hold the mount, whose end is told. */
	CHECK(!mkdir("/tmp/news", 0700) && !mount("none", "/tmp/news", "pageonefs", 0, "size=1M"));
	int there = control_open("/tmp/news");

	CHECK(!notify(there, fd) && news(fd) == 0);
	close(there);
	CHECK(!umount("/tmp/news") && news(fd) == 1 && !rmdir("/tmp/news"));
	close(fd);
	close(other);
}

/* All pages of a file with bits, as the daemon asks for them. Returns how many calls that took. */
static int walk(struct file f, uint32_t flags, uint64_t *found, int *count)
{
	static uint64_t bits[512];
	struct pageonefs_harvest h = { .id = f.id, .pages = 64 * 512, .bits = (uintptr_t)bits, .flags = flags };
	int calls = 0;

	*count = 0;
	do {
		CHECK(!ioctl(control_open(MOUNT), PAGEONEFS_HARVEST, &h));
		for (int i = 0; i < 64 * 512; i++)
			if (bits[i / 64] >> i % 64 & 1)
				found[(*count)++ % 8] = h.start + i;
		CHECK(h.next % 64 == 0 || h.next == ~0ul);
		h.start = h.next;
	} while (++calls < 100 && h.next != ~0ul);
	return calls;
}

/* What a harvest costs follows what was written, and not what a file's length is. */
static void far(void)
{
	const uint64_t pages[] = { 0, 40000, 1ul << 31, (1ul << 32) + 5, (1ul << 40) - 1 };
	struct pageonefs_harvest h = { .pages = 64, .flags = PAGEONEFS_HARVEST_ALL << 1 };
	struct file f = file_make(0);
	uint64_t found[8], frame = 0;
	int count;

	CHECK(!path_write("/proc/sys/vm/overcommit_memory", "1"));
	CHECK(!ftruncate(f.fd, 1l << 52) && describe(f.id).size == 1l << 52 && describe(f.id).uid == 0);
	CHECK(walk(f, PAGEONEFS_HARVEST_ALL, found, &count) == 1 && count == 0);
	for (int i = 0; i < 5; i++)
		CHECK(pwrite(f.fd, "x", 1, pages[i] * PAGE + 9) == 1);
	CHECK(walk(f, 0, found, &count) == 5 && count == 5 && !memcmp(found, pages, sizeof(pages)));
	/* What anybody holds keeps its bit: a batch of the processor may. */
	CHECK(walk(f, 0, found, &count) <= 5 && count <= 5);
	/* All that is there, merged or not. */
	CHECK(!merge_patiently(control_open(MOUNT), f, 40000, &frame));
	CHECK(walk(f, PAGEONEFS_HARVEST_ALL, found, &count) == 5 && count == 5 && !memcmp(found, pages, sizeof(pages)));
	CHECK(!ftruncate(f.fd, 40000 * PAGE));
	/* All that may have been there has a bit. */
	CHECK(walk(f, 0, found, &count) <= 5 && count > 4);
	CHECK(walk(f, PAGEONEFS_HARVEST_ALL, found, &count) <= 5 && count == 1 && found[0] == 0);
	h.id = f.id;
	CHECK(ioctl(control_open(MOUNT), PAGEONEFS_HARVEST, &h) && errno == EINVAL);
	h.flags = 0;
	h.reserved = 1;
	CHECK(ioctl(control_open(MOUNT), PAGEONEFS_HARVEST, &h) && errno == EINVAL);
	CHECK(!path_write("/proc/sys/vm/overcommit_memory", "0"));
	close(f.fd);
}

const struct test file_tests[] = {
	{ "names", names }, { "rights", rights }, { "limits", limits }, { "lengths", lengths },
	{ "lengths_merged", lengths_merged }, { "private_mappings", private_mappings }, { "notifying", notifying },
	{ "far", far }, { 0 },
};
