// SPDX-License-Identifier: GPL-2.0
/*
 * Reads of merged pages: the frame is mapped, and frames beside it; or it is left to the kernel to
 * map it, or to copy it.
 */
#include <linux/delay.h>
#include <linux/pagemap.h>

#include "read.h"

/* Pages that are mapped at one fault: at first, and where one reads on and on; and at a time. */
#define AROUND		64
#define AROUND_MOST	PTRS_PER_PTE
#define AT_A_TIME	64
/* Pages that are mapped already, until the rest is left alone. */
#define BUSY		4

/*
 * A frame with more references than this is not mapped again: its reader gets a copy. fork(2)
 * copies the entries of private mappings, and asks nobody: so these have far fewer.
 */
static int most_references(struct vm_area_struct *vma)
{
	return is_cow_mapping(vma->vm_flags) && !pofs_no_fork_bound ? pofs_frame_most() * 16 : INT_MAX / 2;
}

/*
 * The next frames of consecutive pages, from *index on and before `end`: *index is the first then.
 * The mapping's lock is held.
 */
static unsigned int next_frames(struct pofs_inode *pi, pgoff_t *index, pgoff_t end, int most, struct page **frames)
{
	XA_STATE(xas, &pi->merged, *index);
	unsigned int n = 0;
	struct page *frame;

	rcu_read_lock();
	for (frame = xas_find(&xas, end - 1); frame; frame = xas_next(&xas)) {
		/* Their entries stay, and keep them. */
		if (xas_retry(&xas, frame) || PageHWPoison(frame) || page_ref_count(frame) > most)
			break;
		if (!n)
			*index = xas.xa_index;
		frames[n++] = frame;
		if (n == AT_A_TIME || *index + n == end)
			break;
	}
	rcu_read_unlock();
	return n;
}

/* Where the pages end that are mapped at a fault. Readers beside each other may spoil the guess. */
static pgoff_t around(struct pofs_inode *pi, pgoff_t index)
{
	unsigned int pages = AROUND;
	pgoff_t end;

	if (READ_ONCE(pi->around_end) == index)
		pages = clamp_t(unsigned int, READ_ONCE(pi->around) * 2, AROUND, AROUND_MOST);
	end = ALIGN(index + 1, pages);
	WRITE_ONCE(pi->around, pages);
	WRITE_ONCE(pi->around_end, end);
	return end;
}

/*
 * Maps the merged page that is read, and those that follow it up to an aligned end. Returns 0 if
 * the fault is not done.
 */
static vm_fault_t map_frames(struct vm_fault *vmf, struct pofs_inode *pi)
{
	struct rw_semaphore *lock = pofs_mapping_lock(pi, vmf->pgoff);
	pgoff_t beyond = DIV_ROUND_UP_ULL(i_size_read(pofs_vfs(pi)), PAGE_SIZE), end, index = vmf->pgoff;
	unsigned long address = vmf->address & PAGE_MASK, n, rest, mapped = 0;
	struct page *frames[AT_A_TIME];
	unsigned int busy = 0;
	int error = 0;

	if (index >= beyond)
		return VM_FAULT_SIGBUS;
	end = min3(around(pi, index), beyond, index + ((vmf->vma->vm_end - address) >> PAGE_SHIFT));
	down_read(lock);
	while (index < end && busy < BUSY) {
		n = next_frames(pi, &index, end, most_references(vmf->vma), frames);
		/* None, or not of the page that is read. */
		if (!n || (!mapped && !busy && index != vmf->pgoff))
			break;
		rest = n;
		error = pofs_insert_pages(vmf, address + ((index - vmf->pgoff) << PAGE_SHIFT), frames, &rest, false);
		mapped += n - rest;
		index += n - rest;
		if (error == -EBUSY) {
			busy++;
			index++;
		} else if (error) {
			break;
		}
	}
	up_read(lock);
	if (!mapped && !busy)
		return error ? vmf_error(error) : 0;
	pofs_count(frame_faults);
	pofs_count_by(around, mapped ? mapped - 1 : 0);
	return VM_FAULT_NOPAGE;
}

/*
 * The kernel copies the frame, or maps it, read-only as the mapping says. Its lock is kept until
 * then, and who takes the entry away waits for that lock (pofs_frame_wait).
 */
static vm_fault_t give_frame(struct vm_fault *vmf, struct pofs_inode *pi, struct page *frame)
{
	if (!vmf->cow_page) {
		pofs_count(frame_faults);
		if (unlikely(!READ_ONCE(pi->gives)))
			WRITE_ONCE(pi->gives, true);
	}
	lock_page(frame);
	/* Pairs with pofs_frame_wait(). */
	smp_mb__after_atomic();
	if (xa_load(&pi->merged, vmf->pgoff) != frame || PageHWPoison(frame)) {
		/* Again. */
		unlock_page(frame);
		put_page(frame);
		return VM_FAULT_NOPAGE;
	}
	if (unlikely(pofs_slow_us))
		usleep_range(pofs_slow_us, pofs_slow_us + 1);
	vmf->page = frame;
	return VM_FAULT_LOCKED;
}

/* A read of a merged page, or a write by way of a private mapping. Returns 0 if it is not done. */
vm_fault_t pofs_read_frame(struct vm_fault *vmf, struct pofs_inode *pi)
{
	bool give = vmf->cow_page || pofs_is_marked(vmf);
	struct page *frame;
	vm_fault_t ret;

	if (!give) {
		ret = map_frames(vmf, pi);
		if (ret)
			return ret;
	}
	frame = pofs_frame_at(pi, vmf->pgoff);
	if (!frame)
		return 0;
	if (pofs_beyond_end(pi, vmf->pgoff))
		ret = VM_FAULT_SIGBUS;
	else
		ret = PageHWPoison(frame) ? VM_FAULT_HWPOISON : 0;
	/* Too many references: it is copied. Or else again. */
	if (!ret && (vmf->cow_page || page_ref_count(frame) <= most_references(vmf->vma))) {
		if (give)
			return give_frame(vmf, pi, frame);
		ret = VM_FAULT_NOPAGE;
	}
	put_page(frame);
	return ret;
}
