// SPDX-License-Identifier: GPL-2.0
/*
 * Merging. Up to 64 pages are locked, as far as that needs no waiting; their mappings go, a run of
 * neighbours at a time; then each is compared with its frame. Nothing is locked but these pages, so
 * batches of one domain and of one file run beside each other.
 */
#include <asm/fpu/api.h>
#include <linux/highmem.h>
#include <linux/jiffies.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/swap.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>

#include "pageonefs.h"

/* A page that is pinned whenever it is looked at, and for so long, is pinned for good. */
static unsigned int pin_seconds = 10;
module_param(pin_seconds, uint, 0600);
MODULE_PARM_DESC(pin_seconds, "how long a page stays pinned until its file is not merged any more, in seconds");
#define PIN_LOOKS 3

/* Drops references. What this processor's LRU batches hold goes with them. */
static void put_pages(struct page **pages, int n)
{
	struct folio_batch batch;
	int i;

	folio_batch_init(&batch);
	for (i = 0; i < n; i++) {
		if (folio_batch_add(&batch, page_folio(pages[i])) && i < n - 1)
			continue;
		pofs_release_batch(&batch);
		folio_batch_init(&batch);
	}
}

/*
 * The batches of other processors are emptied by themselves, where a page seems to be in one: not
 * often.
 */
static DEFINE_PER_CPU(struct work_struct, drain_work);

static void drain_here(struct work_struct *unused)
{
	struct folio_batch batch;

	folio_batch_init(&batch);
	pofs_release_batch(&batch);
}

static void drain_elsewhere(void)
{
	static unsigned long last;
	unsigned long then = READ_ONCE(last);
	int cpu;

	if (time_before(jiffies, then + HZ / 10) || cmpxchg(&last, then, jiffies) != then)
		return;
	pofs_count(drains);
	for_each_online_cpu(cpu)
		queue_work_on(cpu, system_wq, per_cpu_ptr(&drain_work, cpu));
}

void pofs_merge_start(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		INIT_WORK(per_cpu_ptr(&drain_work, cpu), drain_here);
}

void pofs_merge_stop(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		flush_work(per_cpu_ptr(&drain_work, cpu));
}

/*
 * Every x86-64 has SSE2: 16 bytes an instruction, where the kernel's memcmp() has 8. The compiler
 * does not use these registers in the kernel, so none is named as clobbered.
 */
static bool pages_differ(struct page *a, struct page *b)
{
	const void *p = kmap_local_page(a), *q = kmap_local_page(b);
	unsigned int equal, turns = PAGE_SIZE / 128;

	kernel_fpu_begin();
	asm volatile("pcmpeqd %%xmm0, %%xmm0\n"
		     "1:\n"
		     "movdqa (%[p]), %%xmm1\n\tpcmpeqd (%[q]), %%xmm1\n\tpand %%xmm1, %%xmm0\n"
		     "movdqa 16(%[p]), %%xmm2\n\tpcmpeqd 16(%[q]), %%xmm2\n\tpand %%xmm2, %%xmm0\n"
		     "movdqa 32(%[p]), %%xmm3\n\tpcmpeqd 32(%[q]), %%xmm3\n\tpand %%xmm3, %%xmm0\n"
		     "movdqa 48(%[p]), %%xmm4\n\tpcmpeqd 48(%[q]), %%xmm4\n\tpand %%xmm4, %%xmm0\n"
		     "movdqa 64(%[p]), %%xmm1\n\tpcmpeqd 64(%[q]), %%xmm1\n\tpand %%xmm1, %%xmm0\n"
		     "movdqa 80(%[p]), %%xmm2\n\tpcmpeqd 80(%[q]), %%xmm2\n\tpand %%xmm2, %%xmm0\n"
		     "movdqa 96(%[p]), %%xmm3\n\tpcmpeqd 96(%[q]), %%xmm3\n\tpand %%xmm3, %%xmm0\n"
		     "movdqa 112(%[p]), %%xmm4\n\tpcmpeqd 112(%[q]), %%xmm4\n\tpand %%xmm4, %%xmm0\n"
		     "add $128, %[p]\n\tadd $128, %[q]\n"
		     "dec %[turns]\n\tjnz 1b\n"
		     "pmovmskb %%xmm0, %[equal]\n"
		     : [p] "+r" (p), [q] "+r" (q), [turns] "+r" (turns), [equal] "=r" (equal)
		     :
		     : "memory", "cc");
	kernel_fpu_end();
	kunmap_local(q - PAGE_SIZE);
	kunmap_local(p - PAGE_SIZE);
	return equal != 0xffff && !pofs_no_compare;
}

