// SPDX-License-Identifier: GPL-2.0
/*
 * Reading, writing, lengths and holes: what tmpfs does, with merged pages seen to before.
 */
#include <linux/fs.h>
#include <linux/falloc.h>
#include <linux/highmem.h>
#include <linux/huge_mm.h>
#include <linux/module.h>
#include <linux/splice.h>
#include <linux/uio.h>

#include "fault.h"
#include "file.h"
#include "lend.h"
#include "tmpfs.h"

struct file_operations pofs_file_ops;

/* ---- reading --------------------------------------------------------------------- */

/*
 * A page with a reference, whose content is that of the file at some moment of this call; or
 * NULL.
 */
static struct page *page_to_read(struct pofs_inode *pi, pgoff_t index)
{
	struct page *page = pofs_frame_at(pi, index);

	if (page)
		return page;
	page = pagecache_get_page(pofs_vfs(pi)->i_mapping, index, 0, 0);
	if (page) {
		/* Not a page that is just being filled with what was merged. */
		smp_rmb();
		if (!xa_load(&pi->merged, index) && PageUptodate(page))
			return page;
		put_page(page);
	}
	return pofs_frame_at(pi, index);
}

static ssize_t read_one(struct pofs_inode *pi, struct kiocb *iocb, struct iov_iter *to, size_t bytes)
{
	unsigned int offset = iocb->ki_pos & ~PAGE_MASK;
	pgoff_t index = iocb->ki_pos >> PAGE_SHIFT;
	struct page *page;
	ssize_t ret;

	for (;;) {
		size_t whole = iov_iter_count(to);

		page = page_to_read(pi, index);
		if (page) {
			ret = PageHWPoison(page) ? -EIO : (ssize_t)copy_page_to_iter(page, offset, bytes, to);
			put_page(page);
			if (ret > 0)
				iocb->ki_pos += ret;
			return ret ?: -EFAULT;
		}
		/* A hole, or swapped out. While tmpfs looks, nothing may become a hole to it. */
		pofs_block_merges(pi);
		if (xa_load(&pi->merged, index)) {
			pofs_unblock_merges(pi);
			continue;
		}
		iov_iter_truncate(to, bytes);
		ret = pofs_base.file->read_iter(iocb, to);
		iov_iter_reexpand(to, whole - max_t(ssize_t, ret, 0));
		pofs_unblock_merges(pi);
		return ret;
	}
}

static ssize_t file_read_iter(struct kiocb *iocb, struct iov_iter *to)
{
	struct inode *inode = file_inode(iocb->ki_filp);
	struct pofs_inode *pi = POFS_I(inode);
	ssize_t done = 0, ret = 0;

	while (iov_iter_count(to) && iocb->ki_pos < i_size_read(inode)) {
		size_t bytes = min_t(u64, PAGE_SIZE - (iocb->ki_pos & ~PAGE_MASK), i_size_read(inode) - iocb->ki_pos);

		ret = read_one(pi, iocb, to, min(bytes, iov_iter_count(to)));
		if (ret <= 0)
			break;
		done += ret;
		if (fatal_signal_pending(current))
			break;
		cond_resched();
	}
	file_accessed(iocb->ki_filp);
	return done ?: ret;
}

/* ---- writing --------------------------------------------------------------------- */

/* tmpfs's own: it commits the memory. */
static int resize(struct file *file, loff_t size)
{
	struct iattr attr = { .ia_valid = ATTR_SIZE, .ia_size = size };

	return pofs_base.inode->setattr(POFS_NO_IDMAP, file_dentry(file), &attr);
}

/*
 * Copies into a page of the file, which is locked. A file that grows does so when the bytes are
 * there. If it may not, they go again.
 */
static ssize_t write_page(struct file *file, struct page *page, loff_t pos, unsigned int bytes, struct iov_iter *from)
{
	struct inode *inode = file_inode(file);
	unsigned int offset = pos & ~PAGE_MASK;
	pgoff_t index = pos >> PAGE_SHIFT;
	size_t copied;
	int ret;

	ret = pofs_mark_dirty(POFS_I(inode), index);
	if (ret)
		return ret;
	if (pofs_settle(POFS_I(inode), page, index))
		return -EIO;
	copied = copy_page_from_iter_atomic(page, offset, bytes, from);
	flush_dcache_page(page);
	if (copied && pos + copied > i_size_read(inode)) {
		ret = resize(file, pos + copied);
		if (ret) {
			iov_iter_revert(from, copied);
			memzero_page(page, offset, copied);
			return ret;
		}
	}
	return copied;
}

