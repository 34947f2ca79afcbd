// SPDX-License-Identifier: GPL-2.0
/*
 * What the fuzzer does by calls: reading and writing, lengths and holes, disks, pipes, names.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fuzz.h"

#define MOST (8 * PAGE)

/* A buffer of the thread's own, aligned to pages. */
static char *buffer(void)
{
	static __thread char *b;

	if (!b && posix_memalign((void **)&b, PAGE, 2 * MOST))
		abort();
	return b;
}

static int file_any(struct me *me)
{
	int f = rnd(me, SHARED + 1);

	return f < SHARED ? f : SHARED + me->owner;
}

static bool is_tail(struct me *me, int f, uint64_t from)
{
	return f >= SHARED || (from >= HEAD * PAGE && me->owner == f);
}

/* Ends a change whose call returned `ret` of `len`. */
static long end(struct me *me, const char *what, int f, uint64_t from, uint64_t len, long ret)
{
	int error = errno;

	note(me, what, f, from, len, ret < 0 ? -error : ret);
	if (ret < 0 && !w->faults && error != EINTR)
		BAD("%s of file %d, page %lu: %s", what, f, (long)(from / PAGE), strerror(error));
	changed(me, ret == (long)len);
	return ret < 0 ? -1 : 0;
}

static long write_some(struct me *me)
{
	int f = file_any(me), fd = me->direct[f] >= 0 && !rnd(me, 4) ? me->direct[f] : me->fd[f];
	uint64_t from, len;
	struct iovec v[2];
	long ret;

	if (!pick(me, f, 3 * PAGE, &from, &len))
		return 0;
	change(me, f, from, len);
	content(me, w->will[f] + from, len);
	switch (rnd(me, 3)) {
	case 0:
		v[0] = (struct iovec){ w->will[f] + from, len / 3 };
		v[1] = (struct iovec){ w->will[f] + from + len / 3, len - len / 3 };
		ret = pwritev(fd, v, 2, from);
		return end(me, "pwritev", f, from, len, ret);
	case 1:
		lseek(fd, from, SEEK_SET);
		ret = write(fd, w->will[f] + from, len);
		return end(me, "write", f, from, len, ret);
	default:
		ret = pwrite(fd, w->will[f] + from, len, from);
		return end(me, "pwrite", f, from, len, ret);
	}
}

static long check(struct me *me)
{
	int f = file_any(me), pipes[2], how = rnd(me, 6);
	uint64_t from, len;
	struct iovec there, here;
	char *at, *b = buffer();
	long ret, got = 0, n;
	off_t pos;

	if (!pick(me, f, MOST, &from, &len))
		return 0;
	pos = from;
	switch (how) {
	case 0:
	case 1:
		at = mapped(me, f, from, len, PROT_READ);
		ret = at ? compare_guarded(at, w->is[f] + from, len) : 0;
		if (ret > 0)
			right(me, "a mapping", f, from, len, at);
		if (ret < 0 && !w->faults)
			BAD("SIGBUS at a read of file %d, page %lu", f, (long)(from / PAGE));
		return ret < 0 ? ret : 0;
	case 2:
		ret = pread(me->direct[f] >= 0 && !rnd(me, 3) ? me->direct[f] : me->fd[f], b, len, from);
		break;
	case 3:
		at = mapped(me, f, from, len, PROT_READ);
		if (!at)
			return -1;
		there = (struct iovec){ at, len };
		here = (struct iovec){ b, len };
		ret = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
		break;
	default:
		if (pipe2(pipes, O_CLOEXEC))
			return -1;
		ret = how == 4 ? sendfile(pipes[1], me->fd[f], &pos, len) : splice(me->fd[f], &pos, pipes[1], NULL, len, 0);
		while (got < ret && (n = read(pipes[0], b + got, ret - got)) > 0)
			got += n;
		if (ret > 0 && got != ret)
			BAD("a pipe lost %ld bytes", ret - got);
		close(pipes[0]);
		close(pipes[1]);
	}
	if (ret < 0 && !w->faults)
		BAD("reading file %d, page %lu by way %d", f, (long)(from / PAGE), how);
	if (ret > 0)
		right(me, how == 2 ? "pread" : how == 3 ? "process_vm_readv" : how == 4 ? "sendfile" : "splice", f, from, ret, b);
	return ret < 0 ? -1 : 0;
}

/* ---- lengths and holes ------------------------------------------------------------- */

