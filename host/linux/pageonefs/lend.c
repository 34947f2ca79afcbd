// SPDX-License-Identifier: GPL-2.0
/*
 * Lending: pages that are in two back ends. A daemon keeps the merged pages of processes with an
 * agent in files, its store, which these processes map privately. It makes these files in a mount
 * that has no place in any tree (pofs_store_open). To the agents they are what memfds are, with
 * tmpfs's own mappings, so that userfaultfd works on them. And the daemon may lend their pages: a
 * lent page stays in its file, and is a frame of the domain, too.
 *
 *  - A page is charged to the process that it is made for (pofs_slot), and stays so: lent, used by
 *    files, and recalled. Pages that the daemon makes by itself are its own.
 *  - A lent page is not written any more: the daemon writes a page of its store once. Here write(2)
 *    is refused, and so is what would clear a part of a page in place.
 *  - The kernel must not find a page of a file mapped when it leaves the file, and does not know
 *    who else maps this one. So lent pages leave before (pofs_recall): when a hole is punched, and
 *    when the file ends. They are frames like any then, and go with their last user.
 *  - What else would take a page out of its file looks at its reference count, and leaves one alone
 *    that somebody else holds: swapping, migration, khugepaged, drop_caches.
 */
#include <linux/memcontrol.h>
#include <linux/pagemap.h>
#include <linux/sched/mm.h>
#include <linux/uaccess.h>

#include "huge.h"
#include "lend.h"

/* ---- pages are made ------------------------------------------------------------------- */

/* Who pays for a page, with a reference. */
static int payer_of_page(struct pofs_inode *pi, u64 index, struct mem_cgroup **payer)
{
	struct page *page = pofs_page_load(&pofs_vfs(pi)->i_mapping->i_pages, index);
	struct mem_cgroup *memcg;

	if (!page)
		return -ESRCH;
	/* It keeps its cgroup meanwhile. */
	lock_page(page);
	memcg = folio_memcg(page_folio(page));
	*payer = pofs_payer_get(&memcg);
	unlock_page(page);
	put_page(page);
	return 0;
}

/*
 * Makes a page of a store at the expense of another than who asks. What its cgroup has no room for
 * is refused. `like`: the file that is named, NULL: none.
 */
int pofs_slot(struct pofs_inode *pi, struct pofs_inode *like, const struct pageonefs_slot *s)
{
	struct address_space *mapping = pofs_vfs(pi)->i_mapping;
	struct mem_cgroup *payer, *active;
	struct page *page;
	int ret;

	if (pi->plain != PAGEONEFS_PLAIN_STORE || s->reserved || s->pid < 0 || (s->pid && (s->like_id || s->like)) ||
	    pofs_beyond_end(pi, s->index))
		return -EINVAL;
	if (s->pid)
		ret = pofs_payer_of(s->pid, &payer);
	else
		ret = like ? payer_of_page(like, s->like, &payer) : -ESRCH;
	if (ret)
		return ret;
	active = set_active_memcg(pofs_no_payer ? NULL : payer);
	page = shmem_read_mapping_page_gfp(mapping, s->index, mapping_gfp_mask(mapping) | __GFP_NORETRY | __GFP_NOWARN);
	set_active_memcg(active);
	mem_cgroup_put(payer);
	if (IS_ERR(page))
		return PTR_ERR(page);
	/* Clean zeros would go when memory is short, and who writes them next would pay. */
	set_page_dirty_lock(page);
	put_page(page);
	return 0;
}

/* ---- lending -------------------------------------------------------------------------- */