/* As generic_perform_write() does it, with the merged content put into the page before. */
static ssize_t write_some(struct file *file, loff_t pos, struct iov_iter *from)
{
	struct address_space *mapping = file->f_mapping;
	struct pofs_inode *pi = POFS_I(mapping->host);
	unsigned int bytes = min_t(size_t, PAGE_SIZE - (pos & ~PAGE_MASK), iov_iter_count(from));
	loff_t size = i_size_read(mapping->host);
	pgoff_t index = pos >> PAGE_SHIFT;
	struct pofs_room room;
	pofs_begun *begun = NULL;
	struct page *page;
	void *data = NULL;
	ssize_t ret;

	/* The part behind the end is the next call's. */
	if (pos < size)
		bytes = min_t(loff_t, bytes, size - pos);
	if (fault_in_iov_iter_readable(from, bytes) == bytes)
		return -EFAULT;
	if (fatal_signal_pending(current))
		return -EINTR;
	ret = pofs_room_await(&room, pi, index);
	if (ret)
		return ret;
	ret = mapping->a_ops->write_begin(file, mapping, pos, bytes, &begun, &data);
	if (ret)
		goto out;
	page = pofs_page_of(begun, index);
	/* What was there has just gone, and a new page needs room: again. */
	if (!PageUptodate(page) && !room.pages && !xa_load(&pi->merged, index))
		ret = 0;
	else
		ret = write_page(file, page, pos, bytes, from);
	if (ret > 0) {
		/* Clears what was not written of a page that was a hole. */
		mapping->a_ops->write_end(file, mapping, pos, bytes, ret, begun, data);
		goto out;
	}
	if (!PageUptodate(page))
		pofs_page_drop(pi, page);
	unlock_page(page);
	put_page(page);
out:
	pofs_room_leave(&room);
	return ret;
}

static ssize_t file_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	struct file *file = iocb->ki_filp;
	struct inode *inode = file_inode(file);
	ssize_t done = 0, ret;
	bool empty;

	/* Pages that are lent are not written. */
	if (POFS_I(inode)->plain == PAGEONEFS_PLAIN_STORE)
		return -EPERM;
	inode_lock(inode);
	empty = !i_size_read(inode);
	ret = generic_write_checks(iocb, from);
	if (ret > 0)
		ret = file_remove_privs(file) ?: file_update_time(file) ?: ret;
	while (ret >= 0 && iov_iter_count(from)) {
		ret = write_some(file, iocb->ki_pos, from);
		if (ret > 0) {
			iocb->ki_pos += ret;
			done += ret;
		}
		cond_resched();
	}
	inode_unlock(inode);
	/* Not each time that it grows by a page. */
	if (empty && done > 0)
		pofs_news(POFS_SB(inode->i_sb));
	return done ?: ret;
}

/* ---- length and holes ------------------------------------------------------------ */

/* tmpfs takes merged pages for holes. So there are none: all of the file is data. */
static loff_t file_llseek(struct file *file, loff_t offset, int whence)
{
	return generic_file_llseek(file, offset, whence);
}

static bool sealed(struct inode *inode, unsigned int seals)
{
	return SHMEM_I(inode)->seals & seals;
}

/* The file is locked, and merges are blocked. */
static int punch(struct inode *inode, loff_t offset, loff_t len)
{
	struct pofs_inode *pi = POFS_I(inode);
	loff_t end = offset + len;
	pgoff_t first = DIV_ROUND_UP_ULL(offset, PAGE_SIZE), last = end >> PAGE_SHIFT;
	int ret = 0;

	/* Parts of pages are cleared, so they must be there. */
	if (offset & ~PAGE_MASK)
		ret = pofs_unmerge(pi, offset >> PAGE_SHIFT, offset >> PAGE_SHIFT);
	if (!ret && end & ~PAGE_MASK)
		ret = pofs_unmerge(pi, last, last);
	if (ret)
		return ret;
	pofs_cut_begin(pi, offset >> PAGE_SHIFT, (end - 1) >> PAGE_SHIFT);
	/* Before tmpfs's turn: it removes the private page that a write makes meanwhile. */
	if (first < last) {
		pofs_recall(pi, first, last - 1);
		pofs_erase(pi, first, last - 1);
		unmap_mapping_pages(inode->i_mapping, first, last - first, false);
	}
	shmem_truncate_range(inode, offset, end - 1);
	pofs_cut_end(pi, offset >> PAGE_SHIFT, (end - 1) >> PAGE_SHIFT);
	return 0;
}

