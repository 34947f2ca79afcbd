// SPDX-License-Identifier: GPL-2.0
/*
 * The daemon of the fuzzer of accounts: it harvests, digests and merges all mounts' files, with
 * right and wrong pairs, makes files plain, and makes calls that have to be refused.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "fuzz-accounts.h"

static int control[TENANTS];
static uint64_t r;

static bool may_lack_memory(void)
{
	return w->faults || w->tight >= 0 || w->commit;
}

/* The mount's daemon does what it wants; a file may have gone. */
static bool refused(int ret, const char *what)
{
	if (ret && errno != ESRCH && errno != EINTR && !(errno == ENOMEM && may_lack_memory()))
		BAD("%s", what);
	return ret;
}

static void merge(int tenant, uint64_t id, struct pageonefs_entry *e, uint32_t n)
{
	struct pageonefs_merge m = { .id = id, .entries = (uintptr_t)e, .count = n };

	if (!n || refused(ioctl(control[tenant], PAGEONEFS_MERGE, &m), "merge"))
		return;
	for (uint32_t i = 0; i < n; i++) {
		switch (e[i].result) {
		case 0:
			w->did[DID_MERGE]++;
			break;
		case -EEXIST:
		case -EAGAIN:
		case -EBUSY:
		case -ESTALE:
		case -ENOENT:
		case -EMLINK:
			break;
		default:
			if (e[i].result != -ENOMEM || !may_lack_memory())
				BAD("merge says %s", strerror(-e[i].result));
		}
	}
}

/* Each page whose content another had before. */
static void merge_equal(int tenant, uint64_t id, const uint64_t *d, uint32_t pages)
{
	struct pageonefs_entry e[SHARED_PAGES];
	int domain = DOMAIN_OF(tenant);
	uint64_t asked[SHARED_PAGES];
	uint32_t n = 0, k;

	for (uint32_t i = 0; i < pages; i++) {
		if (d[i] <= PAGEONEFS_PAGE_AWAY || d[i] & 1)
			continue;
		k = mix(d[i]) % KNOWN;
		if (w->known[domain][k].digest != d[i]) {
			w->known[domain][k].digest = d[i];
			w->known[domain][k].frame = 0;
			continue;
		}
		e[n] = (struct pageonefs_entry){ .index = i, .frame = w->known[domain][k].frame };
		if (!rnd(&r, 64)) {
			e[n].frame = rnd(&r, 2) ? w->known[domain][rnd(&r, KNOWN)].frame : r;
			w->did[DID_WRONG]++;
		}
		asked[n] = e[n].frame;
		n++;
	}
	merge(tenant, id, e, n);
	for (uint32_t i = 0; i < n; i++) {
		k = mix(d[e[i].index]) % KNOWN;
		if (!e[i].result) {
			w->known[domain][k].frame = e[i].frame;
			/* New, or another in the place of a full one. */
			if (!asked[i] || (e[i].frame != asked[i] && !w->maker[domain][e[i].frame & 0xffff]))
				w->maker[domain][e[i].frame & 0xffff] = tenant + 1;
		} else if (e[i].result == -ENOENT || e[i].result == -EMLINK || e[i].result == -ESTALE) {
			w->known[domain][k].frame = 0;
		}
	}
}

static void file(int tenant, const struct pageonefs_file *f)
{
	uint64_t d[SHARED_PAGES], bits[SHARED_PAGES / 64];
	uint32_t pages = f->size / PAGE < SHARED_PAGES ? f->size / PAGE : SHARED_PAGES;
	struct pageonefs_digest digest = { .id = f->id, .pages = pages, .out = (uintptr_t)d, .seed = 7 };
	struct pageonefs_harvest h = { .id = f->id, .pages = SHARED_PAGES, .bits = (uintptr_t)bits };

	if (f->inode != w->inode[tenant][0] && (w->plain || !rnd(&r, 400))) {
		struct pageonefs_plain p = { f->id };

		/* It takes as much memory as there are pages. */
		if (ioctl(control[tenant], PAGEONEFS_MAKE_PLAIN, &p) && errno != ESRCH && errno != EINTR && !may_lack_memory())
			BAD("make plain");
		w->did[DID_PLAIN]++;
	}
	if (!rnd(&r, 3) && !refused(ioctl(control[tenant], PAGEONEFS_HARVEST, &h), "harvest"))
		w->did[DID_HARVEST]++;
	if (!refused(ioctl(control[tenant], PAGEONEFS_DIGEST, &digest), "digest"))
		merge_equal(tenant, f->id, d, pages);
}

