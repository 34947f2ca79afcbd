// SPDX-License-Identifier: GPL-2.0
/*
 * Dirty bits, and digests. A harvest looks who pays, too.
 *
 * A page's bit is set under its lock before it can be written: by the first write through a
 * mapping, and by write(2). A harvest takes the bits, and takes the mappings of these pages away,
 * so that the next write sets its bit again. The kernel maps a page writable after the bit is
 * set, under the same lock: so the harvest waits for that lock once between the two. Or it would
 * take the bit of a mapping that comes only after its zap, and never see what is written there.
 *
 * Holes are made, and lengths changed, without a page's lock: a harvest leaves the bits of what is
 * being cut (pofs_cut_begin).
 *
 * A disk that reads into a mapping holds its pages, and writes them without a mapping; so do others
 * (/proc/PID/mem). Their bits are set again for as long as a harvest finds them held.
 */
#include <linux/gfp.h>
#include <linux/memcontrol.h>
#include <linux/uaccess.h>

#include "scan.h"
#include "vector.h"

/* ---- harvest ------------------------------------------------------------------------ */

struct harvest_run {
	struct address_space *mapping;
	pgoff_t first, end;	/* neighbours whose mappings are still to go; none if they are equal */
};

/* All bits of the run have been taken: of a huge page they came together. */
static void wait_for_faults(struct harvest_run *run)
{
	pgoff_t next = run->first;
	struct folio_batch batch;
	struct page *page;
	unsigned int i;

	if (pofs_no_handshake)
		return;
	/* That is faster for one. */
	if (run->end == next + 1) {
		page = pagecache_get_page(run->mapping, next, 0, 0);
		if (page) {
			wait_on_page_locked(page);
			put_page(page);
		}
		return;
	}
	folio_batch_init(&batch);
	while (filemap_get_folios(run->mapping, &next, run->end - 1, &batch)) {
		for (i = 0; i < folio_batch_count(&batch); i++)
			folio_wait_locked(batch.folios[i]);
		folio_batch_release(&batch);
	}
}

/*
 * Whether somebody else may write into a page that nobody maps. Not all who do have it pinned. A
 * huge page may be in a processor's TLB for a while after munmap(2) has taken it out of its page
 * table, and has a reference until then. Who only reads, and LRU batches, keep the bit, too.
 */
static bool held(struct folio *folio)
{
	return folio_ref_count(folio) > folio_nr_pages(folio) + 1;
}

/* get_user_pages_fast() pins without a lock, and looks at the mapping again: so, after the zap. */
static void mark_held(struct harvest_run *run)
{
	struct pofs_inode *pi = POFS_I(run->mapping->host);
	pgoff_t next = run->first;
	struct folio_batch batch;
	unsigned int i;

	folio_batch_init(&batch);
	while (filemap_get_folios(run->mapping, &next, run->end - 1, &batch)) {
		for (i = 0; i < folio_batch_count(&batch); i++) {
			struct folio *folio = batch.folios[i];

			/* Small parts of it may be mapped beside the run: that is a reference, too. */
			if (folio_test_large(folio))
				unmap_mapping_pages(run->mapping, folio->index, folio_nr_pages(folio), false);
			if (unlikely(held(folio)))
				pofs_mark_dirty_range(pi, max(folio->index, run->first),
						      min(folio->index + folio_nr_pages(folio), run->end) - 1);
		}
		folio_batch_release(&batch);
	}
}

static void zap_run(struct harvest_run *run)
{
	if (run->end > run->first) {
		wait_for_faults(run);
		unmap_mapping_pages(run->mapping, run->first, run->end - run->first, false);
		if (!pofs_no_pin_bits)
			mark_held(run);
	}
	run->first = run->end = 0;
}

/* As many neighbours at a time as the word has. */
static void harvest_word(struct harvest_run *run, pgoff_t base, unsigned long word)
{
	unsigned int k, next;

	for (; word; word &= ~GENMASK(next - 1, k)) {
		k = __ffs(word);
		next = find_next_zero_bit(&word, BITS_PER_LONG, k);
		if (run->end != base + k) {
			zap_run(run);
			run->first = base + k;
		}
		run->end = base + next;
	}
}

/* A call that begins to cut after this sets its bits after this. */
static void mark_cut(struct pofs_inode *pi, pgoff_t first, pgoff_t last)
{
	down_read(&pi->merging);
	if (unlikely(pi->cuts) && pi->cut_first <= last && pi->cut_last >= first)
		pofs_mark_dirty_range(pi, max(first, pi->cut_first), min(last, pi->cut_last));
	up_read(&pi->merging);
}