static long allocate(struct me *me)
{
	static const int modes[] = {
		0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE,
		FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
	};
	int f = file_any(me), mode = modes[rnd(me, 6)];
	uint64_t from, len, limit = (f < SHARED ? PAGES : TAIL) * PAGE;
	const char *what;
	bool whole;
	long ret;

	if (!rnd(me, 30)) {
		int bad = rnd(me, 2) ? FALLOC_FL_COLLAPSE_RANGE : FALLOC_FL_INSERT_RANGE;

		if (!fallocate(me->fd[f], bad, 0, PAGE) || errno != EOPNOTSUPP)
			BAD("fallocate mode %d", bad);
		return 0;
	}
	if (!pick(me, f, 6 * PAGE, &from, &len))
		return 0;
	/* Beyond the end. */
	if (is_tail(me, f, from) && !rnd(me, 4))
		len += rnd(me, limit - from - len + 1);
	whole = mode & FALLOC_FL_PUNCH_HOLE && f < SHARED && rnd(me, 2) && len >= 2 * PAGE;
	if (whole) {
		len = (from + len) / PAGE * PAGE;
		from = (from + PAGE - 1) / PAGE * PAGE;
		len -= from;
	}
	change(me, f, from, len);
	if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))
		memset(w->will[f] + from, 0, len);
	if (whole) {
		/* As the daemon does. A reader by process_vm_readv(2) has it pinned for a moment. */
		uint64_t held = 0;
		struct pageonefs_punch p = { f + 1, from / PAGE, len / PAGE, (uintptr_t)&held, 0 };

		do
			ret = ioctl(control_open(MOUNT), PAGEONEFS_PUNCH, &p);
		while (!ret && held);
	} else {
		ret = fallocate(me->fd[f], mode, from, len);
	}
	if (!ret && !(mode & FALLOC_FL_KEEP_SIZE) && from + len > w->size[f])
		w->size[f] = from + len;
	what = whole ? "punch unless pinned" : mode & FALLOC_FL_PUNCH_HOLE ? "punch" : mode & FALLOC_FL_ZERO_RANGE ? "zero" : "allocate";
	return end(me, what, f, from, len, ret ? ret : (long)len);
}

static long truncate_file(struct me *me)
{
	int f = me->owner < SHARED && rnd(me, 2) ? me->owner : SHARED + me->owner;
	uint64_t low = f < SHARED ? HEAD * PAGE : 0, limit = (f < SHARED ? PAGES : TAIL) * PAGE;
	uint64_t size = low + rnd(me, limit - low + 1), old = w->size[f];
	long ret;

	/* A private mapping of the parent's would lose pages. */
	if (me->child)
		return 0;
	if (rnd(me, 2))
		size &= -PAGE;
	if (rnd(me, 2))
		size = limit;
	change(me, f, low, limit - low);
	if (size < old)
		memset(w->will[f] + size, 0, old - size);
	ret = ftruncate(me->fd[f], size);
	if (!ret)
		w->size[f] = size;
	end(me, "truncate", f, low, limit - low, ret ? ret : (long)(limit - low));
	note(me, "truncate to", f, size, limit - size, ret);
	for (int i = 0; i < SLOTS && w->size[f] == size && size < old; i++) {
		struct slot *s = &me->slots[i];

		for (uint32_t k = 0; s->private && s->file == f && k < s->pages; k++)
			if ((s->first + k) * PAGE >= size)
				s->cow &= ~(1ull << k);
	}
	return ret;
}

static long seek(struct me *me)
{
	int f = me->owner < SHARED && rnd(me, 2) ? me->owner : SHARED + me->owner;
	uint64_t size = w->size[f], at = rnd(me, size + 1);
	struct stat st;

	if (lseek(me->fd[f], 0, SEEK_END) != (off_t)size || fstat(me->fd[f], &st) || st.st_size != (off_t)size)
		BAD("file %d has not %lu bytes", f, (long)size);
	if (at < size && (lseek(me->fd[f], at, SEEK_DATA) != (off_t)at || lseek(me->fd[f], at, SEEK_HOLE) != (off_t)size))
		BAD("file %d is not data at %lu", f, (long)at);
	if (lseek(me->fd[f], size, SEEK_DATA) >= 0 || errno != ENXIO)
		BAD("file %d has data at its end", f);
	return rnd(me, 2) ? fsync(me->fd[f]) : fdatasync(me->fd[f]);
}

/* ---- disks ----------------------------------------------------------------------------- */

