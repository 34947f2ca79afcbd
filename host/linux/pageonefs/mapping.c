// SPDX-License-Identifier: GPL-2.0
/*
 * Page caches and page tables: mapping.h. Nothing here knows what is merged.
 */
#include <linux/memcontrol.h>
#include <linux/pagemap.h>

#include "mapping.h"

/* ---- tables of pages ----------------------------------------------------------------- */

struct page *pofs_page_load(struct xarray *table, unsigned long index)
{
	XA_STATE(xas, table, index);
	struct page *page;

	rcu_read_lock();
	page = pofs_load(&xas, index);
	rcu_read_unlock();
	return page;
}

/* How many indices of [first, last] have something: all of an entry of several. */
long pofs_table_count(struct xarray *table, unsigned long first, unsigned long last)
{
	long n = 0;

	while (first <= last && xa_find(table, &first, last, XA_PRESENT)) {
		first++;
		if (++n % 1024 == 0)
			cond_resched();
	}
	return n;
}

/* `to`, or nothing, comes in the place of `from`, if that is there, and its mark in that one's. */
bool pofs_table_swap(struct xarray *table, unsigned long index, struct page *from, struct page *to, bool *mark)
{
	XA_STATE(xas, table, index);
	bool mine, was;

	xas_lock(&xas);
	mine = xas_load(&xas) == from;
	if (mine) {
		was = xas_get_mark(&xas, POFS_MARK);
		xas_store(&xas, to);
		if (to && *mark != was)
			(was ? xas_clear_mark : xas_set_mark)(&xas, POFS_MARK);
		*mark = was;
	}
	xas_unlock(&xas);
	return mine;
}

/* ---- leaving a file ------------------------------------------------------------------ */

/*
 * `n` more pages like this one are counted as tmpfs's are, in its node and its memory cgroup: in
 * Cached and Shmem of /proc/meminfo, in file and shmem of memory.stat.
 */
void pofs_page_count(struct page *page, int n)
{
	lruvec_stat_mod_folio(page_folio(page), NR_FILE_PAGES, n);
	lruvec_stat_mod_folio(page_folio(page), NR_SHMEM, n);
}

/* Whether these pages begin with all of a node of the file's table: it goes at once. */
static bool whole_node(struct page **pages, int n)
{
	pgoff_t first = page_folio(pages[0])->index;

	return IS_ENABLED(CONFIG_XARRAY_MULTI) && n >= XA_CHUNK_SIZE && first % XA_CHUNK_SIZE == 0 &&
	       page_folio(pages[XA_CHUNK_SIZE - 1])->index == first + XA_CHUNK_SIZE - 1;
}

/*
 * Takes pages out of the file, which are small, locked and in the order of their index. They keep
 * the file's references. As delete_from_page_cache_batch() does it, which is not exported. tmpfs
 * has no marks, writes nothing back by itself, and has no free_folio(); the inode has a user.
 */
void pofs_pages_leave(struct address_space *mapping, struct page **pages, int n)
{
	XA_STATE(xas, &mapping->i_pages, 0);
	struct folio *first = NULL;
	int i, alike = 0, gone = 0;

	xas_lock_irq(&xas);
	mapping->nrpages -= n;
	for (i = 0; i < n; i++) {
		struct folio *folio = page_folio(pages[i]);

		if (i >= gone && whole_node(pages + i, n - i)) {
			xas_set_order(&xas, folio->index, XA_CHUNK_SHIFT);
			xas_store(&xas, NULL);
			xas_set_order(&xas, folio->index, 0);
			gone = i + XA_CHUNK_SIZE;
		} else if (i >= gone) {
			WARN_ON_ONCE(pofs_walk(&xas, folio->index) != folio);
			xas_store(&xas, NULL);
		}
		folio->mapping = NULL;
		folio_clear_dirty(folio);
		if (first && (folio->memcg_data != first->memcg_data || folio_nid(folio) != folio_nid(first))) {
			pofs_page_count(&first->page, -alike);
			alike = 0;
		}
		if (!alike++)
			first = folio;
	}
	if (alike)
		pofs_page_count(&first->page, -alike);
	xas_unlock_irq(&xas);
}

/* ---- page tables --------------------------------------------------------------------- */

/*
 * vm_insert_pages() maps as the mapping says: that is read-only where first writes are waited for.
 * And it wants VM_MIXEDMAP, which mappings lack (file_mmap). So it gets a copy of the mapping. It
 * reads that, and keeps nothing.
 */
int pofs_insert_pages(struct vm_fault *vmf, unsigned long address, struct page **pages, unsigned long *n,
		      bool writable)
{
	struct vm_area_struct vma = *vmf->vma;

	pofs_copy_flags(&vma, vma.vm_flags | VM_MIXEDMAP);
	if (writable)
		vma.vm_page_prot = __pgprot(pgprot_val(vm_get_page_prot(vma.vm_flags)) | _PAGE_DIRTY |
					    _PAGE_SOFT_DIRTY);
	return vm_insert_pages(&vma, address, pages, n);
}
