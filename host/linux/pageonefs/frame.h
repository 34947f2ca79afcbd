/* SPDX-License-Identifier: GPL-2.0 */
/* Frames and domains: frame.c. */
#ifndef POFS_FRAME_H
#define POFS_FRAME_H

#include <linux/atomic.h>
#include <linux/kref.h>
#include <linux/xarray.h>

#include "pageonefs.h"

/* Mounts that share frames. */
struct pofs_domain {
	struct kref kref;
	struct list_head list;
	struct xarray frames;		/* handle -> frame, while it has users */
	atomic64_t last_handle;
	atomic64_t count;
	char name[PAGEONEFS_DOMAIN_MAX];
};

/* What `private` of a frame holds: how many entries use it, whether it is all zeros, its handle. */
#define POFS_USERS	((1ul << 20) - 1)
#define POFS_ZEROS	(1ul << 20)
#define POFS_HANDLE	21
#define pofs_frame_zeros(frame) (READ_ONCE((frame)->private) & POFS_ZEROS)
#define pofs_frame_handle(frame) ((u64)READ_ONCE((frame)->private) >> POFS_HANDLE)

struct pofs_domain *pofs_domain_get(const char *name);
void pofs_domain_put(struct pofs_domain *domain);
struct page *pofs_frame_new(struct pofs_domain *domain, struct page *content);
struct page *pofs_frame_find(struct xa_state *xas, u64 handle, int *error);
int pofs_frame_begin(struct pofs_domain *domain, struct page *page);
void pofs_frame_put(struct pofs_domain *domain, struct page *frame);

#endif