/*
 * A private page, as tmpfs's own fallocate() makes it: it is up to date when somebody has used it.
 * `whole` has the room for it, as long as that lasts: others make holes meanwhile.
 */
static int allocate_one(struct pofs_inode *pi, pgoff_t index, struct pofs_room *whole)
{
	struct address_space *mapping = pofs_vfs(pi)->i_mapping;
	bool merged = xa_load(&pi->merged, index), there = merged || xa_load(&mapping->i_pages, index);
	struct pofs_room room;
	struct page *page;
	int ret = 0;

	/* Swapped out. */
	if (!merged && xa_is_value(xa_load(&mapping->i_pages, index)))
		return 0;
	if (there) {
		pofs_room_enter(&room, whole->account, 0, POFS_PAGE_MOVES);
	} else if (whole->pages) {
		pofs_room_take(&room, whole);
	} else {
		/* Who may wait has nothing that others wait for. */
		pofs_room_leave(whole);
		ret = pofs_room_await(&room, pi, index);
	}
	if (ret)
		return ret;
	ret = pofs_make_private(pi, index, true, &page);
	if (!ret) {
		if (merged)
			unmap_mapping_pages(mapping, index, 1, false);
		unlock_page(page);
		put_page(page);
	}
	pofs_room_leave(&room);
	return ret;
}

/* What was made of [first, end) and nobody has used, goes again. */
static void take_back(struct pofs_inode *pi, pgoff_t first, pgoff_t end)
{
	for (; first < end && !pofs_no_take_back; first++) {
		struct page *page = pagecache_get_page(pofs_vfs(pi)->i_mapping, first, FGP_LOCK, 0);

		cond_resched();
		if (!page)
			continue;
		if (!PageUptodate(page))
			pofs_page_drop(pi, page);
		unlock_page(page);
		put_page(page);
	}
}

/*
 * What nobody has used of a page becomes zeros, and so does [from, to). What cannot be read in from
 * swap is dropped.
 */
static int clear_one(struct pofs_inode *pi, pgoff_t index, unsigned int from, unsigned int to)
{
	struct address_space *mapping = pofs_vfs(pi)->i_mapping;
	struct page *page = pagecache_get_page(mapping, index, FGP_LOCK, 0);
	int ret;

	if (!page && (from == to || !xa_load(&mapping->i_pages, index)))
		return 0;
	if (!page) {
		struct pofs_room room;

		pofs_room_enter(&room, &POFS_SB(pofs_vfs(pi)->i_sb)->account, 0, POFS_PAGE_MOVES);
		ret = pofs_make_private(pi, index, true, &page);
		pofs_room_leave(&room);
		if (ret) {
			shmem_truncate_range(pofs_vfs(pi), ((loff_t)index << PAGE_SHIFT) + from,
					     ((loff_t)index << PAGE_SHIFT) + to - 1);
			return ret;
		}
	}
	if (!PageUptodate(page)) {
		clear_highpage(page);
		SetPageUptodate(page);
	} else if (from < to) {
		/* There are bits already. */
		pofs_mark_dirty(pi, index);
		memzero_page(page, from, to - from);
		set_page_dirty(page);
	}
	unlock_page(page);
	put_page(page);
	return 0;
}

/* Nothing of it fails for want of room, and a signal does not end it: all is cleared. */
static int clear_all(struct pofs_inode *pi, loff_t offset, loff_t end, bool zero)
{
	loff_t at = offset, next;
	int ret = 0, one;

	for (; at < end; at = next) {
		unsigned int from = at & ~PAGE_MASK;

		next = min_t(loff_t, end, round_down(at, PAGE_SIZE) + PAGE_SIZE);
		one = clear_one(pi, at >> PAGE_SHIFT, from, zero ? from + (next - at) : from);
		ret = ret ?: one;
		cond_resched();
	}
	return ret;
}

/*
 * All pages are there, and private, before anything of them is cleared: want of room or memory is
 * found before a byte changes. The file is locked, and merges are blocked.
 */