/* A sealed file of a store, whose pages are lent: a punch is refused, and no byte goes. */
static void refused_punch(int tenant)
{
	enum { N = 8 };
	struct pageonefs_file f;
	struct pageonefs_list l = { .files = (uintptr_t)&f, .room = 1 };
	struct pageonefs_entry e[N];
	struct pageonefs_merge m = { .entries = (uintptr_t)e, .count = N };
	char page[PAGE], *shared = MAP_FAILED, *private = MAP_FAILED;
	uint64_t content = 1ull << 62 | (r & ~0xffull);
	int store, fd = -1, i;

	may_fail(false);
	store = ioctl(control[tenant], PAGEONEFS_STORE);
	if (store >= 0)
		fd = openat(store, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, N * PAGE) || ioctl(store, PAGEONEFS_LIST, &l) || l.filled != 1)
		goto out;
	shared = mmap(0, N * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	private = mmap(0, N * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
	if (shared == MAP_FAILED || private == MAP_FAILED)
		goto out;
	for (i = 0; i < N; i++) {
		struct pageonefs_slot slot = { .id = f.id, .index = i, .pid = w->pid[tenant * WORKERS] };

		/* A worker pays, if there is one, and room. */
		may_fail(true);
		if (ioctl(store, PAGEONEFS_SLOT, &slot) && !(errno == ENOSPC && w->commit))
			refused(-1, "slot");
		may_fail(false);
		fill(page, content + i);
		e[i] = (struct pageonefs_entry){ .index = i };
		if (copy_guarded(shared + i * PAGE, page, PAGE))
			goto out;
	}
	m.id = f.id;
	may_fail(true);
	if (refused(ioctl(store, PAGEONEFS_MERGE, &m), "lend"))
		goto out;
	may_fail(false);
	if (rnd(&r, 2) && !holds(private, content))
		BAD("a lent page");
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | 0x10 /* F_SEAL_FUTURE_WRITE */))
		BAD("seals");
	may_fail(true);
	i = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, rnd(&r, N) * PAGE, PAGE);
	if (!i || (errno != EPERM && !w->faults))
		BAD("a punch of a sealed file: %d", i);
	i = fallocate(fd, 0, 0, (N + 1) * PAGE);
	if (!i || (errno != EPERM && !w->faults))
		BAD("growing a sealed file: %d", i);
	may_fail(false);
	for (i = 0; i < N; i++)
		if (pread(fd, page, PAGE, i * PAGE) != (long)PAGE || !holds(page, content + i) || !holds(private + i * PAGE, content + i))
			BAD("page %d of a store's file is wrong after a refused punch", i);
	w->did[DID_REFUSED]++;
out:
	if (shared != MAP_FAILED)
		munmap(shared, N * PAGE);
	if (private != MAP_FAILED)
		munmap(private, N * PAGE);
	if (fd >= 0)
		close(fd);
	if (store >= 0)
		close(store);
	may_fail(true);
}

void daemon_runs(uint64_t seed)
{
	struct pageonefs_file files[16];
	char path[64];

	r = seed;
	if (group_write("daemon", "cgroup.procs", getpid()))
		BAD("a cgroup");
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	catch_faults();
	for (int t = 0; t < TENANTS; t++) {
		mount_path(path, t);
		control[t] = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (control[t] < 0)
			BAD("open %s", path);
	}
	while (go_on(DAEMON)) {
		may_fail(true);
		int t = rnd(&r, TENANTS);
		struct pageonefs_list l = { .files = (uintptr_t)files, .room = 16 };

		if (refused(ioctl(control[t], PAGEONEFS_LIST, &l), "list"))
			l.filled = 0;
		for (uint32_t i = 0; i < l.filled && !w->parking; i++)
			file(t, &files[i]);
		if (!rnd(&r, 8))
			refused_punch(t);
		may_fail(false);
	}
	_exit(0);
}
