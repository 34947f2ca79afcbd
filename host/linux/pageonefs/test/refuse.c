// SPDX-License-Identifier: GPL-2.0
/*
 * Calls that are refused: by what, and that they have changed nothing. And pages that become
 * private, which nobody sees half made.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

enum { PAGES = 64 };

/* ---- seals ----------------------------------------------------------------------------- */

/* A punch that seals refuse leaves what is lent. */
static void sealed(void)
{
	struct pageonefs_file file;
	struct pageonefs_list l = { .files = (uintptr_t)&file, .room = 1 };
	struct file f = { -1, 0, PAGES };
	char *m, *reader, byte;
	int mount_root, store, lent = 0;

	mkdir("/sealed", 0755);
	CHECK(!mount("none", "/sealed", "pageonefs", 0, "size=1m,domain=sealed"));
	mount_root = control_open("/sealed");
	store = ioctl(mount_root, PAGEONEFS_STORE);
	CHECK(store >= 0);
	f.fd = openat(store, "f", O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(f.fd >= 0 && !ftruncate(f.fd, PAGES * PAGE) && !ioctl(store, PAGEONEFS_LIST, &l) && l.filled == 1);
	f.id = file.id;
	m = file_map(f);
	for (int i = 0; i < PAGES; i++)
		fill(at(m, i), 100 + i);
	for (int i = 0; i < PAGES; i++) {
		uint64_t frame = 0;

		lent += !merge_patiently(store, f, i, &frame);
	}
	CHECK(lent == PAGES);
	reader = mmap(0, PAGES * PAGE, PROT_READ, MAP_PRIVATE, f.fd, 0);
	CHECK(!fcntl(f.fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE));
	CHECK(fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGES * PAGE) && errno == EPERM);
	CHECK(fallocate(f.fd, FALLOC_FL_ZERO_RANGE, 0, PAGES * PAGE) && errno == EPERM);
	CHECK(fallocate(f.fd, FALLOC_FL_KEEP_SIZE, 0, (PAGES + 1) * PAGE) && errno == EPERM);
	CHECK(ftruncate(f.fd, PAGE) && errno == EPERM && ftruncate(f.fd, 2 * PAGES * PAGE) && errno == EPERM);
	for (int i = 0; i < PAGES; i++)
		CHECK(holds(at(reader, i), 100 + i) && pread(f.fd, &byte, 1, i * PAGE) == 1 && byte == at(reader, i)[0]);
	CHECK(!ioctl(store, PAGEONEFS_LIST, &l) && l.filled == 1 && file.private_pages == PAGES);
	munmap(m, PAGES * PAGE);
	munmap(reader, PAGES * PAGE);
	close(f.fd);
	close(store);
	close(mount_root);
	CHECK(!umount("/sealed"));
}

/* ---- pages that become private ----------------------------------------------------------- */

static void run_on(int cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	sched_setaffinity(0, sizeof(one), &one);
}

