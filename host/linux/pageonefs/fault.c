// SPDX-License-Identifier: GPL-2.0
/*
 * Page faults. A read of a merged page maps its frame (read.c); a write makes a private page of it.
 * All else is tmpfs's.
 */
#include <linux/delay.h>
#include <linux/highmem.h>

#include "fault.h"
#include "huge.h"
#include "inode.h"
#include "read.h"
#include "tmpfs.h"

struct vm_operations_struct pofs_vm_ops;
static struct vm_operations_struct plain_ops;
const struct vm_operations_struct *pofs_plain_vm_ops = &plain_ops;
static vm_fault_t serve(struct vm_fault *vmf, struct pofs_room *room);

/* ---- first writes ------------------------------------------------------------------ */

/* A page of the file, locked, is about to be mapped writable. */
static vm_fault_t first_write(struct pofs_inode *pi, pgoff_t index)
{
	if (pofs_mark_dirty(pi, index))
		return VM_FAULT_OOM;
	pofs_count(first_writes);
	if (unlikely(pofs_slow_us))
		usleep_range(pofs_slow_us, pofs_slow_us + 1);
	return VM_FAULT_LOCKED;
}

/* The same, of a huge page: the kernel maps all of it, or this page. It does not say which. */
static vm_fault_t first_write_huge(struct vm_fault *vmf, struct pofs_inode *pi)
{
	struct folio *folio = page_folio(vmf->page);
	vm_fault_t ret;

	/* The file was cut since the fault. */
	if (!pofs_huge_whole(pi, folio))
		return pofs_map_small(vmf);
	ret = first_write(pi, vmf->pgoff);
	if (ret & VM_FAULT_LOCKED && !pofs_no_huge_bits)
		pofs_mark_dirty_range(pi, folio->index, folio_next_index(folio) - 1);
	return ret;
}

/* Maps pages of the file writable, which are locked and whose dirty bits are set. */
static vm_fault_t map_writable(struct vm_fault *vmf, struct page **pages, unsigned long n)
{
	int error = pofs_insert_pages(vmf, vmf->address & PAGE_MASK, pages, &n, true);

	/* Busy: someone has mapped it read-only before its lock was taken. */
	return error && error != -EBUSY ? vmf_error(error) : VM_FAULT_NOPAGE;
}

/*
 * Whether write_frame() may be used: it has no way to charge another process's memory cgroup, and
 * page tables are not made with a page locked.
 */
static bool may_write_frame(struct vm_fault *vmf)
{
	return vmf->vma->vm_mm == current->mm && vmf->vma->vm_flags & VM_WRITE && pofs_has_table(vmf);
}

/*
 * How many pages a write makes private: more than one where it follows the last ones, and then at
 * most as many as were written there in a row. So a program that clears memory has fewer faults.
 */
#define RUN_MOST	16

static unsigned int write_run(struct vm_fault *vmf, struct pofs_inode *pi)
{
	unsigned long here = vmf->address & PAGE_MASK, end = min(ALIGN(here + 1, PMD_SIZE), vmf->vma->vm_end);
	unsigned int run = 1;

	if (READ_ONCE(pi->write_end) == vmf->pgoff)
		run = clamp_t(unsigned int, READ_ONCE(pi->write_run) * 2, 1, RUN_MOST);
	WRITE_ONCE(pi->write_run, run);
	return min_t(unsigned long, run, (end - here) >> PAGE_SHIFT);
}

/* The entry has gone, and it is a hole: the fault comes again. */
static vm_fault_t not_made(int error)
{
	if (error == -EAGAIN)
		return VM_FAULT_NOPAGE;
	return error == -EHWPOISON ? VM_FAULT_HWPOISON : vmf_error(error);
}

/*
 * Whether the next page is charged without sleep. Beyond memory.high a task sleeps for seconds in
 * the charge after the one that found that, or as it leaves the kernel.
 */
static bool charged_at_once(void)
{
	return pofs_no_bounded_wait || !current->memcg_nr_pages_over_high;
}

/*
 * A write of a merged page by way of a shared mapping, all at once: it becomes private, and is
 * mapped writable. Pages are locked in the order of their index.
 */
