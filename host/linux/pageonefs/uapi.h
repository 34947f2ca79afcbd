/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The control interface: ioctls on a directory descriptor of a mount's root, for CAP_SYS_ADMIN.
 *
 * All numbers are little-endian as the processor has them, all structures are free of holes, and
 * crates/kmem/src/pageonefs.rs has the same layout in Rust. A caller asks PAGEONEFS_INFO first, and
 * stops where `version` is not its own.
 *
 * A file is named by its `id`: unique while the module is loaded, never used again. It names files
 * that have no name any more, too. Pages are counted from the file's start. A frame is named by its
 * handle: unique in its domain, never used again; not 0. A frame lives while a page uses it.
 *
 * Errors of all: EPERM: no CAP_SYS_ADMIN; ENOTTY: no such request; EFAULT: memory of the caller's;
 * ESRCH: no file with this id; EINVAL: a range, a flag, or what is reserved; ENOMEM; EINTR. Others
 * are named where they can come. What is refused has changed nothing, but where ENOMEM, EINTR or
 * EFAULT come in the midst of a range.
 */
#ifndef PAGEONEFS_UAPI_H
#define PAGEONEFS_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define PAGEONEFS_VERSION	9
#define PAGEONEFS_DOMAIN_MAX	64	/* bytes, with the final 0 */

struct pageonefs_info {
	__u32 version;		/* PAGEONEFS_VERSION */
	__u32 page_size;	/* bytes */
	__u64 digest;		/* which function PAGEONEFS_DIGEST uses: 2 */
	char domain[PAGEONEFS_DOMAIN_MAX];	/* empty: this mount shares with no other */
};

/* Why a file is plain: none of its pages is merged, and none will be. */
#define PAGEONEFS_PLAIN_NO	0
#define PAGEONEFS_PLAIN_ASKED	1	/* PAGEONEFS_MAKE_PLAIN */
#define PAGEONEFS_PLAIN_PINNED	2	/* pages are pinned for long: VFIO, vDPA, registered buffers */
#define PAGEONEFS_PLAIN_STORE	3	/* a file of a store: see PAGEONEFS_MERGE */

struct pageonefs_file {
	__u64 id;
	__u64 inode;		/* as stat(2) has it */
	__u64 size;		/* bytes */
	__u64 private_pages;	/* in memory */
	__u64 merged_pages;
	__u32 plain;		/* PAGEONEFS_PLAIN_* */
	__u32 uid;		/* whose it is */
};

/* The files whose id is above `after`, in ascending order. */
struct pageonefs_list {
	__u64 after;
	__u64 files;		/* address of `room` structures */
	__u32 room;
	__u32 filled;		/* out */
};

/*
 * Takes and clears the dirty bits of [start, start + pages), multiples of 64. A set bit: the page
 * may have been written, punched or truncated since its bit was taken before. A page whose bit is
 * not set holds what it held then. After EFAULT the bits of the words that could not be written are
 * still there. `next` passes over what was never written: so a call costs what it was asked for,
 * and nobody need ask for all of a file's length.
 */
struct pageonefs_harvest {
	__u64 id;
	__u64 start;
	__u64 pages;
	__u64 bits;		/* address of pages / 64 words */
	__u64 dirty;		/* out: how many */
	__u64 next;		/* out: behind these pages the first that may have a bit; ~0: none */
	__u32 flags;		/* PAGEONEFS_HARVEST_* */
	__u32 reserved;		/* 0 */
};

/* Pages that are there have bits, too, whoever has taken them: in memory, swapped out, merged. */
#define PAGEONEFS_HARVEST_ALL	1

/*
 * What a page is. Odd values are a frame's handle * 2 + 1; other even ones its digest (function 2):
 * XXH3 (64 bits) of its bytes with `seed`, without the lowest bit, and 6 where that is less than 6.
 */
#define PAGEONEFS_PAGE_NONE	0	/* nothing there: reads as zeros */
#define PAGEONEFS_PAGE_AWAY	2	/* swapped out */
#define PAGEONEFS_PAGE_ZEROS	4	/* there, and all zeros: instead of a digest */

struct pageonefs_digest {
	__u64 id;
	__u64 start;
	__u64 pages;
	__u64 out;		/* address of `pages` words */
	__u64 only;		/* address of pages / 64 words that say which pages to look at; 0: all */
	__u64 seed;
	__u64 digested;		/* out: how many were read */
	__u32 flags;		/* PAGEONEFS_DIGEST_* */
	__u32 reserved;		/* 0 */
};

/* Pages that use a frame get the digest of their content, and not the frame's handle. */
#define PAGEONEFS_DIGEST_FRAMES	1

/* "Page `index` holds what frame `frame` holds." */
struct pageonefs_entry {
	__u64 index;
	__u64 frame;		/* 0: make a frame of this page; out: the handle of the one that it uses */
	__s32 result;		/* out: 0 merged, or a negative error number, see below */
	__u32 reserved;		/* 0, or the result is -EINVAL */
};