struct merge_run {
	struct pofs_inode *pi;
	struct pofs_domain *domain;
	struct address_space *mapping;
	bool drained;
	bool pinned_for_good;
	u64 merged;
};

/* Whether the page at `index` is pinned for good: the same page, at every look, for seconds. */
static bool pinned(struct merge_run *run, struct page *page, pgoff_t index)
{
	struct pofs_pin *pin = &run->pi->pin;
	bool now = folio_maybe_dma_pinned(page_folio(page)), good = false;

	spin_lock(&pin->lock);
	if (now && (!pin->looks || (pin->index != index && time_after(jiffies, pin->last + 60 * HZ)))) {
		pin->index = index;
		pin->since = jiffies;
		pin->looks = 0;
	}
	if (pin->index == index) {
		pin->looks = now ? pin->looks + 1 : 0;
		pin->last = jiffies;
		good = pin->looks >= PIN_LOOKS && time_after(jiffies, pin->since + pin_seconds * HZ);
	}
	spin_unlock(&pin->lock);
	return good;
}

/*
 * Whether nobody but the file and this function has the page. It is locked, and its mappings are
 * gone.
 */
static bool alone(struct merge_run *run, struct page *page, pgoff_t index)
{
	bool held;

	if (page_count(page) != 2 && !run->drained) {
		/*
		 * A new page is in a batch of the processor that made it. Of this one's, it comes out.
		 */
		get_page(page);
		put_pages(&page, 1);
		run->drained = true;
		pofs_count(drains);
	}
	held = page_count(page) != 2;
	if ((held || run->pi->pin.index == index) && pinned(run, page, index))
		run->pinned_for_good = true;
	if (held && !folio_maybe_dma_pinned(page_folio(page)))
		drain_elsewhere();
	if (held && !pofs_no_pin_check)
		return false;
	return !PageCompound(page) && !PageWriteback(page) && PageUptodate(page) && !page_mapped(page);
}

/* One private page. It is locked. */
static int merge_one(struct merge_run *run, struct page *page, struct pageonefs_entry *e)
{
	struct pofs_inode *pi = run->pi;
	struct page *frame;
	int error = -ENOMEM;

	if (PageHWPoison(page))
		return -EHWPOISON;
	/* A hole that is being filled with what was merged. */
	if (xa_load(&pi->merged, e->index))
		return -EAGAIN;
	if (!alone(run, page, e->index)) {
		pofs_count(busy);
		return -EBUSY;
	}
	frame = e->frame ? pofs_frame_find(run->domain, e->frame, &error) : pofs_frame_new(run->domain, page);
	if (!frame)
		return error;
	error = 0;
	if (PageHWPoison(frame)) {
		error = -ENOENT;
	} else if (e->frame && pages_differ(page, frame)) {
		pofs_count(differ);
		error = -ESTALE;
	}
	if (!error)
		error = xa_err(xa_store(&pi->merged, e->index, frame, GFP_KERNEL));
	if (error) {
		pofs_frame_put(run->domain, frame);
		return error;
	}
	atomic_long_inc(&pi->count);
	/* tmpfs lets go of its charge in pofs_recount(). */
	pofs_charge(pofs_vfs(pi), 1);
	pofs_remove_page(run->mapping, page);
	e->frame = pofs_frame_handle(frame);
	run->merged++;
	return 0;
}

/* One merged page, to another frame of equal content. */
static int move_one(struct merge_run *run, struct pageonefs_entry *e)
{
	struct pofs_inode *pi = run->pi;
	struct page *old = pofs_frame_at(pi, e->index), *frame;
	int error;

	if (!old)
		return -EAGAIN;
	if (!e->frame || e->frame == pofs_frame_handle(old)) {
		e->frame = pofs_frame_handle(old);
		put_page(old);
		return -EEXIST;
	}
	frame = pofs_frame_find(run->domain, e->frame, &error);
	if (!frame)
		goto out;
	error = -EEXIST;
	if (PageHWPoison(old) || PageHWPoison(frame) || pages_differ(old, frame)) {
		e->frame = pofs_frame_handle(old);
	} else {
		lock_page(old);
		error = xa_cmpxchg(&pi->merged, e->index, old, frame, GFP_KERNEL) == old ? 0 : -EAGAIN;
		unlock_page(old);
	}
	if (error) {
		pofs_frame_put(run->domain, frame);
	} else {
		unmap_mapping_pages(run->mapping, e->index, 1, false);
		pofs_frame_put(run->domain, old);
		pofs_count(moves);
	}
out:
	put_page(old);
	return error;
}