/* A disk writes to a mapping, of file 0 alone. */
static long disk_in(struct me *me)
{
	uint64_t from, len, off;
	char *at;
	long ret;

	if (me->disk < 0 || !pick(me, 0, MOST, &from, &len) || from % PAGE || len < PAGE)
		return 0;
	len &= -PAGE;
	off = rnd(me, (DISK - len) / PAGE + 1) * PAGE;
	at = mapped(me, 0, from, len, PROT_READ | PROT_WRITE);
	if (!at)
		return -1;
	/* Something that is about to be merged. */
	if (rnd(me, 4)) {
		change(me, 0, from, len);
		for (uint64_t i = 0; i < len; i += PAGE)
			fill(w->will[0] + from + i, rnd(me, 3) + 1);
		ret = copy_guarded(at, w->will[0] + from, len);
		note(me, "store before a disk's", 0, from, len, ret);
		changed(me, !ret);
		usleep(rnd(me, 3) * 10000);
	}
	change(me, 0, from, len);
	memcpy(w->will[0] + from, w->disk + off, len);
	ret = pread(me->disk, at, len, off);
	return end(me, "a disk's read", 0, from, len, ret);
}

static long disk_out(struct me *me)
{
	int f = file_any(me);
	uint64_t from, len, off;
	char *at;

	if (me->scratch < 0 || !pick(me, f, MOST, &from, &len) || from % PAGE || len < PAGE)
		return 0;
	len &= -PAGE;
	off = me->owner * DISK + rnd(me, (DISK - len) / PAGE + 1) * PAGE;
	at = mapped(me, f, from, len, PROT_READ);
	if (!at)
		return -1;
	if (pwrite(me->scratch, at, len, off) != (long)len || pread(me->scratch, buffer(), len, off) != (long)len) {
		if (!w->faults)
			BAD("the disk");
		return -1;
	}
	right(me, "a disk", f, from, len, buffer());
	return 0;
}

/* ---- pipes -------------------------------------------------------------------------- */

/* A pipe holds a page: what comes out is what it was, or what was written meanwhile. */
static long vmsplice_page(struct me *me)
{
	int f = file_any(me), a[2], b[2] = { -1, -1 };
	char old[PAGE], seen[PAGE], *at;
	struct iovec v;
	uint64_t from, len;
	long ret = -1;

	if (!pick(me, f, PAGE, &from, &len))
		return 0;
	if (from % PAGE + len > PAGE)
		len = PAGE - from % PAGE;
	at = mapped(me, f, from, len, PROT_READ | PROT_WRITE);
	if (!at || pipe2(a, O_CLOEXEC))
		return -1;
	if (pipe2(b, O_CLOEXEC))
		goto out;
	v = (struct iovec){ at, len };
	memcpy(old, w->is[f] + from, len);
	if (vmsplice(a[1], &v, 1, rnd(me, 4) ? 0 : SPLICE_F_GIFT) != (long)len)
		goto out;
	ret = rnd(me, 2) ? tee(a[0], b[1], len, 0) : 0;
	if (rnd(me, 2))
		usleep(rnd(me, 20000));
	if (rnd(me, 2)) {
		change(me, f, from, len);
		content(me, w->will[f] + from, len);
		ret = copy_guarded(at, w->will[f] + from, len);
		note(me, "store while a pipe has it", f, from, len, ret);
		changed(me, !ret);
	}
	for (int i = 0; i < 2; i++) {
		if (i && ret <= 0)
			break;
		if (read(i ? b[0] : a[0], seen, len) != (long)len)
			break;
		for (uint64_t k = 0; k < len; k++)
			if (seen[k] != old[k] && seen[k] != w->is[f][from + k]) {
				BAD("a pipe has what file %d, page %lu never had", f, (long)(from / PAGE));
				break;
			}
	}
	ret = 0;
out:
	for (int i = 0; i < 2; i++) {
		close(a[i]);
		if (b[i] >= 0)
			close(b[i]);
	}
	return ret;
}