/* Pages are merged, and made private by another process, while they are read: never as zeros. */
static void whole_pages(void)
{
	enum { MERGED = 8 };
	struct file f = file_make(16);
	char *m = file_map(f), page[PAGE];
	uint64_t frame = 0;
	long reads = 0, wrong = 0, chances = -1;
	FILE *slow = fopen(PARAMETERS "slow_around", "r");

	/* Where the kernel waits within a fault: until a page has merged meanwhile often enough. */
	if (slow && fgetc(slow) != '0')
		chances = 0;
	/* The last byte is zero: to punch it makes the page private, and changes nothing. */
	fill(page, 5);
	page[PAGE - 1] = 0;
	for (int i = 0; i < 16; i++)
		memcpy(at(m, i), page, PAGE);
	/* What follows stays merged: the pages around are mapped in few pieces. */
	CHECK(!merge_patiently(control_open(MOUNT), f, 15, &frame));
	for (int i = MERGED + 1; i < 15; i++) {
		uint64_t handle = frame;

		CHECK(!merge_patiently(control_open(MOUNT), f, i, &handle));
	}
	if (!fork_child()) {
		/* On one processor: a page in its batches is merged at once. */
		run_on(0);
		for (int i = 1; !sh->stop; i = i % MERGED + 1, sh->writes++) {
			uint64_t handle = frame;

			/* As soon as it is merged, and where it was not, so that it is in no batch next time. */
			merge_page(f, i, &handle);
			if (fallocate(f.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (i + 1) * PAGE - 1, 1))
				BAD("punch");
		}
		_exit(0);
	}
	run_on(1);
	while (chances < 0 ? reads < 10000 || sh->writes < 1000 : chances < 100 && !wrong) {
		uint64_t merges = stats().merges;

		madvise(m, 16 * PAGE, MADV_DONTNEED);
		/* Private: a read fault, and what lies around is mapped. */
		wrong += !!memcmp(at(m, 0), page, PAGE);
		chances += chances >= 0 && stats().merges != merges;
		for (int i = 1; i <= MERGED; i++, reads++)
			wrong += !!memcmp(at(m, i), page, PAGE);
	}
	sh->stop = 1;
	while (wait(0) > 0)
		;
	printf("    %ld pages were read, %ld wrong; %ld rounds of making them private\n", reads, wrong, sh->writes);
	CHECK(!wrong);
	munmap(m, 16 * PAGE);
	close(f.fd);
}

/* ---- wrong values ---------------------------------------------------------------------------- */

static int control;
static char *nowhere, *readonly;

/* The error number of a request; 0: it was not refused. */
static int asks(unsigned long cmd, void *arg)
{
	return ioctl(control, cmd, arg) ? errno : 0;
}

#define HARVEST(i, s, n, b)	\
	asks(PAGEONEFS_HARVEST, &(struct pageonefs_harvest){ .id = i, .start = s, .pages = n, .bits = (uintptr_t)(b) })
#define DIGEST(i, s, n, o, ...)	\
	asks(PAGEONEFS_DIGEST, &(struct pageonefs_digest){ .id = i, .start = s, .pages = n, .out = (uintptr_t)(o), __VA_ARGS__ })
#define MERGE(i, e, n) asks(PAGEONEFS_MERGE, &(struct pageonefs_merge){ .id = i, .entries = (uintptr_t)(e), .count = n })
#define PUNCH(i, s, n, h)	\
	asks(PAGEONEFS_PUNCH, &(struct pageonefs_punch){ .id = i, .start = s, .pages = n, .held = (uintptr_t)(h) })
#define LIST(a, f, n) asks(PAGEONEFS_LIST, &(struct pageonefs_list){ .after = a, .files = (uintptr_t)(f), .room = n })
#define NOTIFY(e, r) asks(PAGEONEFS_NOTIFY, &(struct pageonefs_notify){ .eventfd = e, .reserved = r })

static const unsigned long requests[] = {
	PAGEONEFS_INFO, PAGEONEFS_LIST, PAGEONEFS_HARVEST, PAGEONEFS_DIGEST, PAGEONEFS_MERGE, PAGEONEFS_MAKE_PLAIN,
	PAGEONEFS_STATS, PAGEONEFS_PUNCH, PAGEONEFS_NOTIFY, PAGEONEFS_SLOT,
};
enum { REQUESTS = sizeof(requests) / sizeof(*requests) };