/* `n` words of bits, of one chunk. Returns how many bits there were. */
static u64 harvest_words(struct pofs_inode *pi, pgoff_t base, unsigned int n, u64 *out)
{
	struct harvest_run run = { .mapping = pofs_vfs(pi)->i_mapping };
	unsigned long *bits = xa_load(&pi->dirty, base / POFS_DIRTY_BITS);
	u64 dirty = 0;
	unsigned int i;

	if (!bits) {
		memset(out, 0, n * sizeof(u64));
		return 0;
	}
	bits += base % POFS_DIRTY_BITS / BITS_PER_LONG;
	for (i = 0; i < n; i++) {
		out[i] = READ_ONCE(bits[i]);
		if (!out[i])
			continue;
		/* A full barrier: the look at the page's lock comes after it. */
		out[i] = xchg(&bits[i], 0);
		dirty += hweight64(out[i]);
		harvest_word(&run, base + i * BITS_PER_LONG, out[i]);
	}
	zap_run(&run);
	if (dirty)
		mark_cut(pi, base, base + n * BITS_PER_LONG - 1);
	return dirty;
}

/* Bits that the caller does not get. */
static void put_back(struct pofs_inode *pi, pgoff_t base, const u64 *words, unsigned int n)
{
	unsigned int i, k;

	for (i = 0; i < n && !pofs_no_first_check; i++)
		for (k = 0; k < BITS_PER_LONG; k++)
			if (words[i] >> k & 1)
				pofs_mark_dirty(pi, base + i * BITS_PER_LONG + k);
}

/* Bits of what one of the file's tables has, where there are none yet. Returns how many. */
static u64 add_there(struct xarray *table, pgoff_t base, unsigned int n, u64 *out)
{
	pgoff_t end = base + n * BITS_PER_LONG;
	unsigned long index, i;
	u64 added = 0;
	void *entry;

	xa_for_each_range(table, index, entry, base, end - 1) {
		/* Of a huge page all. */
		pgoff_t next = (index | ((1UL << xa_get_order(table, index)) - 1)) + 1;

		for (i = index - base; i < min(next, end) - base; i++)
			added += !__test_and_set_bit(i, (unsigned long *)out);
	}
	return added;
}

/* Where a table has something next, in pages; entries are of `unit` pages. */
static u64 next_of(struct xarray *table, u64 from, unsigned long unit)
{
	unsigned long index = from / unit;

	if (!xa_find(table, &index, ULONG_MAX, XA_PRESENT))
		return U64_MAX;
	return max_t(u64, from, round_down((u64)index * unit, BITS_PER_LONG));
}

/* ---- requests ------------------------------------------------------------------------------ */

#define HARVEST_WORDS 64

