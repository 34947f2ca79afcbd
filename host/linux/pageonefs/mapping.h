/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Page caches and page tables: what is found in a table of pages, how pages leave a file, and how
 * they are mapped.
 */
#ifndef POFS_MAPPING_H
#define POFS_MAPPING_H

#include <linux/mm.h>
#include <linux/xarray.h>

#include "pageonefs.h"

/*
 * The entry at `index`; where that follows the last, without a walk. Under a lock, or RCU. Not from
 * an entry of several indices: if that is split meanwhile, its neighbour is another index's.
 */
static inline void *pofs_walk(struct xa_state *xas, unsigned long index)
{
	if (index == xas->xa_index + 1 && !xas_not_node(xas->xa_node) &&
	    ((!xas->xa_node->shift && xas->xa_offset == (xas->xa_index & XA_CHUNK_MASK)) || pofs_no_huge_walk))
		return xas_next(xas);
	xas_set(xas, index);
	return xas_load(xas);
}

/*
 * Loads a page from a table whose entries hold references, and takes one; of a large one, from its
 * head. NULL: no page. Under RCU. Neighbours one after the other are found without a walk.
 */
static inline struct page *pofs_load(struct xa_state *xas, unsigned long index)
{
	bool here = index == xas->xa_index && !xas_not_node(xas->xa_node);
	struct page *page = here ? xas_reload(xas) : pofs_walk(xas, index);

	for (;;) {
		if (!page || xa_is_value(page))
			return NULL;
		/* Or it is a retry, or a part of a large page. No page of hugetlbfs is: RCU is held already. */
		if (!xa_is_internal(page) && atomic_inc_not_zero(&page->_refcount)) {
			/* It might have gone, and be another's page now. */
			if (xas_reload(xas) == page)
				return page;
			put_page(page);
		}
		xas_set(xas, index);
		page = xas_load(xas);
	}
}

/* Of an entry: what it means is its table's. */
#define POFS_MARK XA_MARK_0

bool pofs_table_swap(struct xarray *table, unsigned long index, struct page *from, struct page *to, bool *mark);
struct page *pofs_page_load(struct xarray *table, unsigned long index);
long pofs_table_count(struct xarray *table, unsigned long first, unsigned long last);
void pofs_page_count(struct page *page, int n);
void pofs_pages_leave(struct address_space *mapping, struct page **pages, int n);

/*
 * Whether the page table says that userfaultfd has write-protected the page, which is not mapped.
 * vm_insert_pages() leaves that entry alone: only the kernel's own way replaces it, and keeps the
 * protection.
 */
static inline bool pofs_is_marked(struct vm_fault *vmf)
{
	return vmf->flags & FAULT_FLAG_ORIG_PTE_VALID && !pte_none(vmf->orig_pte) && !pte_present(vmf->orig_pte);
}

/* Whether there is a page table, which stays. Else there is nothing, or a huge page. */
static inline bool pofs_has_table(struct vm_fault *vmf)
{
	pmd_t pmd = READ_ONCE(*vmf->pmd);

	return pmd_present(pmd) && !pmd_trans_huge(pmd);
}

int pofs_insert_pages(struct vm_fault *vmf, unsigned long address, struct page **pages, unsigned long *n,
		      bool writable);

#endif
