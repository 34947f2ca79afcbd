// SPDX-License-Identifier: GPL-2.0
/*
 * Merging. Up to 64 pages are locked, as far as that needs no waiting; their mappings go, a run of
 * neighbours at a time; then each is compared with its frame. The entries of those that are equal
 * are stored together, and then these pages leave the file together. Nothing is locked but these
 * pages, so batches of one domain and of one file run beside each other.
 */
#include <linux/delay.h>
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

/* Batches of other processors are emptied there, where a page seems to be in one: not often. */
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

/* Between pofs_vector_begin() and _end(). */
static bool page_holds(struct page *page, struct page *frame)
{
	if (pofs_no_compare)
		return true;
	return pofs_frame_zeros(frame) ? pofs_page_zeros(page) : pofs_pages_equal(page, frame);
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
		/* A new page is in a batch of its processor: of this one's, it comes out. */
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

/* One merged page, to another frame of equal content. */
static int move_one(struct merge_run *run, struct pageonefs_entry *e)
{
	struct pofs_inode *pi = run->pi;
	struct page *old = pofs_frame_at(pi, e->index), *frame;
	XA_STATE(xas, &run->domain->frames, 0);
	bool equal;
	int error;

	if (!old)
		return -EAGAIN;
	if (!e->frame || e->frame == pofs_frame_handle(old)) {
		e->frame = pofs_frame_handle(old);
		put_page(old);
		return -EEXIST;
	}
	rcu_read_lock();
	frame = pofs_frame_find(&xas, e->frame, &error);
	rcu_read_unlock();
	if (!frame)
		goto out;
	error = -EEXIST;
	equal = !PageHWPoison(old) && !PageHWPoison(frame);
	if (equal) {
		pofs_vector_begin();
		equal = page_holds(old, frame);
		pofs_vector_end();
	}
	if (!equal) {
		e->frame = pofs_frame_handle(old);
	} else {
		down_write(pofs_mapping_lock(pi, e->index));
		error = xa_cmpxchg(&pi->merged, e->index, old, frame, GFP_KERNEL) == old ? 0 : -EAGAIN;
		/* Within the lock: who makes the page private now waits for the other frame only. */
		if (!error)
			pofs_frame_wait(pi, old);
		up_write(pofs_mapping_lock(pi, e->index));
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

/*
 * A chunk under way. `result` of an entry is 0 while its page is to be merged; then `pages` has
 * the page, locked and with a reference, and `frames` the frame.
 */
struct chunk {
	int n;
	struct pageonefs_entry e[POFS_CHUNK];
	struct page *pages[POFS_CHUNK], *frames[POFS_CHUNK], *gone[POFS_CHUNK];
};

/* Locks pages that are in the file. Does not wait: others of this chunk are locked. */
static void lock_pages(struct merge_run *run, struct chunk *c)
{
	XA_STATE(xas, &run->mapping->i_pages, 0);
	int i;

	rcu_read_lock();
	for (i = 0; i < c->n; i++) {
		struct pageonefs_entry *e = &c->e[i];
		struct page *page;

		c->pages[i] = c->frames[i] = NULL;
		e->result = -EINVAL;
		if ((i && e->index <= c->e[i - 1].index) || e->index > (u64)MAX_LFS_FILESIZE >> PAGE_SHIFT)
			continue;
		e->result = -EAGAIN;
		page = pofs_load(&xas, e->index);
		if (!page)
			continue;
		if (PageCompound(page)) {
			e->result = -EBUSY;
			if (pinned(run, page, e->index))
				run->pinned_for_good = true;
			put_page(page);
			if (unlikely(pofs_slow_us))
				udelay(pofs_slow_us);
		} else if (!trylock_page(page)) {
			put_page(page);
		} else if (page->mapping != run->mapping || WARN_ON_ONCE(page->index != e->index)) {
			unlock_page(page);
			put_page(page);
		} else {
			e->result = 0;
			c->pages[i] = page;
		}
	}
	rcu_read_unlock();
}

static void zap_pages(struct merge_run *run, struct chunk *c)
{
	int i, j;

	for (i = 0; i < c->n; i = j) {
		j = i + 1;
		if (!c->pages[i])
			continue;
		while (j < c->n && c->pages[j] && c->e[j].index == c->e[j - 1].index + 1)
			j++;
		unmap_mapping_pages(run->mapping, c->e[i].index, j - i, false);
	}
}

/* Finds the frames of pages that may be merged, or makes them. */
static void find_frames(struct merge_run *run, struct chunk *c)
{
	XA_STATE(xas, &run->domain->frames, 0);
	int i;

	for (i = 0; i < c->n; i++) {
		if (!c->pages[i])
			continue;
		if (PageHWPoison(c->pages[i])) {
			c->e[i].result = -EHWPOISON;
		} else if (!alone(run, c->pages[i], c->e[i].index)) {
			c->e[i].result = -EBUSY;
			pofs_count(busy);
		}
	}
	rcu_read_lock();
	for (i = 0; i < c->n; i++)
		if (!c->e[i].result && c->e[i].frame)
			c->frames[i] = pofs_frame_find(&xas, c->e[i].frame, &c->e[i].result);
	rcu_read_unlock();
	for (i = 0; i < c->n; i++) {
		if (c->e[i].result || c->e[i].frame)
			continue;
		c->frames[i] = pofs_frame_new(run->domain, c->pages[i]);
		if (!c->frames[i])
			c->e[i].result = -ENOMEM;
	}
}

/* A page of which a frame was made is not compared with it: nobody else writes either. */
static void compare_pages(struct chunk *c)
{
	int i, compared = 0;

	for (i = 0; i < c->n; i++) {
		if (c->e[i].result || !c->e[i].frame)
			continue;
		if (PageHWPoison(c->frames[i])) {
			c->e[i].result = -ENOENT;
			continue;
		}
		/* Not too long without a soft interrupt. */
		if (compared++ % POFS_VECTOR_PAGES == 0) {
			if (compared > 1)
				pofs_vector_end();
			pofs_vector_begin();
		}
		if (!page_holds(c->pages[i], c->frames[i])) {
			c->e[i].result = -ESTALE;
			pofs_count(differ);
		}
	}
	if (compared)
		pofs_vector_end();
}

/* Stores the entries. Returns how many. */
static int store_entries(struct pofs_inode *pi, struct chunk *c)
{
	XA_STATE(xas, &pi->merged, 0);
	int i = 0, stored = 0;

	/* Before the entries: a reader that finds one finds that there are some. */
	atomic_long_add(c->n, &pi->count);
	do {
		xas_lock(&xas);
		for (; i < c->n; i++) {
			if (c->e[i].result)
				continue;
			/* A frame that cannot be read, and its page, which is not filled then. */
			if (pofs_walk(&xas, c->e[i].index)) {
				c->e[i].result = -EAGAIN;
				continue;
			}
			xas_store(&xas, c->frames[i]);
			if (xas_error(&xas))
				break;
			stored++;
		}
		xas_unlock(&xas);
	} while (xas_nomem(&xas, GFP_KERNEL));
	for (; i < c->n; i++)
		c->e[i].result = c->e[i].result ?: -ENOMEM;
	atomic_long_sub(c->n - stored, &pi->count);
	return stored;
}

/* `n` pages have left the file, which are counted where this one is. */
void pofs_uncount_pages(struct address_space *mapping, struct folio *one, int n)
{
	mapping->nrpages -= n;
	__lruvec_stat_mod_folio(one, NR_FILE_PAGES, -n);
	__lruvec_stat_mod_folio(one, NR_SHMEM, -n);
}

/* Whether a node of the file's table begins at page i, and all its pages leave: it goes at once. */
static bool whole_node(struct chunk *c, int i)
{
	int k;

	if (!IS_ENABLED(CONFIG_XARRAY_MULTI) || c->e[i].index % XA_CHUNK_SIZE || i + XA_CHUNK_SIZE > c->n ||
	    c->e[i + XA_CHUNK_SIZE - 1].index != c->e[i].index + XA_CHUNK_SIZE - 1)
		return false;
	for (k = i; k < i + XA_CHUNK_SIZE && !c->e[k].result; k++)
		;
	return k == i + XA_CHUNK_SIZE;
}

/*
 * Takes the pages out of the file, as delete_from_page_cache_batch() does, which is not exported.
 * tmpfs has no marks, writes nothing back by itself, and has no free_folio(); the inode has a user.
 */
static void remove_pages(struct merge_run *run, struct chunk *c)
{
	XA_STATE(xas, &run->mapping->i_pages, 0);
	struct folio *first = NULL;
	int i, alike = 0, gone = 0;

	xas_lock_irq(&xas);
	for (i = 0; i < c->n; i++) {
		struct folio *folio;

		if (c->e[i].result)
			continue;
		folio = page_folio(c->pages[i]);
		if (i >= gone && whole_node(c, i)) {
			xas_set_order(&xas, c->e[i].index, XA_CHUNK_SHIFT);
			xas_store(&xas, NULL);
			xas_set_order(&xas, c->e[i].index, 0);
			gone = i + XA_CHUNK_SIZE;
		} else if (i >= gone) {
			WARN_ON_ONCE(pofs_walk(&xas, c->e[i].index) != folio);
			xas_store(&xas, NULL);
		}
		folio->mapping = NULL;
		folio_clear_dirty(folio);
		if (first && (folio_memcg(folio) != folio_memcg(first) || folio_nid(folio) != folio_nid(first))) {
			pofs_uncount_pages(run->mapping, first, alike);
			alike = 0;
		}
		if (!alike++)
			first = folio;
	}
	if (alike)
		pofs_uncount_pages(run->mapping, first, alike);
	xas_unlock_irq(&xas);
}

static void merge_chunk(struct merge_run *run, struct chunk *c)
{
	struct pageonefs_entry *e = c->e;
	int i, done = 0, merged;

	run->drained = false;
	/* Nothing is locked yet. */
	for (i = 0; i < c->n; i++)
		if (!i || e[i].index / POFS_HUGE_PAGES != e[i - 1].index / POFS_HUGE_PAGES)
			pofs_huge_split(run->pi, e[i].index);
	lock_pages(run, c);
	zap_pages(run, c);
	find_frames(run, c);
	compare_pages(c);
	merged = store_entries(run->pi, c);
	if (merged) {
		/* tmpfs lets go of its charge in pofs_recount(). */
		pofs_charge(pofs_vfs(run->pi), merged);
		remove_pages(run, c);
	}
	for (i = 0; i < c->n; i++) {
		if (c->frames[i] && e[i].result)
			pofs_frame_put(run->domain, c->frames[i]);
		else if (c->frames[i])
			e[i].frame = pofs_frame_handle(c->frames[i]);
		if (!c->pages[i])
			continue;
		unlock_page(c->pages[i]);
		/* The file's reference. */
		if (!e[i].result)
			put_page(c->pages[i]);
		c->gone[done++] = c->pages[i];
	}
	if (done)
		put_pages(c->gone, done);
	run->merged += merged;
	for (i = 0; i < c->n; i++)
		if (!c->pages[i] && e[i].result == -EAGAIN)
			e[i].result = move_one(run, &e[i]);
}

/* A chunk, if nobody keeps merges away. */
static void merge_unless_blocked(struct merge_run *run, struct chunk *c)
{
	struct pofs_inode *pi = run->pi;
	u64 before = run->merged;
	int i;

	down_read(&pi->merging);
	if (pi->blocked || pi->plain) {
		for (i = 0; i < c->n; i++)
			c->e[i].result = -EBUSY;
	} else {
		merge_chunk(run, c);
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
	/* Too large for a stack. */
	struct chunk *c = kmalloc(sizeof(*c), GFP_KERNEL);
	long ret = 0;
	u32 at;

	if (!c)
		return -ENOMEM;
	for (at = 0; at < m->count && !ret; at += c->n) {
		struct pageonefs_entry __user *user = (struct pageonefs_entry __user *)u64_to_user_ptr(m->entries) + at;

		c->n = min_t(u32, POFS_CHUNK, m->count - at);
		if (copy_from_user(c->e, user, c->n * sizeof(*c->e))) {
			ret = -EFAULT;
			break;
		}
		/* Neighbours end where a node of the file's table does: see whole_node(). */
		if (c->n == POFS_CHUNK && c->e[c->n - 1].index - c->e[0].index == c->n - 1)
			c->n -= c->e[0].index % POFS_CHUNK;
		merge_unless_blocked(&run, c);
		if (copy_to_user(user, c->e, c->n * sizeof(*c->e)))
			ret = -EFAULT;
		else if (signal_pending(current) && at + c->n < m->count)
			ret = -EINTR;
		cond_resched();
	}
	kfree(c);
	m->merged = run.merged;
	if (run.pinned_for_good)
		pofs_make_plain(pi, PAGEONEFS_PLAIN_PINNED);
	return ret;
}
