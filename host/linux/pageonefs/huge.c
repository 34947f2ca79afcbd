// SPDX-License-Identifier: GPL-2.0
/*
 * Huge pages, of mounts with huge=advise. tmpfs makes them where a mapping asks for them
 * (MADV_HUGEPAGE), and the kernel maps them whole, as long as nothing in their 2 MiB is merged. The
 * first merge there splits them, and nothing makes a huge page of small ones.
 *
 *  - A huge page is mapped whole if all of it lies in the file, and nothing of it is merged
 *    (pofs_huge_whole). That is looked at under its lock, and stays so while it is mapped: an entry
 *    is stored under the lock of a small page of the file, and a huge page leaves the file, or is
 *    split, when its mappings have gone.
 *  - No mapping has VM_MIXEDMAP: the kernel would not count back what it maps whole
 *    (vma_is_special_huge).
 *  - A page table is made only where no huge page is mapped, and stays.
 *  - What is mapped whole and writable has one bit in its page table: all dirty bits of its pages
 *    are set together (page_mkwrite). A harvest takes the mapping away; the next write brings it
 *    back.
 */
#include "huge.h"
#include "tmpfs.h"

static bool in_file(struct pofs_inode *pi, pgoff_t last)
{
	return last < DIV_ROUND_UP(i_size_read(pofs_vfs(pi)), PAGE_SIZE);
}

/* Whether the kernel may map a huge page whole, which is locked. */
bool pofs_huge_whole(struct pofs_inode *pi, struct folio *folio)
{
	unsigned long first = folio->index, last = folio_next_index(folio) - 1;

	return in_file(pi, last) && !xa_find(&pi->merged, &first, last, XA_PRESENT);
}

/* tmpfs is shown a copy of the mapping, which does not ask for huge pages. */
static noinline vm_fault_t small_fault(struct vm_fault *vmf)
{
	struct vm_area_struct vma = *vmf->vma;
	struct vm_fault small = {
		.vma = &vma, .gfp_mask = vmf->gfp_mask, .pgoff = vmf->pgoff, .address = vmf->address,
		.real_address = vmf->real_address, .flags = vmf->flags, .pmd = vmf->pmd, .pud = vmf->pud,
	};
	vm_fault_t ret;

	pofs_copy_flags(&vma, vma.vm_flags & ~VM_HUGEPAGE);
	ret = pofs_base.vm->fault(&small);
	vmf->page = small.page;
	return ret;
}

/* Whether the mapping asks for a huge page that could be mapped whole. */
bool pofs_huge_wanted(struct pofs_inode *pi, struct vm_fault *vmf)
{
	struct shmem_sb_info *sbinfo = pofs_vfs(pi)->i_sb->s_fs_info;
	unsigned long first = round_down(vmf->pgoff, POFS_HUGE_PAGES), last = first + POFS_HUGE_PAGES - 1;

	return vmf->vma->vm_flags & VM_HUGEPAGE && sbinfo->huge && in_file(pi, last) &&
	       !xa_find(&pi->merged, &first, last, XA_PRESENT);
}

/*
 * tmpfs's own fault, with a huge page only where one is wanted. A merge may still come between;
 * then frames are copied into the huge page (pofs_settle).
 */
vm_fault_t pofs_tmpfs_fault(struct vm_fault *vmf, bool huge)
{
	struct shmem_sb_info *sbinfo = file_inode(vmf->vma->vm_file)->i_sb->s_fs_info;

	if (!huge && sbinfo->huge && vmf->vma->vm_flags & VM_HUGEPAGE)
		return small_fault(vmf);
	return pofs_base.vm->fault(vmf);
}

/*
 * Makes small pages of the huge one that `index` is in, if it is in one. tmpfs splits a huge page
 * of which it cuts a part. Of this one nothing is cut: the range is empty. It stays as it is where
 * somebody else holds it.
 */
void pofs_huge_split(struct pofs_inode *pi, pgoff_t index)
{
	loff_t at = ((loff_t)index << PAGE_SHIFT) + 1;
	struct page *page;
	bool huge;

	rcu_read_lock();
	page = xa_load(&pofs_vfs(pi)->i_mapping->i_pages, index);
	huge = page && !xa_is_value(page) && PageCompound(page);
	rcu_read_unlock();
	if (huge)
		shmem_truncate_range(pofs_vfs(pi), at, at - 1);
}

/*
 * Maps vmf->page, of a huge page that is locked, by itself. A write comes again, by way of
 * page_mkwrite().
 */
vm_fault_t pofs_map_small(struct vm_fault *vmf)
{
	unsigned long one = 1;
	int ret;

	/* It was mapped whole before the file was cut. Its lock keeps others from that. */
	if (pmd_trans_huge(READ_ONCE(*vmf->pmd)))
		return VM_FAULT_NOPAGE;
	ret = pofs_insert_pages(vmf, vmf->address & PAGE_MASK, &vmf->page, &one, false);
	return ret && ret != -EBUSY ? vmf_error(ret) : VM_FAULT_NOPAGE;
}