static vm_fault_t write_frame(struct vm_fault *vmf, struct pofs_inode *pi)
{
	unsigned int run = write_run(vmf, pi), n, marked, i;
	struct page *pages[RUN_MOST];
	struct pofs_room room;
	vm_fault_t ret = 0;
	int error;

	error = pofs_room_for(&room, pi, vmf->pgoff, 0);
	if (error)
		return not_made(error);
	error = pofs_make_private(pi, vmf->pgoff, false, &pages[0]);
	if (error) {
		pofs_room_leave(&room);
		return not_made(error);
	}
	pofs_count(private_faults);
	/* A harvest waits for the locks of those that are made. */
	for (n = 1; n < run && !PageCompound(pages[n - 1]) && charged_at_once(); n++)
		if (!xa_load(&pi->merged, vmf->pgoff + n) || pofs_make_private(pi, vmf->pgoff + n, false, &pages[n]))
			break;
	WRITE_ONCE(pi->write_end, vmf->pgoff + n);
	unmap_mapping_pages(pofs_vfs(pi)->i_mapping, vmf->pgoff, n, false);
	for (marked = 0; marked < n && first_write(pi, vmf->pgoff + marked) & VM_FAULT_LOCKED; marked++)
		;
	if (!marked)
		ret = VM_FAULT_OOM;
	else
		ret = PageCompound(pages[n - 1]) ? VM_FAULT_NOPAGE : map_writable(vmf, pages, marked);
	for (i = 0; i < n; i++) {
		unlock_page(pages[i]);
		put_page(pages[i]);
	}
	pofs_room_leave(&room);
	return ret;
}

/* The kernel has mapped vmf->page, and somebody wants to write it. It holds a reference. */
static vm_fault_t page_mkwrite(struct vm_fault *vmf)
{
	struct inode *inode = file_inode(vmf->vma->vm_file);
	struct pofs_inode *pi = POFS_I(inode);
	struct page *page = vmf->page;
	struct pofs_room room;
	vm_fault_t ret;

	/* A frame has no mapping; a page of the file has one until it leaves the file. */
	if (page_folio(page)->mapping) {
		lock_page(page);
		if (page_folio(page)->mapping == inode->i_mapping) {
			if (PageCompound(page) && !pofs_has_table(vmf))
				ret = first_write_huge(vmf, pi);
			else
				ret = first_write(pi, vmf->pgoff);
			if (!(ret & VM_FAULT_LOCKED))
				unlock_page(page);
			return ret;
		}
		unlock_page(page);
	}
	down_read(&pi->faults);
	if (!xa_load(&pi->merged, vmf->pgoff)) {
		ret = VM_FAULT_NOPAGE;
	} else if (may_write_frame(vmf)) {
		ret = write_frame(vmf, pi);
	} else {
		/* Makes it private; the next fault maps that. */
		vmf->page = NULL;
		ret = serve(vmf, &room) ?: VM_FAULT_NOPAGE;
		if (ret & VM_FAULT_LOCKED) {
			unlock_page(vmf->page);
			put_page(vmf->page);
			ret = VM_FAULT_NOPAGE;
		}
		vmf->page = page;
	}
	up_read(&pi->faults);
	return ret;
}

/* ---- faults ------------------------------------------------------------------------ */

/* Of what tmpfs makes: a huge page, a small one if there is no room for that, or none. */
static int room_of(struct vm_fault *vmf, struct pofs_inode *pi, struct pofs_room *room)
{
	if (pofs_huge_wanted(pi, vmf) && !pofs_room_for(room, pi, vmf->pgoff, POFS_HUGE_PAGES))
		return 0;
	return pofs_room_for(room, pi, vmf->pgoff, 1);
}

/* vmf->page is tmpfs's, locked: the frame is copied into it, if there is one. */
static vm_fault_t found(struct vm_fault *vmf, struct pofs_inode *pi, vm_fault_t ret, bool merged)
{
	vm_fault_t settled;

	pofs_count(private_faults);
	if (!merged && xa_load(&pi->merged, vmf->pgoff))
		pofs_count(late);
	settled = pofs_settle(pi, vmf->page, vmf->pgoff);
	/* A frame that cannot be read: nothing was ever written here. */
	if (settled && !PageCompound(vmf->page) && !PageDirty(vmf->page))
		pofs_page_drop(pi, vmf->page);
	if (!settled && (likely(!PageCompound(vmf->page)) || vmf->cow_page || pofs_is_marked(vmf) ||
			 pofs_huge_whole(pi, page_folio(vmf->page))))
		return ret;
	if (!settled)
		settled = pofs_map_small(vmf);
	unlock_page(vmf->page);
	put_page(vmf->page);
	vmf->page = NULL;
	return settled;
}

/*
 * Whether vmf->page is now what tmpfs would give: a page that is in the file and whole, locked. No
 * page is made, so no room is needed. All else is tmpfs's: it lets wait, or refuses, whom it must.
 */