static void wrong_requests(struct file f)
{
	struct pageonefs_entry e[3];
	uint64_t words[512], none = f.id + 1000;

	for (int i = 0; i < REQUESTS; i++)
		CHECK(asks(requests[i], nowhere) == EFAULT);
	CHECK(asks(_IO('1', 99), 0) == ENOTTY && asks(_IO('2', 1), 0) == ENOTTY);
	CHECK(asks(_IOWR('1', 3, char[4000]), words) == ENOTTY && asks(_IOR('1', 5, struct pageonefs_merge), words) == ENOTTY);
	CHECK(asks(PAGEONEFS_STORE, 0) == EINVAL);
	CHECK(LIST(0, nowhere, 1) == EFAULT && LIST(~0ul, nowhere, ~0u) == 0);
	CHECK(NOTIFY(999, 0) == EBADF && NOTIFY(-2, 0) == EBADF && NOTIFY(control, 0) == EINVAL && NOTIFY(-1, 1) == EINVAL);
	/* Files that are not there. */
	CHECK(HARVEST(none, 0, 64, words) == ESRCH && DIGEST(none, 0, 64, words) == ESRCH);
	CHECK(MERGE(none, e, 1) == ESRCH && PUNCH(none, 0, 1, words) == ESRCH && MERGE(0, e, 1) == ESRCH);
	CHECK(asks(PAGEONEFS_MAKE_PLAIN, &(struct pageonefs_plain){ none }) == ESRCH);
	CHECK(asks(PAGEONEFS_SLOT, &(struct pageonefs_slot){ .id = none, .pid = 1 }) == ESRCH);
	CHECK(asks(PAGEONEFS_SLOT, &(struct pageonefs_slot){ .id = f.id, .pid = 1 }) == EINVAL);
	/* Ranges. */
	CHECK(HARVEST(f.id, 1, 64, words) == EINVAL && HARVEST(f.id, 0, 63, words) == EINVAL);
	CHECK(HARVEST(f.id, -64ul, 128, words) == EINVAL);
	CHECK(DIGEST(f.id, -1ul, 2, words) == EINVAL && DIGEST(f.id, 1, 64, words, .only = (uintptr_t)words) == EINVAL);
	CHECK(DIGEST(f.id, 0, 64, words, .flags = 2) == EINVAL && DIGEST(f.id, 0, 64, words, .reserved = 1) == EINVAL);
	CHECK(DIGEST(f.id, 0, 64, words, .only = (uintptr_t)nowhere) == EFAULT && DIGEST(f.id, 0, 64, nowhere) == EFAULT);
	CHECK(PUNCH(f.id, -1ul, 2, words) == EINVAL && PUNCH(f.id, 1ul << 60, 1, words) == EINVAL);
	/* Memory of the caller's that cannot be written: nothing is done before that is known. */
	CHECK(HARVEST(f.id, 0, 64, nowhere) == EFAULT && HARVEST(f.id, 0, 64, readonly) == EFAULT);
	CHECK(PUNCH(f.id, 0, 64, nowhere) == EFAULT && PUNCH(f.id, 0, 64, readonly) == EFAULT);
	CHECK(MERGE(f.id, nowhere, 1) == EFAULT && MERGE(f.id, readonly, 64) == EFAULT);
	for (int i = 0; i < REQUESTS; i++)
		if (_IOC_DIR(requests[i]) & _IOC_READ) {
			/* They read a request that would do something, and could not answer. */
			memcpy(words, &(struct pageonefs_punch){ f.id, 0, 64, (uintptr_t)&words[8], 0 }, sizeof(struct pageonefs_punch));
			mprotect(readonly, PAGE, PROT_READ | PROT_WRITE);
			memcpy(readonly, words, 64);
			mprotect(readonly, PAGE, PROT_READ);
			CHECK(asks(requests[i], readonly) == EFAULT);
		}
	/* Entries. */
	e[0] = (struct pageonefs_entry){ .index = 5, .frame = 1ul << 40 };
	e[1] = (struct pageonefs_entry){ .index = 5 };
	e[2] = (struct pageonefs_entry){ .index = -1ul };
	CHECK(!MERGE(f.id, e, 3) && (e[0].result == -ENOENT || e[0].result == -EBUSY));
	CHECK(e[1].result == -EINVAL && e[2].result == -EINVAL);
	e[0] = (struct pageonefs_entry){ .index = 6, .reserved = 1 };
	CHECK(!MERGE(f.id, e, 1) && e[0].result == -EINVAL);
	e[0] = (struct pageonefs_entry){ .index = PAGES + 5 };
	CHECK(!MERGE(f.id, e, 1) && e[0].result == -EAGAIN && !MERGE(f.id, nowhere, 0));
}