static int allocate(struct file *file, int mode, loff_t offset, loff_t len)
{
	struct inode *inode = file_inode(file);
	struct pofs_inode *pi = POFS_I(inode);
	loff_t end = offset + len, old = i_size_read(inode);
	pgoff_t first = offset >> PAGE_SHIFT, last = (end - 1) >> PAGE_SHIFT, at = first;
	pgoff_t behind = DIV_ROUND_UP_ULL(old, PAGE_SIZE);
	long were = pofs_table_count(&inode->i_mapping->i_pages, behind, last);
	bool zero = mode & FALLOC_FL_ZERO_RANGE;
	struct pofs_room room;
	int ret;

	if (sealed(inode, F_SEAL_GROW) && end > old)
		return -EPERM;
	ret = inode_newsize_ok(inode, end) ?: pofs_room_holes(&room, pi, first, last);
	if (ret)
		return ret;
	if (!(mode & FALLOC_FL_KEEP_SIZE) && end > old)
		ret = resize(file, end);
	/* Pages that are lent are not written: they leave, and are made anew. */
	if (!ret && zero && pi->plain == PAGEONEFS_PLAIN_STORE)
		ret = punch(inode, offset, len);
	for (; at <= last && !ret; at++) {
		ret = allocate_one(pi, at, &room);
		if (!ret && zero)
			ret = pofs_mark_dirty(pi, at);
		if (fatal_signal_pending(current))
			ret = ret ?: -EINTR;
		cond_resched();
	}
	if (ret)
		take_back(pi, first, at);
	/* If nobody has used what it was longer. */
	if (ret && i_size_read(inode) > old && pofs_table_count(&inode->i_mapping->i_pages, behind, last) <= were)
		resize(file, old);
	pofs_room_leave(&room);
	return ret ?: clear_all(pi, offset, end, zero);
}

/* What is allocated beforehand is private: the caller wants memory that is there. */
static long file_fallocate(struct file *file, int mode, loff_t offset, loff_t len)
{
	struct inode *inode = file_inode(file);
	struct pofs_inode *pi = POFS_I(inode);
	loff_t old;
	bool refused;
	long ret;

	switch (mode) {
	case 0:
	case FALLOC_FL_KEEP_SIZE:
	case FALLOC_FL_ZERO_RANGE:
	case FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE:
	case FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE:
		break;
	default:
		return -EOPNOTSUPP;
	}
	/* A part of a page would be cleared in place, and may be lent. */
	if (pi->plain == PAGEONEFS_PLAIN_STORE && (offset | len) & ~PAGE_MASK)
		return -EINVAL;
	inode_lock(inode);
	pofs_block_merges(pi);
	old = i_size_read(inode);
	refused = sealed(inode, F_SEAL_WRITE | F_SEAL_FUTURE_WRITE);
	if (refused && !pofs_no_first_check)
		ret = -EPERM;
	else if (mode & FALLOC_FL_PUNCH_HOLE)
		ret = punch(inode, offset, len);
	else
		ret = allocate(file, mode, offset, len);
	/* Too late, with that guard off. */
	if (refused)
		ret = -EPERM;
	if (!ret)
		file_modified(file);
	pofs_unblock_merges(pi);
	inode_unlock(inode);
	if (i_size_read(inode) != old)
		pofs_news(POFS_SB(inode->i_sb));
	return ret;
}

/* ---- mapping --------------------------------------------------------------------- */

/*
 * VM_DONTEXPAND keeps khugepaged and MADV_COLLAPSE away: a huge page of such memory would fill the
 * holes of merged pages with zeros. VM_MIXEDMAP would, too, and have fork(2) copy entries of shared
 * mappings, with a reference for each, where faults are asked otherwise. mlock(2) passes over
 * either, and mremap(2) makes no such mapping longer.
 */
static int file_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct pofs_inode *pi = POFS_I(file_inode(file));
	int ret = pofs_base.file->mmap(file, vma);
	bool plain;

	/* A store's mappings are tmpfs's own: userfaultfd works on them. */
	if (ret || pi->plain == PAGEONEFS_PLAIN_STORE)
		return ret;
	pofs_vma_flags(vma, pofs_no_fork_bound ? VM_MIXEDMAP : VM_DONTEXPAND);
	/* A plain file has no merged pages and gets none: its mappings may be pinned for long. */
	plain = READ_ONCE(pi->plain) && !atomic_long_read(&pi->count);
	vma->vm_ops = plain ? pofs_plain_vm_ops : &pofs_vm_ops;
	return 0;
}

void pofs_file_start(void)
{
	pofs_file_ops = *pofs_base.file;
	pofs_file_ops.owner = THIS_MODULE;
	pofs_file_ops.llseek = file_llseek;
	pofs_file_ops.read_iter = file_read_iter;
	pofs_file_ops.write_iter = file_write_iter;
	pofs_file_ops.splice_read = POFS_SPLICE_READ;
	pofs_file_ops.fallocate = file_fallocate;
	pofs_file_ops.mmap = file_mmap;
	/* tmpfs's is for files with tmpfs's own operations. Huge pages want to be aligned. */
	pofs_file_ops.get_unmapped_area = thp_get_unmapped_area;
}
