/* SPDX-License-Identifier: GPL-2.0 */
/* Frames and domains: frame.c. */
#ifndef POFS_FRAME_H
#define POFS_FRAME_H

#include <linux/atomic.h>
#include <linux/kref.h>
#include <linux/mutex.h>
#include <linux/xarray.h>

#include "payer.h"

/* Mounts that share frames. */
struct pofs_domain {
	struct kref kref;
	struct list_head list;
	struct xarray frames;		/* handle -> frame, while it has users */
	atomic64_t last_handle;
	atomic64_t count;
	struct mutex adopting;
	unsigned long adopt_at;		/* where the look at frames that wait goes on; under `adopting` */
	unsigned long adopt_after;	/* jiffies: there is none before; under `adopting` */
	unsigned long try_after;	/* jiffies: caches that could not be taken are not tried before; under `adopting` */
	struct xarray debts;		/* number of a cgroup without room -> how many frames that is */
	char name[PAGEONEFS_DOMAIN_MAX];
};

/*
 * What `private` of a frame holds: how many entries use it, whether it is all zeros, whether
 * `index` is the handle of another with its content, whether it is the module's own page, and its
 * handle.
 */
#define POFS_USERS	((1ul << 20) - 1)
#define POFS_ZEROS	(1ul << 20)
#define POFS_ANOTHER	(1ul << 21)
#define POFS_OWN	(1ul << 22)
#define POFS_HANDLE	23
#define pofs_frame_zeros(frame) (READ_ONCE((frame)->private) & POFS_ZEROS)
#define pofs_frame_handle(frame) ((u64)READ_ONCE((frame)->private) >> POFS_HANDLE)

struct pofs_domain *pofs_domain_get(const char *name);
void pofs_domain_put(struct pofs_domain *domain);
int pofs_frame_most(void);
struct page *pofs_frame_new(struct pofs_domain *domain, struct page *content, struct page *user);
struct page *pofs_frame_another(struct pofs_domain *domain, u64 handle, struct page *user, int *error);
struct page *pofs_frame_find(struct xa_state *xas, u64 handle, int *error);
bool pofs_frame_again(struct page *frame);
int pofs_frame_begin(struct pofs_domain *domain, struct page *page);
unsigned long pofs_frame_put(struct pofs_domain *domain, struct page *frame);

/* What they hold beside their content. */
void pofs_frame_count(struct page *frame, int n);
unsigned long pofs_frame_use(struct page *frame, unsigned long most);
void pofs_owe(struct pofs_domain *domain, unsigned short number, long n);

static inline atomic_long_t *pofs_users(struct page *frame)
{
	return (atomic_long_t *)&frame->private;
}

/* Of the module's own pages. */
static inline atomic_long_t *pofs_payers(struct page *frame)
{
	return (atomic_long_t *)&frame->lru.prev;
}

/* The same, under the lock of the domain's frames. Odd, it would say: a part of another page. */
static inline struct pofs_keepers **pofs_keepers_of(struct page *frame)
{
	return (struct pofs_keepers **)&frame->lru.next;
}

#endif
