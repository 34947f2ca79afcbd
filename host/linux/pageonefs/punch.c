// SPDX-License-Identifier: GPL-2.0
/*
 * Punching for the daemon: all but what a device has pinned.
 */
#include <linux/delay.h>
#include <linux/pagemap.h>
#include <linux/shmem_fs.h>
#include <linux/uaccess.h>

#include "punch.h"

/*
 * Who is throttled by memory.high may hold what is asked for over seconds. So a call sleeps this
 * often at most: some milliseconds.
 */
#define NAPS	20

static bool nap(unsigned int *naps)
{
	if (!*naps && !pofs_no_bounded_wait)
		return false;
	*naps -= !!*naps;
	usleep_range(200, 500);
	return true;
}

/*
 * Whether a device would go on with this page without the file, or its lock cannot be had. There
 * are no faults.
 */
static bool stays(struct address_space *mapping, pgoff_t index, unsigned int *naps)
{
	struct page *page = pagecache_get_page(mapping, index, 0, 0);
	bool locked, pinned = true;

	if (!page)
		return false;
	while (!(locked = trylock_page(page)) && nap(naps))
		;
	if (locked) {
		/* A fault that ended before has mapped it by now. */
		if (page_mapped(page))
			unmap_mapping_pages(mapping, index, 1, false);
		pinned = folio_maybe_dma_pinned(page_folio(page)) && !pofs_no_punch_check;
		unlock_page(page);
	}
	put_page(page);
	return pinned;
}

#define PUNCH_CHUNK	BITS_PER_TYPE(u64)

/*
 * `held` gets a bit for each page that stays: all where faults take too long. The file does not
 * become plain meanwhile.
 */
static int punch_chunk(struct pofs_inode *pi, pgoff_t first, unsigned int n, u64 *held, unsigned int *naps)
{
	struct address_space *mapping = pofs_vfs(pi)->i_mapping;
	bool alone;
	unsigned int i, j;

	*held = U64_MAX >> (PUNCH_CHUNK - n);
	down_read(&pi->merging);
	if (pi->plain) {
		up_read(&pi->merging);
		return -EBUSY;
	}
	while (!(alone = down_write_trylock(&pi->faults)) && nap(naps))
		;
	if (!alone)
		goto out;
	pofs_erase(pi, first, first + n - 1);
	unmap_mapping_pages(mapping, first, n, false);
	for (*held = i = 0; i < n; i++)
		*held |= (u64)stays(mapping, first + i, naps) << i;
	for (i = 0; i < n; i = j + 1) {
		for (j = i; j < n && !(*held >> j & 1); j++)
			;
		if (i < j)
			shmem_truncate_range(pofs_vfs(pi), (loff_t)(first + i) << PAGE_SHIFT,
					     ((loff_t)(first + j) << PAGE_SHIFT) - 1);
	}
	up_write(&pi->faults);
out:
	up_read(&pi->merging);
	return 0;
}

/*
 * As punch(), but pages that are pinned stay. A pin is taken by way of a mapping: so mappings go,
 * then it is looked, and until the pages have left there are no faults that could map them.
 * A plain file's mappings may be tmpfs's own, whose faults are not held up.
 */
long pofs_punch(struct pofs_inode *pi, struct pageonefs_punch *p)
{
	u64 __user *out = u64_to_user_ptr(p->held);
	pgoff_t at = p->start, end = p->start + p->pages;
	unsigned int naps = NAPS;
	long ret = 0;

	if (end < at || end > MAX_LFS_FILESIZE >> PAGE_SHIFT)
		return -EINVAL;
	if (READ_ONCE(pi->plain))
		return -EBUSY;
	/* As fallocate(2). */
	if (IS_IMMUTABLE(pofs_vfs(pi)) || IS_APPEND(pofs_vfs(pi)))
		return -EPERM;
	p->stayed = 0;
	/* Before anything goes: the caller must get to know what has. */
	if (!pofs_no_first_check && clear_user(out, DIV_ROUND_UP_ULL(p->pages, PUNCH_CHUNK) * sizeof(u64)))
		return -EFAULT;
	if (at == end)
		return 0;
	pofs_block_merges(pi);
	pofs_cut_begin(pi, at, end - 1);
	for (; at < end && !ret; at += PUNCH_CHUNK) {
		u64 held;

		ret = punch_chunk(pi, at, min_t(u64, PUNCH_CHUNK, end - at), &held, &naps);
		if (ret)
			break;
		p->stayed += hweight64(held);
		if (put_user(held, out++))
			ret = -EFAULT;
		else if (fatal_signal_pending(current))
			ret = -EINTR;
		cond_resched();
	}
	pofs_cut_end(pi, p->start, end - 1);
	pofs_unblock_merges(pi);
	return ret;
}
