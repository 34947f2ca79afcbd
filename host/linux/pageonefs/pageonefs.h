/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the module's files share. main.c says how it works, and has the rules of locking.
 */
#ifndef PAGEONEFS_H
#define PAGEONEFS_H

#include <linux/atomic.h>
#include <linux/fs.h>
#include <linux/fs_context.h>
#include <linux/kref.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/rwsem.h>
#include <linux/shmem_fs.h>
#include <linux/xarray.h>

#include "uapi.h"
#include "versions.h"

/* tmpfs's own operations, and its operations with ours in front. Set once, by main.c. */
struct pofs_base {
	const struct file_operations *file;
	const struct inode_operations *inode;
	const struct inode_operations *dir;
	const struct super_operations *super;
	const struct vm_operations_struct *vm;
	struct file_system_type *type;
};

extern struct pofs_base pofs_base;
extern struct file_operations pofs_file_ops;
extern struct file_operations pofs_root_file_ops;
extern struct inode_operations pofs_inode_ops;
extern struct inode_operations pofs_dir_ops;
extern struct vm_operations_struct pofs_vm_ops;
extern struct super_operations pofs_super_ops;

extern unsigned int pofs_max_users;

/*
 * Guards that are off, with which the tests have to fail: parameters of a module that is built for
 * that alone, with PAGEONEFS_SABOTAGE=y.
 */
#ifdef POFS_SABOTAGE
extern bool pofs_no_pin_check;
extern bool pofs_no_pin_bits;
extern bool pofs_no_handshake;
extern bool pofs_no_cut_bits;
extern bool pofs_no_compare;
extern bool pofs_no_punch_check;
extern bool pofs_no_huge_bits;
extern bool pofs_no_frame_wait;
extern bool pofs_no_recall;
extern bool pofs_no_huge_walk;
extern unsigned int pofs_slow_us;
#else
#define pofs_no_pin_check false
#define pofs_no_pin_bits false
#define pofs_no_handshake false
#define pofs_no_cut_bits false
#define pofs_no_compare false
#define pofs_no_punch_check false
#define pofs_no_huge_bits false
#define pofs_no_frame_wait false
#define pofs_no_recall false
#define pofs_no_huge_walk false
#define pofs_slow_us 0
#endif

/* Pages of a batch that are locked together, and bits of a word. */
#define POFS_CHUNK	64

/* Mounts that share frames. */
struct pofs_domain {
	struct kref kref;
	struct list_head list;
	struct xarray frames;		/* handle -> frame, while it has users */
	atomic64_t last_handle;
	atomic64_t count;
	char name[PAGEONEFS_DOMAIN_MAX];
};

