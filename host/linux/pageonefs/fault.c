// SPDX-License-Identifier: GPL-2.0
/*
 * Page faults. A read of a merged page maps its frame, and frames beside it; a write makes a
 * private page of it. All else is tmpfs's.
 */
#include <linux/delay.h>
#include <linux/highmem.h>

#include "pageonefs.h"

struct vm_operations_struct pofs_vm_ops;

/* More references than this, and a frame is not mapped again: its reader gets a copy. */
#define CROWDED	(INT_MAX / 2)

/* ---- merged to private ------------------------------------------------------------ */

/*
 * Copies the frame that `index` has, if it has one, into a page of the file. The page is locked, it
 * was a hole before its lock was taken, and nobody has mapped it. A frame that cannot be read keeps
 * its entry.
 */
static vm_fault_t settle_one(struct pofs_inode *pi, struct page *page, pgoff_t index, bool fresh)
{
	struct page *frame;
	bool left;

	/* Again where the page went to an equal frame meanwhile. */
	while ((frame = pofs_frame_at(pi, index))) {
		if (PageHWPoison(frame)) {
			put_page(frame);
			return VM_FAULT_HWPOISON;
		}
		copy_highpage(page, frame);
		set_page_dirty(page);
		/* Before the entry goes: then whoever finds none reads what was copied. */
		if (fresh)
			SetPageUptodate(page);
		left = pofs_frame_leave(pi, index, frame);
		put_page(frame);
		if (left) {
			pofs_count(copies);
			break;
		}
	}
	return 0;
}

/*
 * The same for all pages of a folio, which has one unless shmem_enabled=force (a test of the
 * kernel's) made a huge one of it. Returns 0, or VM_FAULT_HWPOISON if that of `index` failed.
 */
vm_fault_t pofs_settle(struct pofs_inode *pi, struct page *page, pgoff_t index)
{
	struct folio *folio = page_folio(page);
	bool fresh = !folio_test_uptodate(folio);
	vm_fault_t ret = 0;
	long i;

	if (likely(!folio_test_large(folio)))
		return settle_one(pi, page, index, fresh);
	if (fresh) {
		for (i = 0; i < folio_nr_pages(folio); i++)
			clear_highpage(folio_page(folio, i));
		folio_mark_uptodate(folio);
	}
	for (i = 0; i < folio_nr_pages(folio); i++) {
		vm_fault_t one = settle_one(pi, folio_page(folio, i), folio->index + i, false);

		if (folio->index + i == index)
			ret = one;
	}
	return ret;
}

/* ---- faults ------------------------------------------------------------------------ */

static bool beyond_end(struct pofs_inode *pi, pgoff_t index)
{
	return index >= DIV_ROUND_UP_ULL(i_size_read(pofs_vfs(pi)), PAGE_SIZE);
}

#define AROUND 64

/* Locks a frame without waiting; true also for one that is in `locked`. */
static bool lock_around(struct page *frame, struct page **locked, unsigned int *held)
{
	unsigned int i;

	if (trylock_page(frame)) {
		locked[(*held)++] = frame;
		return true;
	}
	/* The same frame again, as where memory is all zeros. */
	for (i = *held; i-- > 0;)
		if (locked[i] == frame)
			return true;
	return false;
}

/*
 * Maps the merged pages that follow `index` in its 256 KiB, as far as they stand in a row. The
 * rules are the same: each frame is locked, and its entry checked under the lock.
 */
static void map_around(struct vm_fault *vmf, struct pofs_inode *pi, struct page *first)
{
	XA_STATE(xas, &pi->merged, vmf->pgoff + 1);
	struct page *frames[AROUND], *locked[AROUND + 1] = { first }, *last = NULL;
	unsigned long address = (vmf->address & PAGE_MASK) + PAGE_SIZE, rest;
	unsigned long end = min(ALIGN(address, AROUND * PAGE_SIZE), vmf->vma->vm_end);
	pgoff_t beyond = DIV_ROUND_UP_ULL(i_size_read(pofs_vfs(pi)), PAGE_SIZE);
	unsigned int n, held = 1, i, most = address < end ? (end - address) >> PAGE_SHIFT : 0;

	rcu_read_lock();
	for (n = 0; n < most && vmf->pgoff + 1 + n < beyond; n++) {
		struct page *frame = n ? xas_next(&xas) : xas_load(&xas);

		if (!frame || xas_retry(&xas, frame) || !get_page_unless_zero(frame))
			break;
		/* Before it is locked: it might have gone, and be another's page now. */
		last = frame;
		if (xas_reload(&xas) != frame || !lock_around(frame, locked, &held) || xas_reload(&xas) != frame ||
		    PageHWPoison(frame) || page_ref_count(frame) > CROWDED)
			break;
		frames[n] = frame;
		last = NULL;
	}
	rcu_read_unlock();
	rest = n;
	if (n)
		vm_insert_pages(vmf->vma, address, frames, &rest);
	pofs_count_by(around, n - rest);
	/* Before the references go: the last one may free the page. The first is the caller's. */
	for (i = 1; i < held; i++)
		unlock_page(locked[i]);
	for (i = 0; i < n; i++)
		put_page(frames[i]);
	if (last)
		put_page(last);
}