/* As fallocate(2) has it. */
static void immutable(struct file f)
{
	static const int flags[] = { FS_IMMUTABLE_FL, FS_APPEND_FL };
	uint64_t held;
	int old, new;

	CHECK(!ioctl(f.fd, FS_IOC_GETFLAGS, &old));
	for (int i = 0; i < 2; i++) {
		new = old | flags[i];
		CHECK(!ioctl(f.fd, FS_IOC_SETFLAGS, &new) && PUNCH(f.id, 0, 64, &held) == EPERM);
	}
	CHECK(!ioctl(f.fd, FS_IOC_SETFLAGS, &old));
}

static void wrong_options(void)
{
	static const char *const options[] = {
		"domain", "domain=", "domain=a b", "domain=\t", "huge=always", "huge=within_size", "huge=force", "huge=", "huge",
		"size=x", "size=10%x", "size=", "nr_blocks=-1", "nr_blocks=1x", "nr_inodes=x", "mode=9", "uid=x", "gid=-5",
		"mpol=nonsense", "quota", "usrquota", "nonsense", "nonsense=1",
		"domain=0123456789012345678901234567890123456789012345678901234567890123",
	};
	struct stat st;

	mkdir("/wrong", 0755);
	for (unsigned int i = 0; i < sizeof(options) / sizeof(*options); i++) {
		int ret = mount("none", "/wrong", "pageonefs", 0, options[i]);

		/* tmpfs reads an empty size as 0. */
		if (!ret && !strcmp(options[i], "size="))
			umount("/wrong");
		else if (!ret || errno != EINVAL)
			BAD("mount with %s", options[i]);
	}
	CHECK(!mount("none", "/wrong", "pageonefs", 0, "domain=w,nr_blocks=16,nr_inodes=16,mode=0711"));
	for (unsigned int i = 0; i < sizeof(options) / sizeof(*options); i++)
		if (strcmp(options[i], "size=") && (!mount("none", "/wrong", 0, MS_REMOUNT, options[i]) || errno != EINVAL))
			BAD("remount with %s", options[i]);
	CHECK(!stat("/wrong", &st) && (st.st_mode & 07777) == 0711);
	CHECK(!umount("/wrong"));
}

static int of_a_user(void)
{
	char buffer[128] = { 0 };
	int wrong = 0;

	if (setgid(1000) || setuid(1000))
		return 99;
	for (int i = 0; i < REQUESTS; i++)
		wrong += asks(requests[i], buffer) != EPERM || asks(requests[i], nowhere) != EPERM;
	wrong += asks(PAGEONEFS_STORE, 0) != EPERM || asks(_IO('1', 99), 0) != EPERM || asks(_IO('2', 1), 0) != ENOTTY;
	wrong += !mount("none", "/wrong", "pageonefs", 0, 0) || errno != EPERM;
	return wrong;
}

