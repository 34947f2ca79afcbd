// SPDX-License-Identifier: GPL-2.0
/*
 * Merging. Up to 64 pages are locked, as far as that needs no waiting; their mappings go, a run of
 * neighbours at a time; then each is compared with its frame. The entries of those that are equal
 * are stored together, and then these pages leave the file together. Nothing is locked but these
 * pages, so batches of one domain and of one file run beside each other.
 */
#include <linux/delay.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "holders.h"
#include "huge.h"
#include "merge.h"
#include "tmpfs.h"
#include "vector.h"

/* Pages of a batch that are locked together. */
#define CHUNK	64

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
	struct pofs_look look;
	u64 named, used;	/* a frame that an entry named, and the one that it got for it */
	u64 merged;
};

/* One merged page, to another frame of equal content. */
static int move_one(struct merge_run *run, struct pageonefs_entry *e)
{
	struct pofs_inode *pi = run->pi;
	struct page *old = pofs_frame_at(pi, e->index), *frame;
	XA_STATE(xas, &run->domain->frames, 0);
	bool equal, alien = false;
	int error, joined = 0;

	if (!old)
		return -EAGAIN;
	if (!e->frame || e->frame == pofs_frame_handle(old)) {
		e->frame = pofs_frame_handle(old);
		put_page(old);
		return -EEXIST;
	}
	rcu_read_lock();
	frame = pofs_frame_find(&xas, e->frame, &error);
	if (frame && frame != old)
		joined = pofs_frame_join(run->domain, frame, READ_ONCE(pi->payer), &pi->payer);
	rcu_read_unlock();
	if (!frame)
		goto out;
	if (joined < 0) {
		pofs_frame_put(run->domain, frame);
		error = joined;
		goto out;
	}
	alien = joined;
	if (frame == old) {
		/* The one that is named is full. */
		e->frame = pofs_frame_handle(old);
		pofs_frame_put(run->domain, frame);
		error = -EEXIST;
		goto out;
	}
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
		error = pofs_table_swap(&pi->merged, e->index, old, frame, &alien) ? 0 : -EAGAIN;
		/* Within the lock: who makes the page private now waits for the other frame only. */
		if (!error)
			pofs_frame_wait(pi, old);
		up_write(pofs_mapping_lock(pi, e->index));
	}
	if (error) {
		pofs_frame_leave(run->domain, frame, alien, &pi->payer);
	} else {
		unmap_mapping_pages(run->mapping, e->index, 1, false);
		pofs_frame_leave(run->domain, old, alien, &pi->payer);
		pofs_count(moves);
	}
out:
	put_page(old);
	return error;
}

/*
 * A chunk under way. `result` of an entry is 0 while its page is to be merged; then `pages` has
 * the page, locked and with a reference, and `frames` the frame, and `alien` whether others pay
 * for that.
 */
struct chunk {
	int n;
	bool alien[CHUNK];
	struct pageonefs_entry e[CHUNK];
	struct page *pages[CHUNK], *frames[CHUNK], *gone[CHUNK];
};