/* Returns true if the fault is done: then *ret says how. */
static bool map_frame(struct vm_fault *vmf, struct pofs_inode *pi, vm_fault_t *ret)
{
	struct page *frame;

	while ((frame = pofs_frame_at(pi, vmf->pgoff))) {
		lock_page(frame);
		if (xa_load(&pi->merged, vmf->pgoff) == frame) {
			*ret = 0;
			if (beyond_end(pi, vmf->pgoff))
				*ret = VM_FAULT_SIGBUS;
			else if (PageHWPoison(frame))
				*ret = VM_FAULT_HWPOISON;
			else if (page_ref_count(frame) > CROWDED)
				break;
			if (!*ret) {
				pofs_count(frame_faults);
				/* A page table is not made here, with frames locked. */
				if (!vmf->cow_page && !pmd_none(*vmf->pmd))
					map_around(vmf, pi, frame);
				vmf->page = frame;
				*ret = VM_FAULT_LOCKED;
				return true;
			}
			unlock_page(frame);
			put_page(frame);
			return true;
		}
		unlock_page(frame);
		put_page(frame);
	}
	if (frame) {
		unlock_page(frame);
		put_page(frame);
	}
	return false;
}

/* Maps vmf->page by itself. A write comes again, by way of page_mkwrite(). */
static vm_fault_t map_small(struct vm_fault *vmf)
{
	int ret = vm_insert_page(vmf->vma, vmf->address & PAGE_MASK, vmf->page);

	return ret && ret != -EBUSY ? vmf_error(ret) : VM_FAULT_NOPAGE;
}

static vm_fault_t fault(struct vm_fault *vmf)
{
	struct pofs_inode *pi = POFS_I(file_inode(vmf->vma->vm_file));
	bool write = (vmf->flags & FAULT_FLAG_WRITE) && (vmf->vma->vm_flags & VM_SHARED);
	bool merged = xa_load(&pi->merged, vmf->pgoff);
	vm_fault_t ret, settled;

	if (merged && !write && map_frame(vmf, pi, &ret))
		return ret;
	/* The merged page's own charge pays for the private one. */
	if (merged)
		pofs_charge(pofs_vfs(pi), -1);
	ret = pofs_base.vm->fault(vmf);
	if (merged)
		pofs_charge(pofs_vfs(pi), 1);
	if (!(ret & VM_FAULT_LOCKED) || ret & (VM_FAULT_ERROR | VM_FAULT_RETRY | VM_FAULT_NOPAGE))
		return ret;
	pofs_count(private_faults);
	if (!merged && xa_load(&pi->merged, vmf->pgoff))
		pofs_count(late);
	settled = pofs_settle(pi, vmf->page, vmf->pgoff);
	if (!settled && likely(!PageCompound(vmf->page) || vmf->cow_page))
		return ret;
	/*
	 * Of a huge page, this one alone is mapped: all of it, writable, would have one dirty bit; and
	 * the kernel does not expect it in a mapping with VM_MIXEDMAP.
	 */
	if (!settled)
		settled = map_small(vmf);
	unlock_page(vmf->page);
	put_page(vmf->page);
	vmf->page = NULL;
	return settled;
}

/*
 * tmpfs's pages around the one that is read, but none where there is an entry. Where there is no
 * page table yet, the kernel would map a huge page: the first fault in 2 MiB makes one.
 */
static vm_fault_t map_pages(struct vm_fault *vmf, pgoff_t first, pgoff_t last)
{
	struct pofs_inode *pi = POFS_I(file_inode(vmf->vma->vm_file));
	vm_fault_t ret = 0;

	if (pmd_none(*vmf->pmd) || xa_load(&pi->merged, vmf->pgoff))
		return 0;
	while (first <= last) {
		unsigned long entry = first;
		pgoff_t end = xa_find(&pi->merged, &entry, last, XA_PRESENT) ? entry : last + 1;

		if (first < end)
			ret |= pofs_base.vm->map_pages(vmf, first, end - 1);
		first = end + 1;
	}
	return ret;
}

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

/* The kernel has mapped vmf->page, and somebody wants to write it. It holds a reference. */
static vm_fault_t page_mkwrite(struct vm_fault *vmf)
{
	struct inode *inode = file_inode(vmf->vma->vm_file);
	struct pofs_inode *pi = POFS_I(inode);
	struct page *page = vmf->page;
	vm_fault_t ret;

	lock_page(page);
	if (page_folio(page)->mapping == inode->i_mapping) {
		ret = first_write(pi, vmf->pgoff);
		if (!(ret & VM_FAULT_LOCKED))
			unlock_page(page);
		return ret;
	}
	unlock_page(page);
	/* A frame, or a page that has left the file. Makes it private; the next fault maps that. */
	if (!xa_load(&pi->merged, vmf->pgoff))
		return VM_FAULT_NOPAGE;
	vmf->page = NULL;
	ret = fault(vmf);
	if (ret & VM_FAULT_LOCKED) {
		unlock_page(vmf->page);
		put_page(vmf->page);
		ret = VM_FAULT_NOPAGE;
	}
	vmf->page = page;
	return ret;
}

void pofs_vm_ops_start(void)
{
	pofs_vm_ops = *pofs_base.vm;
	pofs_vm_ops.fault = fault;
	pofs_vm_ops.map_pages = map_pages;
	pofs_vm_ops.page_mkwrite = page_mkwrite;
}