static void merge_chunk(struct merge_run *run, struct pageonefs_entry *e, int n)
{
	struct page *pages[POFS_CHUNK], *gone[POFS_CHUNK];
	int i, j, done = 0;

	run->drained = false;
	for (i = 0; i < n; i++) {
		pages[i] = NULL;
		if ((i && e[i].index <= e[i - 1].index) || e[i].index > (u64)MAX_LFS_FILESIZE >> PAGE_SHIFT) {
			e[i].result = -EINVAL;
			continue;
		}
		/* Does not wait: others of this chunk are locked. */
		pages[i] = pagecache_get_page(run->mapping, e[i].index, FGP_LOCK | FGP_NOWAIT, 0);
		if (!pages[i])
			e[i].result = move_one(run, &e[i]);
	}
	for (i = 0; i < n; i = j) {
		j = i + 1;
		if (!pages[i])
			continue;
		while (j < n && pages[j] && e[j].index == e[j - 1].index + 1)
			j++;
		unmap_mapping_pages(run->mapping, e[i].index, j - i, false);
	}
	for (i = 0; i < n; i++) {
		if (!pages[i])
			continue;
		e[i].result = merge_one(run, pages[i], &e[i]);
		unlock_page(pages[i]);
		gone[done++] = pages[i];
	}
	put_pages(gone, done);
}

/* A chunk, if nobody keeps merges away. */
static void merge_unless_blocked(struct merge_run *run, struct pageonefs_entry *e, int n)
{
	struct pofs_inode *pi = run->pi;
	u64 before = run->merged;
	int i;

	down_read(&pi->merging);
	if (pi->blocked || pi->plain) {
		for (i = 0; i < n; i++)
			e[i].result = -EBUSY;
	} else {
		merge_chunk(run, e, n);
		if (run->merged != before)
			pofs_recount(pofs_vfs(pi));
	}
	up_read(&pi->merging);
	pofs_count_by(merges, run->merged - before);
	atomic64_add(run->merged - before, &POFS_SB(pofs_vfs(pi)->i_sb)->merged);
}

long pofs_merge(struct pofs_inode *pi, struct pageonefs_merge *m)
{
	struct merge_run run = {
		.pi = pi, .domain = POFS_SB(pofs_vfs(pi)->i_sb)->domain, .mapping = pofs_vfs(pi)->i_mapping,
	};
	struct pageonefs_entry *e = kmalloc_array(POFS_CHUNK, sizeof(*e), GFP_KERNEL);
	u32 at, n;
	long ret = 0;

	if (!e)
		return -ENOMEM;
	for (at = 0; at < m->count && !ret; at += n) {
		struct pageonefs_entry __user *user = (struct pageonefs_entry __user *)u64_to_user_ptr(m->entries) + at;

		n = min_t(u32, POFS_CHUNK, m->count - at);
		if (copy_from_user(e, user, n * sizeof(*e))) {
			ret = -EFAULT;
			break;
		}
		merge_unless_blocked(&run, e, n);
		if (copy_to_user(user, e, n * sizeof(*e)))
			ret = -EFAULT;
		else if (signal_pending(current) && at + n < m->count)
			ret = -EINTR;
		cond_resched();
	}
	kfree(e);
	m->merged = run.merged;
	if (run.pinned_for_good)
		pofs_make_plain(pi, PAGEONEFS_PLAIN_PINNED);
	return ret;
}

/* From here on nothing of the file is merged, and what is becomes private. */
int pofs_make_plain(struct pofs_inode *pi, unsigned int why)
{
	down_write(&pi->merging);
	if (!pi->plain)
		WRITE_ONCE(pi->plain, why);
	up_write(&pi->merging);
	return pofs_unmerge(pi, 0, ULONG_MAX);
}