/* After an error, bits of the first pages may have been taken: the caller has them. */
long pofs_harvest(struct pofs_inode *pi, struct pageonefs_harvest *h)
{
	u64 __user *user = u64_to_user_ptr(h->bits);
	struct xarray *pages = &pofs_vfs(pi)->i_mapping->i_pages;
	bool all = h->flags & PAGEONEFS_HARVEST_ALL;
	u64 words[HARVEST_WORDS], at, n;

	if ((h->start | h->pages) % BITS_PER_LONG || h->start + h->pages < h->start)
		return -EINVAL;
	if (h->flags & ~PAGEONEFS_HARVEST_ALL || h->reserved)
		return -EINVAL;
	h->dirty = 0;
	pofs_adopt(POFS_SB(pofs_vfs(pi)->i_sb)->domain);
	for (at = 0; at < h->pages / BITS_PER_LONG; at += n) {
		pgoff_t base = h->start + at * BITS_PER_LONG;

		n = min_t(u64, h->pages / BITS_PER_LONG - at, HARVEST_WORDS);
		n = min_t(u64, n, (POFS_DIRTY_BITS - base % POFS_DIRTY_BITS) / BITS_PER_LONG);
		h->dirty += harvest_words(pi, base, n, words);
		if (all)
			h->dirty += add_there(pages, base, n, words) + add_there(&pi->merged, base, n, words);
		if (user && copy_to_user(user + at, words, n * sizeof(u64))) {
			put_back(pi, base, words, n);
			return -EFAULT;
		}
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	h->next = next_of(&pi->dirty, h->start + h->pages, POFS_DIRTY_BITS);
	if (all) {
		h->next = min(h->next, next_of(pages, h->start + h->pages, 1));
		h->next = min(h->next, next_of(&pi->merged, h->start + h->pages, 1));
	}
	return 0;
}

/* ---- digests ------------------------------------------------------------------------ */

static bool wanted(const u64 *only, u64 at)
{
	return !only || only[at / 64] >> (at % 64) & 1;
}

struct digest_run {
	struct pofs_inode *pi;
	struct pofs_secret secret;
	u64 digested;
	bool frames;
	/* Pages at hand, each with a reference, and where their digests go. */
	struct page *pages[POFS_VECTOR_PAGES];
	u64 *out[POFS_VECTOR_PAGES];
	unsigned int n;
};

static void digest_at_hand(struct digest_run *run)
{
	unsigned int i;

	if (!run->n)
		return;
	pofs_vector_begin();
	for (i = 0; i < run->n; i++)
		*run->out[i] = pofs_page_digest(run->pages[i], &run->secret);
	pofs_vector_end();
	for (i = 0; i < run->n; i++)
		put_page(run->pages[i]);
	run->digested += run->n;
	run->n = 0;
}

/* Whether the file's own page is what the file holds. */
static bool readable(struct digest_run *run, struct page *page, pgoff_t index)
{
	bool ret = PageUptodate(page) && !PageHWPoison(page);

	/* What does not merge. */
	ret = ret && (pofs_no_end_check || !pofs_beyond_end(run->pi, index));
	/* Not a page that is just being filled with what was merged. */
	ret = ret && !xa_load(&run->pi->merged, index);
	/* Pairs with the entry's removal, which comes after the copy. */
	smp_rmb();
	return ret;
}

/*
 * Of pages [from, n), counted from `first`, which are wanted and have no word yet: those that are
 * the file's own, or those that use a frame. Returns how far it got: some pages are at hand then.
 */
static unsigned int gather(struct digest_run *run, struct xarray *table, pgoff_t first, unsigned int from,
			   unsigned int n, const u64 *only, u64 *out)
{
	bool merged = table == &run->pi->merged;
	XA_STATE(xas, table, first + from);
	unsigned int i;

	rcu_read_lock();
	for (i = from; i < n && run->n < POFS_VECTOR_PAGES; i++) {
		struct page *page = wanted(only, i) && !out[i] ? pofs_load(&xas, first + i) : NULL;

		if (!page)
			continue;
		if (merged && !run->frames)
			out[i] = pofs_frame_handle(page) * 2 + 1;
		else if (!merged)
			page = folio_file_page(page_folio(page), first + i);
		if (out[i] || (merged ? PageHWPoison(page) : !readable(run, page, first + i))) {
			put_page(page);
			continue;
		}
		run->pages[run->n] = page;
		run->out[run->n++] = &out[i];
	}
	rcu_read_unlock();
	return i;
}

/* `n` pages from `first` on, of those that are wanted. */
static void digest_some(struct digest_run *run, pgoff_t first, unsigned int n, const u64 *only, u64 *out)
{
	struct address_space *mapping = pofs_vfs(run->pi)->i_mapping;
	unsigned int i;

	memset(out, 0, n * sizeof(u64));
	for (i = 0; i < n; digest_at_hand(run))
		i = gather(run, &mapping->i_pages, first, i, n, only, out);
	if (atomic_long_read(&run->pi->count))
		for (i = 0; i < n; digest_at_hand(run))
			i = gather(run, &run->pi->merged, first, i, n, only, out);
	if (!READ_ONCE(run->pi->shmem.swapped))
		return;
	/* A huge page is swapped out as one entry for all its pages. */
	for (i = 0; i < n; i++)
		if (!out[i] && wanted(only, i) && xa_is_value(xa_load(&mapping->i_pages, first + i)))
			out[i] = PAGEONEFS_PAGE_AWAY;
}

#define DIGEST_PAGES 512

long pofs_digest(struct pofs_inode *pi, struct pageonefs_digest *d)
{
	struct digest_run run = { .pi = pi };
	const u64 __user *only = u64_to_user_ptr(d->only);
	u64 __user *user = u64_to_user_ptr(d->out);
	u64 *out, chosen[DIGEST_PAGES / 64], at, n;
	long ret = 0;

	if (d->start + d->pages < d->start || (d->only && (d->start | d->pages) % 64))
		return -EINVAL;
	if (d->flags & ~PAGEONEFS_DIGEST_FRAMES || d->reserved)
		return -EINVAL;
	run.frames = d->flags & PAGEONEFS_DIGEST_FRAMES;
	out = (u64 *)__get_free_page(GFP_KERNEL);
	if (!out)
		return -ENOMEM;
	pofs_secret(&run.secret, d->seed);
	for (at = 0; at < d->pages && !ret; at += n) {
		n = min_t(u64, d->pages - at, DIGEST_PAGES);
		if (d->only && copy_from_user(chosen, only + at / 64, n / 64 * sizeof(u64))) {
			ret = -EFAULT;
			break;
		}
		digest_some(&run, d->start + at, n, d->only ? chosen : NULL, out);
		if (copy_to_user(user + at, out, n * sizeof(u64)))
			ret = -EFAULT;
		else if (fatal_signal_pending(current))
			ret = -EINTR;
		cond_resched();
	}
	free_page((unsigned long)out);
	d->digested = run.digested;
	return ret;
}