/* The page is locked. The frame's first user is the file's table. */
static int lend_page(struct pofs_inode *pi, struct page *page, pgoff_t index, u64 *handle)
{
	struct pofs_domain *domain = POFS_SB(pofs_vfs(pi)->i_sb)->domain;
	struct mem_cgroup *active;
	int ret;

	if (page->mapping != pofs_vfs(pi)->i_mapping || page->index != index || !PageUptodate(page))
		return -EAGAIN;
	if (PageHWPoison(page))
		return -EHWPOISON;
	if (PageCompound(page) || PageWriteback(page) || folio_test_swapcache(page_folio(page)))
		return -EBUSY;
	if (xa_load(&pi->lent, index) == page) {
		*handle = pofs_frame_handle(page);
		return -EEXIST;
	}
	active = set_active_memcg(folio_memcg(page_folio(page)));
	/* First, so that no frame is ever found that is not recalled. */
	ret = xa_err(xa_store(&pi->lent, index, page, POFS_MERGE_GFP));
	if (!ret) {
		get_page(page);
		ret = pofs_frame_begin(domain, page);
		if (ret) {
			xa_erase(&pi->lent, index);
			put_page(page);
		} else {
			*handle = pofs_frame_handle(page);
		}
	}
	set_active_memcg(active);
	return ret;
}

static int lend_one(struct pofs_inode *pi, u64 index, u64 *handle)
{
	struct page *page;
	int ret;

	if (index > (u64)MAX_LFS_FILESIZE >> PAGE_SHIFT)
		return -EINVAL;
	pofs_huge_split(pi, index);
	page = pofs_page_load(&pofs_vfs(pi)->i_mapping->i_pages, index);
	if (!page)
		return -EAGAIN;
	if (PageCompound(page)) {
		ret = -EBUSY;
	} else {
		lock_page(page);
		ret = lend_page(pi, page, index, handle);
		unlock_page(page);
	}
	put_page(page);
	return ret;
}

/* As pofs_merge(), of a file of a store: each page becomes a frame, whatever frame is named. */
long pofs_lend(struct pofs_inode *pi, struct pageonefs_merge *m)
{
	struct pageonefs_entry __user *user = u64_to_user_ptr(m->entries);
	u32 at;

	for (at = m->merged = 0; at < m->count; at++) {
		struct pageonefs_entry e;

		if (copy_from_user(&e, user + at, sizeof(e)) || copy_to_user(user + at, &e, sizeof(e)))
			return -EFAULT;
		down_read(&pi->merging);
		e.result = e.reserved ? -EINVAL : pi->blocked ? -EBUSY : lend_one(pi, e.index, &e.frame);
		up_read(&pi->merging);
		m->merged += !e.result;
		if (copy_to_user(user + at, &e, sizeof(e)))
			return -EFAULT;
		if (signal_pending(current) && at + 1 < m->count)
			return -EINTR;
		cond_resched();
	}
	return 0;
}

static void recall_one(struct pofs_inode *pi, pgoff_t index, struct page *page)
{
	struct address_space *mapping = pofs_vfs(pi)->i_mapping;
	bool mine;

	lock_page(page);
	mine = xa_cmpxchg(&pi->lent, index, page, NULL, GFP_KERNEL) == page;
	if (mine) {
		/* Those of the file. A fault needs the page's lock to map it again. */
		unmap_mapping_pages(mapping, index, 1, false);
		pofs_pages_leave(mapping, &page, 1);
		/* As any frame. */
		pofs_page_count(page, 1);
	}
	unlock_page(page);
	if (mine) {
		/* The file's reference. */
		put_page(page);
		pofs_frame_put(POFS_SB(pofs_vfs(pi)->i_sb)->domain, page);
	}
}

/* Lent pages of [first, last] leave the file. No page of it is lent meanwhile. */
void pofs_recall(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	unsigned long index = first;
	void *entry;

	if (pofs_no_recall)
		return;
	for (entry = xa_find(&pi->lent, &index, last, XA_PRESENT); entry;
	     entry = xa_find_after(&pi->lent, &index, last, XA_PRESENT)) {
		struct page *page = pofs_page_load(&pi->lent, index);

		if (!page)
			continue;
		recall_one(pi, index, page);
		put_page(page);
		cond_resched();
	}
}