/* Each request and option with wrong values, by root and by a user. */
static void wrong_values(void)
{
	struct file f = file_make(PAGES);
	char *m = file_map(f);
	uint64_t bits = 0;
	int status;
	pid_t pid;

	control = control_open(MOUNT);
	nowhere = mmap(0, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	readonly = mmap(0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < PAGES; i++)
		fill(at(m, i), 50 + i);
	wrong_requests(f);
	immutable(f);
	wrong_options();
	pid = fork_child();
	if (!pid)
		_exit(of_a_user());
	waitpid(pid, &status, 0);
	CHECK(status == 0);
	/* Nothing is changed: no byte, no merged page, and all that was written is still dirty. */
	for (int i = 0; i < PAGES; i++)
		CHECK(holds(at(m, i), 50 + i));
	CHECK(describe(f.id).merged_pages == 0 && describe(f.id).plain == PAGEONEFS_PLAIN_NO);
	CHECK(harvest(f, &bits) == PAGES && bits == ~0ul);
	munmap(m, PAGES * PAGE);
	close(f.fd);
}

/* What cannot be allocated or cleared is left, and so is the length. */
static void refused_lengths(void)
{
	struct rlimit old, limit;
	struct file f = file_make(16);
	char *m = file_map(f);
	struct stat st;

	all_merged(f, m, 5);
	signal(SIGXFSZ, SIG_IGN);
	CHECK(!getrlimit(RLIMIT_FSIZE, &old));
	limit = (struct rlimit){ 16 * PAGE, old.rlim_max };
	CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
	CHECK(fallocate(f.fd, FALLOC_FL_ZERO_RANGE, 8 * PAGE, 16 * PAGE) && errno == EFBIG);
	CHECK(fallocate(f.fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 8 * PAGE, 16 * PAGE) && errno == EFBIG);
	CHECK(fallocate(f.fd, 0, 8 * PAGE, 16 * PAGE) && errno == EFBIG);
	CHECK(ftruncate(f.fd, 17 * PAGE) && errno == EFBIG);
	CHECK(pwrite(f.fd, "x", 1, 16 * PAGE) < 0 && errno == EFBIG);
	CHECK(!setrlimit(RLIMIT_FSIZE, &old));
	CHECK(fallocate(f.fd, FALLOC_FL_PUNCH_HOLE, 0, PAGE) && errno == EOPNOTSUPP);
	CHECK(fallocate(f.fd, FALLOC_FL_ZERO_RANGE, 0, 0) && errno == EINVAL && fallocate(f.fd, 0, -1, 5) && errno == EINVAL);
	CHECK(ftruncate(f.fd, -1) && errno == EINVAL);
	CHECK(!fstat(f.fd, &st) && st.st_size == 16 * (off_t)PAGE && describe(f.id).merged_pages == 16);
	for (int i = 0; i < 16; i++)
		CHECK(holds(at(m, i), 5));
	munmap(m, 16 * PAGE);
	close(f.fd);
}

/* Pages beyond a file's end do not merge until it is longer: so a plain file has none that are. */
static void beyond_end(void)
{
	struct pageonefs_plain plain;
	struct file f = file_make(16);
	uint64_t frame = 0, all[64];

	CHECK(!fallocate(f.fd, FALLOC_FL_KEEP_SIZE, 0, 64 * PAGE));
	f.pages = 64;
	digests(f, all);
	CHECK(!merge_patiently(control_open(MOUNT), f, 15, &frame));
	CHECK(all[15] && !all[16] && !all[40] && merge_patiently(control_open(MOUNT), f, 16, &frame) == -EAGAIN);
	CHECK(merge_patiently(control_open(MOUNT), f, 40, &frame) == -EAGAIN && describe(f.id).merged_pages == 1);
	CHECK(!ftruncate(f.fd, 40 * PAGE + 1) && !merge_patiently(control_open(MOUNT), f, 40, &frame));
	CHECK(merge_patiently(control_open(MOUNT), f, 41, &frame) == -EAGAIN);
	plain.id = f.id;
	CHECK(!ioctl(control_open(MOUNT), PAGEONEFS_MAKE_PLAIN, &plain));
	CHECK(describe(f.id).merged_pages == 0);
	close(f.fd);
}

/* A large file becomes private in several calls, none of which takes long. */
static void plain_pieces(void)
{
	enum { MORE = 100 };
	struct file f = file_make(PAGEONEFS_PLAIN_PAGES + MORE);
	struct pageonefs_plain plain = { f.id };
	char *m = file_map(f);

	all_merged(f, m, 5);
	CHECK(describe(f.id).merged_pages > PAGEONEFS_PLAIN_PAGES);
	CHECK(ioctl(control_open(MOUNT), PAGEONEFS_MAKE_PLAIN, &plain) && errno == EINTR);
	CHECK(describe(f.id).plain && describe(f.id).merged_pages > 0 && describe(f.id).merged_pages <= MORE);
	CHECK(!ioctl(control_open(MOUNT), PAGEONEFS_MAKE_PLAIN, &plain) && describe(f.id).merged_pages == 0);
	for (uint32_t i = 0; i < f.pages; i++)
		CHECK(holds(at(m, i), 5));
	munmap(m, f.pages * PAGE);
	close(f.fd);
}

const struct test refuse_tests[] = {
	{ "sealed", sealed }, { "whole_pages", whole_pages }, { "wrong_values", wrong_values }, { "refused_lengths", refused_lengths },
	{ "beyond_end", beyond_end }, { "plain_pieces", plain_pieces }, { 0 },
};
