/* SPDX-License-Identifier: GPL-2.0 */
/* Frames and domains: frame.c. */
#ifndef POFS_FRAME_H
#define POFS_FRAME_H

#include <linux/atomic.h>
#include <linux/kref.h>
#include <linux/mutex.h>
#include <linux/xarray.h>

#include "pageonefs.h"

/* Mounts that share frames. */
struct pofs_domain {
	struct kref kref;
	struct list_head list;
	struct xarray frames;		/* handle -> frame, while it has users */
	atomic64_t last_handle;
	atomic64_t count;
	atomic64_t left;		/* how often the last user that paid left a frame to others */
	struct mutex adopting;
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

/*
 * What a merge allocates it gives back at once, with the page that leaves its file. So limits are
 * passed rather than waited for, and nobody is killed for it.
 */
#define POFS_MERGE_GFP	(__GFP_HIGH | __GFP_KSWAPD_RECLAIM | __GFP_ACCOUNT | __GFP_NOWARN)

struct pofs_domain *pofs_domain_get(const char *name);
void pofs_domain_put(struct pofs_domain *domain);
int pofs_frame_most(void);
struct page *pofs_frame_new(struct pofs_domain *domain, struct page *content, struct page *user);
struct page *pofs_frame_another(struct pofs_domain *domain, u64 handle, struct page *user, int *error);
struct page *pofs_frame_find(struct xa_state *xas, u64 handle, int *error);
bool pofs_frame_again(struct page *frame);
int pofs_frame_begin(struct pofs_domain *domain, struct page *page);
unsigned long pofs_frame_put(struct pofs_domain *domain, struct page *frame);

/* Who pays for a file. */
struct mem_cgroup *pofs_payer_set(struct mem_cgroup **payer, struct page *page);
struct mem_cgroup *pofs_payer_get(struct mem_cgroup **payer);
int pofs_payer_of(pid_t pid, struct mem_cgroup **payer);
void pofs_payer_clear(struct mem_cgroup **payer);

/* Who pays for a frame. */
bool pofs_frame_join(struct pofs_domain *domain, struct page *frame, struct mem_cgroup *user);
void pofs_frame_leave(struct pofs_domain *domain, struct page *frame, bool alien);
int pofs_frame_adopt(struct pofs_domain *domain, struct page *frame, struct mem_cgroup *payer);
void pofs_frame_marked(struct pofs_domain *domain, struct page *frame);
bool pofs_payer_roomy(struct mem_cgroup *payer, struct page *frame);
bool pofs_payer_has_room(void);

#endif
