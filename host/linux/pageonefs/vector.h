/* SPDX-License-Identifier: GPL-2.0 */
/* The content of pages, between begin and end: vector.c. */
#ifndef POFS_VECTOR_H
#define POFS_VECTOR_H

#include "pageonefs.h"

#define POFS_VECTOR_PAGES	16
#define POFS_SECRET		192	/* bytes */
struct pofs_secret {
	u64 words[POFS_SECRET / 8];
};
void pofs_vector_start(void);
void pofs_vector_begin(void);
void pofs_vector_end(void);
bool pofs_page_zeros(struct page *page);
bool pofs_pages_equal(struct page *a, struct page *b);
u64 pofs_page_digest(struct page *page, const struct pofs_secret *secret);
void pofs_secret(struct pofs_secret *secret, u64 seed);

#endif
