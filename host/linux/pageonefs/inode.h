/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A file and its mount: which frames its pages use, which pages are dirty, who keeps merges away,
 * and how merged pages become private.
 */
#ifndef POFS_INODE_H
#define POFS_INODE_H

#include <linux/rwsem.h>
#include <linux/shmem_fs.h>

#include "account.h"
#include "adopt.h"
#include "mapping.h"

/* One mount. Its super_block's operations lie in it, which is how it is found. */
struct pofs_super {
	struct super_operations ops;
	struct pofs_domain *domain;
	bool store;			/* its files' pages can be lent: lend.c */
	struct xarray files;		/* id -> inode, regular files */
	struct pofs_account account;
	spinlock_t news_lock;
	struct eventfd_ctx *news;	/* NULL: nobody waits; under `news_lock` */
};

/* The page of a file that was last seen pinned. */
struct pofs_pin {
	spinlock_t lock;
	unsigned int looks;	/* how often in a row; 0: none */
	pgoff_t index;		/* ULONG_MAX: none yet */
	unsigned long since;	/* jiffies */
	unsigned long last;	/* jiffies */
};

#define POFS_MAPPING_LOCKS 16

struct pofs_inode {
	struct xarray merged;		/* page index -> frame; POFS_MARK: others pay for it */
	struct xarray lent;		/* page index -> page of this file that is a frame, too */
	struct xarray dirty;		/* page index / POFS_DIRTY_BITS -> a page of bits */
	atomic_long_t count;		/* entries of `merged` */
	pgoff_t around_end;		/* where what was mapped at the last read fault ends */
	unsigned int around;		/* and how many pages that were at most */
	pgoff_t write_end;		/* where what was made private at the last write fault ends */
	unsigned int write_run;		/* and how many pages that were at most */
	struct rw_semaphore mapping[POFS_MAPPING_LOCKS];	/* of 2 MiB each, see pofs_mapping_lock() */
	struct rw_semaphore faults;	/* held for reading by faults; not while it is punched (pofs_punch) */
	struct rw_semaphore merging;	/* held for reading by merges; not while others change the file */
	unsigned int blocked;		/* how many change the file now: there are no merges; under `merging` */
	unsigned int plain;		/* PAGEONEFS_PLAIN_*; under `merging` */
	bool gives;			/* a frame was given to the kernel to be mapped; stays */
	unsigned int cuts;		/* calls under way that cut pages; under `merging` */
	pgoff_t cut_first, cut_last;	/* what all of these cut, or more */
	struct pofs_pin pin;
	struct mem_cgroup *payer;	/* of the page that merged last, with a reference; NULL: none yet */
	u64 id;				/* 0: not a regular file */
	struct shmem_inode_info shmem;	/* last: tmpfs clears what stands before its inode */
};

#define POFS_DIRTY_BITS	(PAGE_SIZE * 8)

static inline struct pofs_inode *POFS_I(struct inode *inode)
{
	return container_of(SHMEM_I(inode), struct pofs_inode, shmem);
}

/*
 * Held for reading while frames are mapped, and for writing where an entry goes, or names another
 * frame. A merge stores new entries without it.
 */
static inline struct rw_semaphore *pofs_mapping_lock(struct pofs_inode *pi, pgoff_t index)
{
	return &pi->mapping[index / PTRS_PER_PTE % POFS_MAPPING_LOCKS];
}

static inline struct inode *pofs_vfs(struct pofs_inode *pi)
{
	return &pi->shmem.vfs_inode;
}

static inline pgoff_t pofs_end(struct pofs_inode *pi)
{
	return DIV_ROUND_UP_ULL(i_size_read(pofs_vfs(pi)), PAGE_SIZE);
}

static inline bool pofs_beyond_end(struct pofs_inode *pi, pgoff_t index)
{
	return index >= pofs_end(pi);
}

static inline struct pofs_super *POFS_SB(const struct super_block *sb)
{
	return container_of(sb->s_op, struct pofs_super, ops);
}

/* What the file's page `index` uses, with a reference. */
static inline struct page *pofs_frame_at(struct pofs_inode *pi, pgoff_t index)
{
	return pofs_page_load(&pi->merged, index);
}

/* Its mount. */
void pofs_news(struct pofs_super *ps);
void pofs_news_to(struct pofs_super *ps, struct eventfd_ctx *news);

/* Its dirty bits. */
int pofs_mark_dirty(struct pofs_inode *pi, pgoff_t index);
void pofs_mark_dirty_range(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
void pofs_dirty_free(struct pofs_inode *pi);

/* Merges, and harvests, kept away. */
void pofs_block_merges(struct pofs_inode *pi);
void pofs_unblock_merges(struct pofs_inode *pi);
void pofs_cut_begin(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
void pofs_cut_end(struct pofs_inode *pi, pgoff_t first, pgoff_t last);

/* What the mount has room for. */
int pofs_room_for(struct pofs_room *room, struct pofs_inode *pi, pgoff_t index, long pages);
int pofs_room_await(struct pofs_room *room, struct pofs_inode *pi, pgoff_t index);
int pofs_room_holes(struct pofs_room *room, struct pofs_inode *pi, pgoff_t first, pgoff_t last);

/* Its entries. */
void pofs_frame_wait(struct pofs_inode *pi, struct page *frame);
void pofs_erase(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
vm_fault_t pofs_copy_frame(struct pofs_inode *pi, struct page *page, pgoff_t index);
vm_fault_t pofs_settle(struct pofs_inode *pi, struct page *page, pgoff_t index);
void pofs_page_drop(struct pofs_inode *pi, struct page *page);
int pofs_make_private(struct pofs_inode *pi, pgoff_t index, bool hole, struct page **made);
int pofs_unmerge(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
int pofs_make_plain(struct pofs_inode *pi, unsigned int why);

#endif
