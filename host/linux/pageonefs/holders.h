/* SPDX-License-Identifier: GPL-2.0 */
/* Who else holds a page: holders.c. */
#ifndef POFS_HOLDERS_H
#define POFS_HOLDERS_H

#include "inode.h"

/* What a call has found out about a file's pages. */
struct pofs_look {
	struct pofs_inode *pi;
	bool drained;		/* this processor's LRU batches, since the caller set it to false */
	bool pinned_for_good;	/* one of the pages */
};

void pofs_holders_start(void);
void pofs_holders_stop(void);
void pofs_put_pages(struct page **pages, int n);
void pofs_look_for_pin(struct pofs_look *look, struct page *page, pgoff_t index);
bool pofs_alone(struct pofs_look *look, struct page *page, pgoff_t index);

#endif