/*
 * Entries are in ascending order of their index. Results: 0; -EEXIST: it uses a frame already
 * (its handle is in `frame`), and no other was named, or the one named has another content;
 * -EAGAIN: not in memory, beyond the end, or locked; -EBUSY: someone holds the page, or others
 * pay for the frame while the page's payer has no room, or owes: look again later; -ESTALE:
 * other content; -ENOENT: no such frame any more; -EHWPOISON, -EINVAL, -ENOMEM. A page of one
 * frame may move to another of equal content. A frame has as many users as it may have: then the
 * page gets another of its content, whose handle is in `frame`, or -EMLINK: make another.
 *
 * Of a file of a store (PAGEONEFS_STORE) a page is lent instead: it stays in the file, and
 * becomes a frame, whatever `frame` says. Nobody may write it any more. -EEXIST: it is one already.
 */
struct pageonefs_merge {
	__u64 id;
	__u64 entries;		/* address */
	__u32 count;
	__u32 merged;		/* out */
};

/*
 * EHWPOISON: frames of it cannot be read; all other pages are private. EINTR: a signal came, or so
 * many pages became private: call again. ENOMEM: who pays for them has no room.
 */
#define PAGEONEFS_PLAIN_PAGES	4096

struct pageonefs_plain {
	__u64 id;
};

/*
 * Makes [start, start + pages) holes, but for pages that somebody has pinned (VFIO, RDMA, direct
 * I/O on 6.12): a device would go on with a page that the file has no more. No pin comes between
 * the look and the hole. Pages stay, too, whose locks, or all while the file's faults, take more
 * than some milliseconds. -EBUSY: the file is plain, its pages may be pinned unseen. -EPERM: it is
 * immutable, or can be appended to only.
 */
struct pageonefs_punch {
	__u64 id;
	__u64 start;
	__u64 pages;
	__u64 held;		/* address of pages / 64 words, rounded up: out, a bit for each page that stayed */
	__u64 stayed;		/* out: how many */
};

/*
 * From now on this eventfd(2) is written to when there is news of the mount: LIST has a file more,
 * a file less, one of another length, or one that has become plain; or the mount goes. Of writes
 * only the first into an empty file is told. Nothing is said of what was before. A mount has one:
 * the next call's takes its place. It does not hold the mount. EBADF: no descriptor.
 */
struct pageonefs_notify {
	__s32 eventfd;		/* -1: none */
	__u32 reserved;		/* 0 */
};

/*
 * PAGEONEFS_STORE takes no argument, and returns a descriptor of the root directory of a new store
 * of the mount's domain, with the same ioctls: a file system that has no place in any tree. It goes
 * with its last file. Its files can be sealed as memfds can, are mapped as tmpfs's are (all of
 * userfaultfd), and their pages can be lent to the domain's other files. -EINVAL: the mount has no
 * domain=.
 */

/*
 * Makes a page of a store's file, at the expense of the memory cgroup that process `pid` is in; or,
 * where that is 0, of the one that pays for page `like` of the store's file `like_id`. A page that
 * is there stays as it is. -ESRCH: no such process, or no such page in memory; -EINVAL: it is no
 * store, or beyond the file's end; -ENOMEM: that cgroup has no room, and nobody is killed for it;
 * -ENOSPC: no more may be committed; -EIO: the page has failed, or cannot be read in. A number may
 * become another process's: who names one looks afterwards whether it is still the same, and else
 * gives the page back.
 */
struct pageonefs_slot {
	__u64 id;
	__u64 index;
	__u64 like_id;		/* 0 with a pid */
	__u64 like;		/* 0 with a pid */
	__s32 pid;		/* as the caller's pid namespace has it */
	__u32 reserved;		/* 0 */
};

/* Since the module was loaded, in all mounts, but for the first two. */
struct pageonefs_stats {
	__u64 frames;		/* now, in this domain */
	__u64 merged_pages;	/* now, in this mount */
	__u64 merges;
	__u64 moves;		/* pages that went from a frame to an equal one */
	__u64 copies;		/* merged pages that became private: written, or unmerged */
	__u64 busy;		/* merges refused, someone held the page */
	__u64 differ;		/* merges refused, other content */
	__u64 late;		/* private pages made for a page that had been merged meanwhile */
	__u64 frame_faults;
	__u64 around;		/* merged pages mapped beside one that was read */
	__u64 private_faults;
	__u64 first_writes;	/* dirty bits set by a write through a mapping */
	__u64 drains;		/* times that LRU batches of a processor, or of all, were emptied */
};

#define PAGEONEFS_INFO		_IOR('1', 1, struct pageonefs_info)
#define PAGEONEFS_LIST		_IOWR('1', 2, struct pageonefs_list)
#define PAGEONEFS_HARVEST	_IOWR('1', 3, struct pageonefs_harvest)
#define PAGEONEFS_DIGEST	_IOWR('1', 4, struct pageonefs_digest)
#define PAGEONEFS_MERGE		_IOWR('1', 5, struct pageonefs_merge)
#define PAGEONEFS_MAKE_PLAIN	_IOW('1', 6, struct pageonefs_plain)
#define PAGEONEFS_STATS		_IOR('1', 7, struct pageonefs_stats)
#define PAGEONEFS_PUNCH		_IOWR('1', 8, struct pageonefs_punch)
#define PAGEONEFS_NOTIFY	_IOW('1', 9, struct pageonefs_notify)
#define PAGEONEFS_STORE		_IO('1', 10)
#define PAGEONEFS_SLOT		_IOW('1', 11, struct pageonefs_slot)

#endif