/* From one file to another, or from a pipe into a mapping. */
static long splice_files(struct me *me)
{
	int f = file_any(me), g = file_any(me), pipes[2], how = rnd(me, 4);
	uint64_t from, to, len, most;
	off_t in, out;
	long ret = -1, n;
	char *at;

	if (!pick(me, f, MOST, &from, &len) || !pick(me, g, MOST, &to, &most))
		return 0;
	if (len > most)
		len = most;
	if (f == g && from < to + len && to < from + len)
		return 0;
	at = how == 3 ? mapped(me, g, to, len, PROT_READ | PROT_WRITE) : NULL;
	if ((how == 3 && !at) || pipe2(pipes, O_CLOEXEC))
		return -1;
	in = from;
	out = to;
	change(me, g, to, len);
	memcpy(w->will[g] + to, w->is[f] + from, len);
	switch (how) {
	case 0:
		lseek(me->fd[g], to, SEEK_SET);
		ret = sendfile(me->fd[g], me->fd[f], &in, len);
		break;
	case 1:
		ret = copy_file_range(me->fd[f], &in, me->fd[g], &out, len, 0);
		break;
	default:
		n = splice(me->fd[f], &in, pipes[1], NULL, len, 0);
		if (n > 0)
			ret = how == 3 ? read(pipes[0], at, n) : splice(pipes[0], NULL, me->fd[g], &out, n, 0);
		else
			ret = n;
	}
	ret = end(me, how == 0 ? "sendfile" : how == 1 ? "copy_file_range" : how == 2 ? "splice" : "read from a pipe", g, to, len, ret);
	close(pipes[0]);
	close(pipes[1]);
	return ret;
}

/* Another process's write. */
static long vm_write(struct me *me)
{
	uint64_t from, len;
	struct iovec here, there;
	char *at;
	long ret;

	if (!pick(me, 0, 3 * PAGE, &from, &len))
		return 0;
	at = mapped(me, 0, from, len, PROT_READ | PROT_WRITE);
	if (!at)
		return -1;
	change(me, 0, from, len);
	content(me, w->will[0] + from, len);
	here = (struct iovec){ w->will[0] + from, len };
	there = (struct iovec){ at, len };
	ret = process_vm_writev(getpid(), &here, 1, &there, 1, 0);
	return end(me, "process_vm_writev", 0, from, len, ret);
}

/* ---- names ----------------------------------------------------------------------------- */

/* Files that come and go, whose pages others have too. */
static long names(struct me *me)
{
	char a[64], b[64], page[PAGE], proc[64];
	uint64_t c = rnd(me, 6);
	long ret = -1;
	int fd = -1;

	snprintf(a, sizeof(a), MOUNT "/fuzz/a%d%s", me->owner, me->child ? "c" : "");
	snprintf(b, sizeof(b), MOUNT "/fuzz/b%d%s", me->owner, me->child ? "c" : "");
	/* Where an allocation fails the old ones stay, and would be taken for the new. */
	if ((unlink(a) && errno != ENOENT) || (unlink(b) && errno != ENOENT))
		goto out;
	fd = rnd(me, 2) ? open(a, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : open(MOUNT "/fuzz", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	if (fd < 0)
		return -1;
	fill(page, c);
	if (pwrite(fd, page, PAGE, 0) != (long)PAGE || pwrite(fd, page, PAGE, PAGE) != (long)PAGE)
		goto out;
	snprintf(proc, sizeof(proc), "/proc/self/fd/%d", fd);
	if (access(a, F_OK) && linkat(AT_FDCWD, proc, AT_FDCWD, a, AT_SYMLINK_FOLLOW))
		goto out;
	if (rnd(me, 2) ? rename(a, b) : link(a, b))
		goto out;
	usleep(rnd(me, 20000));
	close(fd);
	fd = open(b, O_RDWR | O_CLOEXEC);
	memset(page, 1, PAGE);
	if (fd < 0 || pread(fd, page, PAGE, PAGE) != (long)PAGE)
		goto out;
	if (!holds(page, c))
		BAD("owner %d: a file of another name has another content", me->owner);
	ret = 0;
	if (!rnd(me, 4)) {
		unlink(b);
		ret = symlink(a, b) ?: unlink(b) ?: mkdir(b, 0700) ?: rmdir(b);
	}
out:
	if (ret && !w->faults)
		BAD("names");
	if (fd >= 0)
		close(fd);
	return ret;
}

long op_calls(struct me *me, int op)
{
	switch (op) {
	case OP_PWRITE:
		return write_some(me);
	case OP_CHECK:
		return check(me);
	case OP_FALLOCATE:
		return allocate(me);
	case OP_TRUNCATE:
		return truncate_file(me);
	case OP_SEEK:
		return seek(me);
	case OP_DISK_IN:
		return disk_in(me);
	case OP_DISK_OUT:
		return disk_out(me);
	case OP_VMSPLICE:
		return vmsplice_page(me);
	case OP_SPLICE:
		return splice_files(me);
	case OP_VM_WRITE:
		return vm_write(me);
	case OP_RENEW:
		if (!me->child) {
			may_fail(me, false);
			own_file(me);
			may_fail(me, true);
		}
		return 0;
	default:
		return names(me);
	}
}