/* One mount. Its super_block's operations lie in it, which is how it is found. */
struct pofs_super {
	struct super_operations ops;
	struct pofs_domain *domain;
	bool store;			/* its files' pages can be lent: lend.c */
	struct xarray files;		/* id -> inode, regular files */
	atomic64_t merged;
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
	struct xarray merged;		/* page index -> frame */
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
	unsigned int plain;		/* PAGEONEFS_PLAIN_*; under `merging` and `faults` */
	bool gives;			/* a frame was given to the kernel to be mapped; stays */
	unsigned int cuts;		/* calls under way that cut pages; under `merging` */
	pgoff_t cut_first, cut_last;	/* what all of these cut, or more */
	struct pofs_pin pin;
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

static inline bool pofs_beyond_end(struct pofs_inode *pi, pgoff_t index)
{
	return index >= DIV_ROUND_UP_ULL(i_size_read(pofs_vfs(pi)), PAGE_SIZE);
}

/*
 * Whether the page table says that userfaultfd has write-protected the page, which is not mapped.
 * vm_insert_pages() leaves that entry alone: only the kernel's own way replaces it, and keeps the
 * protection.
 */
static inline bool pofs_is_marked(struct vm_fault *vmf)
{
	return vmf->flags & FAULT_FLAG_ORIG_PTE_VALID && !pte_none(vmf->orig_pte) && !pte_present(vmf->orig_pte);
}

static inline struct pofs_super *POFS_SB(const struct super_block *sb)
{
	return container_of(sb->s_op, struct pofs_super, ops);
}

/* All fields of the statistics that are counted here. */
DECLARE_PER_CPU(struct pageonefs_stats, pofs_stats);
#define pofs_count(field) this_cpu_inc(pofs_stats.field)
#define pofs_count_by(field, n) this_cpu_add(pofs_stats.field, n)

/* super.c */
extern struct file_system_type pofs_type;
int pofs_init_fs_context(struct fs_context *fc);
void pofs_kill_sb(struct super_block *sb);
int pofs_inodes_start(void);
void pofs_inodes_stop(void);
/* A merged page stays charged against the mount's size. */
void pofs_charge(struct inode *inode, long pages);
void pofs_recount(struct inode *inode);
int pofs_store_open(struct pofs_domain *domain);

/* inode.c */
void pofs_evict_inode(struct inode *inode);
void pofs_inode_ops_start(void);

/* file.c */
void pofs_file_ops_start(void);
void pofs_block_merges(struct pofs_inode *pi);
void pofs_unblock_merges(struct pofs_inode *pi);
void pofs_cut_begin(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
void pofs_cut_end(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
int pofs_unmerge(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
int pofs_make_plain(struct pofs_inode *pi, unsigned int why);
long pofs_punch(struct pofs_inode *pi, struct pageonefs_punch *p);

/* fault.c */
void pofs_vm_ops_start(void);
vm_fault_t pofs_settle(struct pofs_inode *pi, struct page *page, pgoff_t index);

/* read.c */
vm_fault_t pofs_read_frame(struct vm_fault *vmf, struct pofs_inode *pi);

/* frame.c */
struct pofs_domain *pofs_domain_get(const char *name);
void pofs_domain_put(struct pofs_domain *domain);
struct page *pofs_frame_new(struct pofs_domain *domain, struct page *content);
struct page *pofs_frame_find(struct xa_state *xas, u64 handle, int *error);
int pofs_frame_begin(struct pofs_domain *domain, struct page *page);
void pofs_frame_put(struct pofs_domain *domain, struct page *frame);
struct page *pofs_page_load(struct xarray *table, unsigned long index);
struct page *pofs_frame_at(struct pofs_inode *pi, pgoff_t index);
bool pofs_entry_erase(struct pofs_inode *pi, pgoff_t index, struct page *frame);
bool pofs_frame_leave(struct pofs_inode *pi, pgoff_t index, struct page *frame);
struct page *pofs_load(struct xa_state *xas, unsigned long index);
void pofs_erase(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
void pofs_frame_wait(struct pofs_inode *pi, struct page *frame);

/* What `private` of a frame holds: how many entries use it, whether it is all zeros, its handle. */
#define POFS_USERS	((1ul << 20) - 1)
#define POFS_ZEROS	(1ul << 20)
#define POFS_HANDLE	21
#define pofs_frame_zeros(frame) (READ_ONCE((frame)->private) & POFS_ZEROS)
#define pofs_frame_handle(frame) ((u64)READ_ONCE((frame)->private) >> POFS_HANDLE)

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

/* huge.c */
#define POFS_HUGE_PAGES	PTRS_PER_PTE
bool pofs_huge_whole(struct pofs_inode *pi, struct vm_area_struct *vma, struct folio *folio);
vm_fault_t pofs_tmpfs_fault(struct pofs_inode *pi, struct vm_fault *vmf);
void pofs_huge_split(struct pofs_inode *pi, pgoff_t index);
int pofs_insert_pages(struct vm_fault *vmf, unsigned long address, struct page **pages, unsigned long *n,
		      bool writable);
bool pofs_has_table(struct vm_fault *vmf);
vm_fault_t pofs_map_small(struct vm_fault *vmf);

/* merge.c */
void pofs_merge_start(void);
void pofs_merge_stop(void);
long pofs_merge(struct pofs_inode *pi, struct pageonefs_merge *m);
void pofs_uncount_pages(struct address_space *mapping, struct folio *one, int n);

/* lend.c */
long pofs_lend(struct pofs_inode *pi, struct pageonefs_merge *m);
void pofs_recall(struct pofs_inode *pi, pgoff_t first, pgoff_t last);

/* vector.c: pages, between begin and end */
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

/* scan.c */
int pofs_mark_dirty(struct pofs_inode *pi, pgoff_t index);
void pofs_mark_dirty_range(struct pofs_inode *pi, pgoff_t first, pgoff_t last);
void pofs_dirty_free(struct pofs_inode *pi);
long pofs_harvest(struct pofs_inode *pi, struct pageonefs_harvest *h);
long pofs_digest(struct pofs_inode *pi, struct pageonefs_digest *d);

/* control.c */
void pofs_news(struct pofs_super *ps);
void pofs_news_to(struct pofs_super *ps, struct eventfd_ctx *news);
long pofs_ioctl(struct file *file, unsigned int cmd, unsigned long arg);

#endif