/* Locks pages that are in the file. Does not wait: others of this chunk are locked. */
static void lock_pages(struct merge_run *run, struct chunk *c)
{
	XA_STATE(xas, &run->mapping->i_pages, 0);
	/* No cut is under way. Beyond the end nothing could be made private again. */
	pgoff_t end = pofs_no_end_check ? ULONG_MAX : pofs_end(run->pi);
	int i;

	rcu_read_lock();
	for (i = 0; i < c->n; i++) {
		struct pageonefs_entry *e = &c->e[i];
		struct page *page;

		c->pages[i] = c->frames[i] = NULL;
		e->result = -EINVAL;
		if ((i && e->index <= c->e[i - 1].index) || e->index > (u64)MAX_LFS_FILESIZE >> PAGE_SHIFT || e->reserved)
			continue;
		e->result = -EAGAIN;
		if (e->index >= end)
			continue;
		page = pofs_load(&xas, e->index);
		if (!page)
			continue;
		if (PageCompound(page)) {
			e->result = -EBUSY;
			pofs_look_for_pin(&run->look, page, e->index);
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

/* The frame that an entry names, or another for a full one, or a new one. */
static struct page *frame_of(struct merge_run *run, struct xa_state *xas, u64 handle, struct page *page, bool *alien,
			     int *error)
{
	struct page *frame;
	int joined = 0;

	*alien = false;
	if (!handle) {
		frame = pofs_frame_new(run->domain, page, page);
		*error = frame ? 0 : -ENOMEM;
		return frame;
	}
	/* As the last entry that named it. */
	frame = pofs_frame_find(xas, handle == run->named ? run->used : handle, error);
	if (!frame && handle == run->named)
		frame = pofs_frame_find(xas, handle, error);
	if (frame)
		joined = pofs_frame_join(run->domain, frame, folio_memcg(page_folio(page)), &run->pi->payer);
	else if (*error == -EMLINK)
		frame = pofs_frame_another(run->domain, handle, page, error);
	if (frame) {
		run->named = handle;
		run->used = pofs_frame_handle(frame);
	}
	*alien = joined > 0;
	if (joined >= 0)
		return frame;
	pofs_frame_put(run->domain, frame);
	*error = joined;
	return NULL;
}

/* Whether an entry uses the frame of the `last` one, as that does: then neither is looked for. */
static bool as_last(struct chunk *c, int last, int i)
{
	if (!c->e[i].frame || c->e[i].frame != c->e[last].frame || c->e[last].result || c->alien[last] ||
	    page_folio(c->pages[i])->memcg_data != page_folio(c->pages[last])->memcg_data ||
	    !pofs_frame_again(c->frames[last]))
		return false;
	c->frames[i] = c->frames[last];
	c->alien[i] = false;
	return true;
}

/* Finds the frames of pages that may be merged, or makes them. */
static void find_frames(struct merge_run *run, struct chunk *c)
{
	XA_STATE(xas, &run->domain->frames, 0);
	int i, last = -1;

	for (i = 0; i < c->n; i++) {
		if (!c->pages[i])
			continue;
		if (PageHWPoison(c->pages[i])) {
			c->e[i].result = -EHWPOISON;
		} else if (!pofs_alone(&run->look, c->pages[i], c->e[i].index)) {
			c->e[i].result = -EBUSY;
			pofs_count(busy);
		}
	}
	rcu_read_lock();
	for (i = 0; i < c->n; i++) {
		if (c->e[i].result)
			continue;
		if (last < 0 || !as_last(c, last, i))
			c->frames[i] = frame_of(run, &xas, c->e[i].frame, c->pages[i], &c->alien[i], &c->e[i].result);
		last = i;
	}
	rcu_read_unlock();
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
	struct mem_cgroup *active;
	int i = 0, stored = 0;

	while (i < c->n && c->e[i].result)
		i++;
	if (i == c->n)
		return 0;
	active = set_active_memcg(pofs_payer_set(&pi->payer, c->pages[i]));
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
			if (c->alien[i])
				xas_set_mark(&xas, POFS_MARK);
			stored++;
		}
		xas_unlock(&xas);
	} while (xas_nomem(&xas, POFS_MERGE_GFP));
	set_active_memcg(active);
	for (; i < c->n; i++)
		c->e[i].result = c->e[i].result ?: -ENOMEM;
	atomic_long_sub(c->n - stored, &pi->count);
	return stored;
}

/* The pages that are merged leave the file. */
static void leave(struct merge_run *run, struct chunk *c)
{
	int i, n = 0;

	for (i = 0; i < c->n; i++) {
		if (c->e[i].result)
			continue;
		c->gone[n++] = c->pages[i];
	}
	pofs_pages_leave(run->mapping, c->gone, n);
}

static void merge_chunk(struct merge_run *run, struct chunk *c)
{
	struct pofs_account *account = &POFS_SB(pofs_vfs(run->pi)->i_sb)->account;
	struct pageonefs_entry *e = c->e;
	int i, done = 0, merged;

	run->look.drained = false;
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
		/* They count twice until tmpfs has noticed. */
		pofs_move_begin(account, merged);
		percpu_counter_add(&account->merged, merged);
		leave(run, c);
		pofs_recount(pofs_vfs(run->pi));
		pofs_move_end(account, merged);
	}
	for (i = 0; i < c->n; i++) {
		if (c->frames[i] && e[i].result)
			pofs_frame_leave(run->domain, c->frames[i], c->alien[i], &run->pi->payer);
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
		pofs_put_pages(c->gone, done);
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
	}
	up_read(&pi->merging);
	pofs_count_by(merges, run->merged - before);
}

long pofs_merge(struct pofs_inode *pi, struct pageonefs_merge *m)
{
	struct merge_run run = {
		.pi = pi, .look = { .pi = pi }, .domain = POFS_SB(pofs_vfs(pi)->i_sb)->domain, .mapping = pofs_vfs(pi)->i_mapping,
	};
	/* Too large for a stack. */
	struct chunk *c = kmalloc(sizeof(*c), GFP_KERNEL);
	long ret = 0;
	u32 at;

	if (!c)
		return -ENOMEM;
	for (at = 0; at < m->count && !ret; at += c->n) {
		struct pageonefs_entry __user *user = (struct pageonefs_entry __user *)u64_to_user_ptr(m->entries) + at;

		c->n = min_t(u32, CHUNK, m->count - at);
		if (copy_from_user(c->e, user, c->n * sizeof(*c->e)) ||
		    (!pofs_no_first_check && copy_to_user(user, c->e, c->n * sizeof(*c->e)))) {
			ret = -EFAULT;
			break;
		}
		/* Neighbours end where a node of the file's table does: see pofs_pages_leave(). */
		if (c->n == CHUNK && c->e[c->n - 1].index - c->e[0].index == c->n - 1)
			c->n -= c->e[0].index % CHUNK;
		merge_unless_blocked(&run, c);
		if (copy_to_user(user, c->e, c->n * sizeof(*c->e)))
			ret = -EFAULT;
		else if (signal_pending(current) && at + c->n < m->count)
			ret = -EINTR;
		cond_resched();
	}
	kfree(c);
	m->merged = run.merged;
	if (run.look.pinned_for_good)
		pofs_make_plain(pi, PAGEONEFS_PLAIN_PINNED);
	return ret;
}
