// SPDX-License-Identifier: GPL-2.0
/*
 * A file: inode.h. What is done to its entries, and to its dirty bits, by all who change it.
 */
#include <linux/delay.h>
#include <linux/highmem.h>
#include <linux/pagemap.h>
#include <linux/sched/mm.h>

#include "inode.h"
#include "tmpfs.h"

/* ---- the mount's list of files -------------------------------------------------------- */

/* The list of files is not what it was. */
void pofs_news(struct pofs_super *ps)
{
	spin_lock(&ps->news_lock);
	if (ps->news)
		pofs_signal(ps->news);
	spin_unlock(&ps->news_lock);
}

/* NULL: nobody is told any more. */
void pofs_news_to(struct pofs_super *ps, struct eventfd_ctx *news)
{
	spin_lock(&ps->news_lock);
	swap(ps->news, news);
	spin_unlock(&ps->news_lock);
	if (news)
		eventfd_ctx_put(news);
}

/* ---- dirty bits --------------------------------------------------------------------- */

int pofs_mark_dirty(struct pofs_inode *pi, pgoff_t index)
{
	unsigned long *bits = xa_load(&pi->dirty, index / POFS_DIRTY_BITS);

	if (unlikely(!bits)) {
		void *other;

		bits = (unsigned long *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
		if (!bits)
			return -ENOMEM;
		other = xa_cmpxchg(&pi->dirty, index / POFS_DIRTY_BITS, NULL, bits, GFP_KERNEL_ACCOUNT);
		if (other) {
			free_page((unsigned long)bits);
			if (xa_err(other))
				return -ENOMEM;
			bits = other;
		}
	}
	set_bit(index % POFS_DIRTY_BITS, bits);
	/*
	 * Before the page is written, whoever looks for its lock. Pairs with the xchg() of a harvest.
	 */
	smp_mb__after_atomic();
	return 0;
}

/* Where there are no bits yet, nothing was ever written. */
void pofs_mark_dirty_range(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	unsigned long chunk, *bits;

	xa_for_each_range(&pi->dirty, chunk, bits, first / POFS_DIRTY_BITS, last / POFS_DIRTY_BITS) {
		unsigned long base = chunk * POFS_DIRTY_BITS;
		unsigned long i = first > base ? first - base : 0;
		unsigned long end = min(last - base, POFS_DIRTY_BITS - 1);

		while (i <= end) {
			if (i % BITS_PER_LONG || end - i < BITS_PER_LONG - 1) {
				set_bit(i++, bits);
				continue;
			}
			xchg(&bits[i / BITS_PER_LONG], ULONG_MAX);
			i += BITS_PER_LONG;
		}
		cond_resched();
	}
}

void pofs_dirty_free(struct pofs_inode *pi)
{
	unsigned long chunk, *bits;

	xa_for_each(&pi->dirty, chunk, bits)
		free_page((unsigned long)bits);
	xa_destroy(&pi->dirty);
}

/* ---- keeping merges away --------------------------------------------------------- */

/*
 * No page of the file is merged until pofs_unblock_merges(). tmpfs's own locks may be taken
 * meanwhile.
 */
void pofs_block_merges(struct pofs_inode *pi)
{
	down_write(&pi->merging);
	pi->blocked++;
	up_write(&pi->merging);
}

void pofs_unblock_merges(struct pofs_inode *pi)
{
	down_write(&pi->merging);
	pi->blocked--;
	up_write(&pi->merging);
}

/*
 * tmpfs changes pages of [first, last], and merged ones go, without a lock that a harvest could
 * wait for: so their bits are set before, and a harvest leaves them until the end.
 */
void pofs_cut_begin(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	if (pofs_no_cut_bits)
		return;
	down_write(&pi->merging);
	pi->cut_first = pi->cuts ? min(pi->cut_first, first) : first;
	pi->cut_last = pi->cuts ? max(pi->cut_last, last) : last;
	pi->cuts++;
	up_write(&pi->merging);
	pofs_mark_dirty_range(pi, first, last);
}

void pofs_cut_end(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	if (unlikely(pofs_slow_us))
		usleep_range(pofs_slow_us, pofs_slow_us + 1);
	/* A harvest may have begun before pofs_cut_begin(). */
	pofs_mark_dirty_range(pi, first, last);
	if (pofs_no_cut_bits)
		return;
	down_write(&pi->merging);
	pi->cuts--;
	up_write(&pi->merging);
}

/* ---- room ------------------------------------------------------------------------------- */

/* A page that moves just now may be taken for one. */
static bool is_hole(struct pofs_inode *pi, pgoff_t index)
{
	return (pofs_no_copy_room || !xa_load(&pi->merged, index)) && !xa_load(&pofs_vfs(pi)->i_mapping->i_pages, index);
}

/* For sure: what merges between two looks is seen by the third, as no entry goes meanwhile. */
static bool is_hole_still(struct pofs_inode *pi, pgoff_t index)
{
	bool ret;

	down_read(pofs_mapping_lock(pi, index));
	ret = is_hole(pi, index) && is_hole(pi, index);
	up_read(pofs_mapping_lock(pi, index));
	return ret;
}

/*
 * Before a page is made at `index`. If that is a hole, the mount must have room for so many: none
 * where only a merged page is to be copied. -ENOSPC, or -EAGAIN: as pofs_room_enter().
 */
int pofs_room_for(struct pofs_room *room, struct pofs_inode *pi, pgoff_t index, long pages)
{
	struct pofs_account *account = &POFS_SB(pofs_vfs(pi)->i_sb)->account;
	unsigned int moves = POFS_PAGE_MOVES * max(pages, 1L);

	if (pofs_no_copy_room && !pages)
		pages = 1;
	if (!pofs_room_enter(room, account, is_hole(pi, index) ? pages : 0, moves))
		return 0;
	if (pages > 1 || pofs_no_room_wait)
		return -ENOSPC;
	/* As tmpfs does it before it refuses. */
	pofs_recount(pofs_vfs(pi));
	return pofs_room_enter(room, account, is_hole_still(pi, index) ? pages : 0, moves);
}

/* The same for one page, and an answer. */
int pofs_room_await(struct pofs_room *room, struct pofs_inode *pi, pgoff_t index)
{
	int ret;

	while ((ret = pofs_room_for(room, pi, index, 1)) == -EAGAIN && !(ret = pofs_room_wait(room)))
		;
	return ret;
}

/* For all holes of [first, last], at once. Merges are blocked; others may move pages. */
int pofs_room_holes(struct pofs_room *room, struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	struct inode *inode = pofs_vfs(pi);
	struct pofs_account *account = &POFS_SB(inode->i_sb)->account;
	long holes = LONG_MAX, before;
	int ret;

	pofs_recount(inode);
	do {
		before = holes;
		holes = last - first + 1 - pofs_table_count(&inode->i_mapping->i_pages, first, last) -
			pofs_table_count(&pi->merged, first, last);
		ret = pofs_room_enter(room, account, max(holes, 0L), 1);
		/* Others may have filled some of them: then it is fewer. */
	} while ((ret == -ENOSPC && holes < before) || (ret == -EAGAIN && !(ret = pofs_room_wait(room))));
	if (!ret && pofs_no_range_room)
		pofs_room_leave(room);
	return ret;
}

/* ---- entries -------------------------------------------------------------------------- */

/*
 * A fault may have found the entry that has just gone, and the kernel maps its frame only now,
 * under the frame's lock (give_frame). The mappings are taken away after this.
 */
void pofs_frame_wait(struct pofs_inode *pi, struct page *frame)
{
	/* Or neither is seen here: then the fault finds no entry. Pairs with give_frame(). */
	smp_mb();
	if (READ_ONCE(pi->gives) && !pofs_no_frame_wait)
		wait_on_page_locked(frame);
}

/* The page uses the frame no more. False: it did not any more. Its mappings are still to go. */
static bool entry_erase(struct pofs_inode *pi, pgoff_t index, struct page *frame)
{
	struct pofs_super *ps = POFS_SB(pofs_vfs(pi)->i_sb);
	bool mine, alien;

	down_write(pofs_mapping_lock(pi, index));
	mine = pofs_table_swap(&pi->merged, index, frame, NULL, &alien);
	up_write(pofs_mapping_lock(pi, index));
	if (!mine)
		return false;
	pofs_frame_wait(pi, frame);
	atomic_long_dec(&pi->count);
	percpu_counter_inc(&ps->account.unmerged);
	pofs_frame_leave(ps->domain, frame, alien, &pi->payer);
	return true;
}

/* No page of [first, last] is merged, or mapped as it was. They are holes. */
void pofs_erase(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	unsigned long index = first, low = ULONG_MAX, high = 0;
	void *entry;

	for (entry = xa_find(&pi->merged, &index, last, XA_PRESENT); entry;
	     entry = xa_find_after(&pi->merged, &index, last, XA_PRESENT)) {
		struct page *frame = pofs_frame_at(pi, index);

		if (!frame)
			continue;
		entry_erase(pi, index, frame);
		put_page(frame);
		low = min(low, index);
		high = index;
		cond_resched();
	}
	if (low <= high)
		unmap_mapping_pages(pofs_vfs(pi)->i_mapping, low, high - low + 1, false);
}

/* ---- merged to private ---------------------------------------------------------------- */

/*
 * Copies the frame that `index` has, if it has one, into a page of the file. The page is locked, it
 * was a hole before its lock was taken, and nobody has mapped it. The frame's mappings are still to
 * go, before the page is unlocked. A frame that cannot be read keeps its entry.
 */
vm_fault_t pofs_copy_frame(struct pofs_inode *pi, struct page *page, pgoff_t index)
{
	bool fresh = !PageUptodate(page), left = false;
	struct page *frame;

	/* Again where the page went to an equal frame meanwhile. */
	while (!left && (frame = pofs_frame_at(pi, index))) {
		if (PageHWPoison(frame)) {
			put_page(frame);
			return VM_FAULT_HWPOISON;
		}
		copy_highpage(page, frame);
		set_page_dirty(page);
		/* Before the entry goes: then whoever finds none reads what was copied. */
		if (fresh)
			SetPageUptodate(page);
		left = entry_erase(pi, index, frame);
		put_page(frame);
	}
	if (left)
		pofs_count(copies);
	return 0;
}

static vm_fault_t settle_one(struct pofs_inode *pi, struct page *page, pgoff_t index)
{
	vm_fault_t ret;

	/* The page's lock keeps merges from storing one. */
	if (!xa_load(&pi->merged, index))
		return 0;
	ret = pofs_copy_frame(pi, page, index);
	if (!ret)
		unmap_mapping_pages(pofs_vfs(pi)->i_mapping, index, 1, false);
	return ret;
}

/*
 * The same for all pages of a folio, which may be huge: huge.c, and shmem_enabled=force (a test of
 * the kernel's). The frames' mappings go, too. Returns 0, or VM_FAULT_HWPOISON if that of `index`
 * failed.
 */
vm_fault_t pofs_settle(struct pofs_inode *pi, struct page *page, pgoff_t index)
{
	struct folio *folio = page_folio(page);
	unsigned long at, first = folio->index;
	vm_fault_t ret = 0;
	void *entry;
	long i;

	if (likely(!folio_test_large(folio)))
		return settle_one(pi, page, index);
	if (!folio_test_uptodate(folio)) {
		for (i = 0; i < folio_nr_pages(folio); i++)
			clear_highpage(folio_page(folio, i));
		folio_mark_uptodate(folio);
	}
	xa_for_each_range(&pi->merged, at, entry, first, folio_next_index(folio) - 1) {
		vm_fault_t one = settle_one(pi, folio_page(folio, at - first), at);

		if (at == index)
			ret = one;
	}
	return ret;
}

/* The page was new, and has no content: nobody has seen it. */
void pofs_page_drop(struct pofs_inode *pi, struct page *page)
{
	pofs_remove_page(pofs_vfs(pi)->i_mapping, compound_head(page));
	pofs_recount(pofs_vfs(pi));
}

/*
 * tmpfs makes a page, as for a write(2) of all of it, so it does not clear it; and the frame of
 * `index` is copied. The page is locked then, and what is mapped there has still to go. With
 * `hole`, it is made where there is no entry, too, and beyond the end: it is not cleared, and not
 * up to date. Returns -EAGAIN where the entry has just gone, -ERANGE beyond the end, -EHWPOISON
 * where the frame cannot be read: the entry stays. The room for it is the caller's.
 */
int pofs_make_private(struct pofs_inode *pi, pgoff_t index, bool hole, struct page **made)
{
	struct address_space *mapping = pofs_vfs(pi)->i_mapping;
	pofs_begun *begun = NULL;
	struct page *page;
	void *data = NULL;
	int error;

	error = mapping->a_ops->write_begin(NULL, mapping, (loff_t)index << PAGE_SHIFT, PAGE_SIZE, &begun, &data);
	if (error)
		return error;
	page = pofs_page_of(begun, index);
	/* Its length was changed meanwhile, and the truncation may have passed here already. */
	if (!hole && pofs_beyond_end(pi, index))
		error = -ERANGE;
	else if (PageCompound(page) ? pofs_settle(pi, page, index) : pofs_copy_frame(pi, page, index))
		error = -EHWPOISON;
	else if (!PageUptodate(page) && !hole)
		error = -EAGAIN;
	if (!error) {
		if (!PageDirty(page))
			set_page_dirty(page);
		*made = page;
		return 0;
	}
	if (!PageUptodate(page))
		pofs_page_drop(pi, page);
	unlock_page(page);
	put_page(page);
	return error;
}

static int make_one(struct pofs_inode *pi, pgoff_t index)
{
	struct pofs_room room;
	struct page *page;
	unsigned int flags;
	int error = pofs_room_for(&room, pi, index, 0);

	if (error)
		return error;
	if (unlikely(pofs_slow_us))
		usleep_range(pofs_slow_us, pofs_slow_us + 1);
	if (pofs_no_whole_page) {
		/* Zeros are in the file, and nobody holds their lock. */
		page = shmem_read_mapping_page(pofs_vfs(pi)->i_mapping, index);
		if (!IS_ERR(page))
			put_page(page);
		usleep_range(pofs_slow_us, pofs_slow_us + 1);
	}
	/* The payer had room. If others have taken it since, its limit is passed by this page. */
	flags = pofs_no_sure_charge ? 0 : memalloc_noreclaim_save();
	error = pofs_make_private(pi, index, false, &page);
	memalloc_noreclaim_restore(flags);
	if (!error) {
		unmap_mapping_pages(pofs_vfs(pi)->i_mapping, index, 1, false);
		unlock_page(page);
		put_page(page);
	}
	pofs_room_leave(&room);
	return error;
}

static int unmerge_one(struct pofs_inode *pi, pgoff_t index)
{
	int error = 0;

	while (!error && xa_load(&pi->merged, index)) {
		error = pofs_payer_has_room() ? make_one(pi, index) : -ENOMEM;
		/* Where the file is just being cut, there is nothing to keep. */
		if (error == -ERANGE)
			return 0;
		if (error == -EAGAIN)
			error = 0;
	}
	return error;
}

static int unmerge(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	unsigned long index = first;
	int ret = 0, one, made = 0;
	void *entry;

	for (entry = xa_find(&pi->merged, &index, last, XA_PRESENT); entry;
	     entry = xa_find_after(&pi->merged, &index, last, XA_PRESENT)) {
		/* Each call makes some. */
		if (made && (made >= PAGEONEFS_PLAIN_PAGES || signal_pending(current)) && !pofs_no_plain_bound)
			return -EINTR;
		one = unmerge_one(pi, index);
		ret = ret ?: one;
		if (one && one != -EHWPOISON)
			return one;
		made += !one;
		cond_resched();
	}
	return ret;
}

/*
 * Makes [first, last] private, and the file's payer pays, whoever asks. Without merges blocked,
 * more may come meanwhile. Where a frame cannot be read the others become private all the same.
 */
int pofs_unmerge(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	struct mem_cgroup *payer = pofs_payer_get(&pi->payer), *active = set_active_memcg(pofs_no_payer ? NULL : payer);
	int ret = unmerge(pi, first, last);

	set_active_memcg(active);
	mem_cgroup_put(payer);
	return ret;
}

/* From here on nothing of the file is merged, and what is becomes private. -EINTR: more is left. */
int pofs_make_plain(struct pofs_inode *pi, unsigned int why)
{
	if (down_write_killable(&pi->merging))
		return -EINTR;
	if (!pi->plain) {
		WRITE_ONCE(pi->plain, why);
		pofs_news(POFS_SB(pofs_vfs(pi)->i_sb));
	}
	up_write(&pi->merging);
	return pofs_unmerge(pi, 0, ULONG_MAX);
}