static bool at_hand(struct vm_fault *vmf, struct pofs_inode *pi)
{
	struct inode *inode = pofs_vfs(pi);
	struct page *page = pofs_page_load(&inode->i_mapping->i_pages, vmf->pgoff);
	struct folio *folio = page ? page_folio(page) : NULL;
	bool locked = folio && folio_trylock(folio);

	/* Its lock keeps merges away, and cuts. */
	if (locked && folio->mapping == inode->i_mapping && folio_contains(folio, vmf->pgoff) &&
	    folio_test_uptodate(folio) && !READ_ONCE(inode->i_private) && pofs_huge_whole(pi, folio)) {
		pofs_count(private_faults);
		vmf->page = folio_file_page(folio, vmf->pgoff);
		return true;
	}
	if (locked)
		folio_unlock(folio);
	if (folio)
		folio_put(folio);
	return false;
}

/* `faults` is held. 0: without it, wait for room, and come again. */
static vm_fault_t serve(struct vm_fault *vmf, struct pofs_room *room)
{
	struct pofs_inode *pi = POFS_I(file_inode(vmf->vma->vm_file));
	bool write = (vmf->flags & FAULT_FLAG_WRITE) && (vmf->vma->vm_flags & VM_SHARED);
	bool merged = xa_load(&pi->merged, vmf->pgoff);
	vm_fault_t ret;
	int error;

	if (merged && !write) {
		ret = pofs_read_frame(vmf, pi);
		if (ret)
			return ret;
	}
	if (merged && write && may_write_frame(vmf))
		return write_frame(vmf, pi);
	if (!merged && at_hand(vmf, pi))
		return VM_FAULT_LOCKED;
	error = room_of(vmf, pi, room);
	if (error)
		return error == -EAGAIN ? 0 : vmf_error(error);
	ret = pofs_tmpfs_fault(vmf, room->pages > 1);
	if (ret & VM_FAULT_LOCKED && !(ret & (VM_FAULT_ERROR | VM_FAULT_RETRY | VM_FAULT_NOPAGE)))
		ret = found(vmf, pi, ret, merged);
	pofs_room_leave(room);
	return ret;
}

static vm_fault_t fault(struct vm_fault *vmf)
{
	/* Where tmpfs waits it lets go of the process's mappings, and they of the file. */
	struct file *file = get_file(vmf->vma->vm_file);
	struct pofs_inode *pi = POFS_I(file_inode(file));
	struct pofs_room room;
	vm_fault_t ret;

	do {
		down_read(&pi->faults);
		ret = serve(vmf, &room);
		up_read(&pi->faults);
		if (!ret && pofs_room_wait(&room))
			ret = VM_FAULT_SIGBUS;
	} while (!ret);
	fput(file);
	return ret;
}

/* Of a mapping of a plain file, whose writes are not waited for: then it may be pinned for long. */
static vm_fault_t plain_fault(struct vm_fault *vmf)
{
	struct file *file = get_file(vmf->vma->vm_file);
	struct pofs_room room;
	vm_fault_t ret;
	int error;

	while ((error = room_of(vmf, POFS_I(file_inode(file)), &room)) == -EAGAIN && !(error = pofs_room_wait(&room)))
		;
	if (error) {
		ret = vmf_error(error);
	} else {
		ret = pofs_tmpfs_fault(vmf, room.pages > 1);
		pofs_room_leave(&room);
	}
	fput(file);
	return ret;
}

/*
 * tmpfs's pages around the one that is read, but none where there is an entry. Where there is no
 * page table, the kernel would map a huge page without asking pofs_huge_whole().
 */
static vm_fault_t map_pages(struct vm_fault *vmf, pgoff_t first, pgoff_t last)
{
	struct pofs_inode *pi = POFS_I(file_inode(vmf->vma->vm_file));
	vm_fault_t ret = 0;

	/* This must not wait. */
	if (!pofs_has_table(vmf) || xa_load(&pi->merged, vmf->pgoff) || !down_read_trylock(&pi->faults))
		return 0;
	while (first <= last) {
		unsigned long entry = first;
		pgoff_t end = xa_find(&pi->merged, &entry, last, XA_PRESENT) ? entry : last + 1;

		if (unlikely(pofs_slow_around) && first < end)
			udelay(pofs_slow_around);
		if (first < end)
			ret |= pofs_base.vm->map_pages(vmf, first, end - 1);
		first = end + 1;
	}
	up_read(&pi->faults);
	return ret;
}

void pofs_fault_start(void)
{
	pofs_vm_ops = *pofs_base.vm;
	pofs_vm_ops.fault = fault;
	pofs_vm_ops.map_pages = map_pages;
	pofs_vm_ops.page_mkwrite = page_mkwrite;
	plain_ops = *pofs_base.vm;
	plain_ops.fault = plain_fault;
	/* Its io_uring registers buffers in tmpfs's own mappings alone. */
	if (POFS_SERIES(6, 1))
		pofs_plain_vm_ops = pofs_base.vm;
}
