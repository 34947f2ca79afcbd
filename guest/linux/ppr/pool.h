/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The memory that guest and host share, and the guest's two operations on it.
 *
 * F says which pages the guest does not need, C which of them the host is about to zero; S says
 * which words of F are worth a look. crates/ppr has the same layout in Rust; docs/design/ppr.md has
 * the protocol, and why no page can be lost.
 */
#ifndef PPR_POOL_H
#define PPR_POOL_H

#include <linux/atomic.h>
#include <linux/minmax.h>
#include <linux/percpu.h>
#include <linux/timex.h>
#include <linux/types.h>

#define PPR_MAGIC	0x5250503145474150ULL	/* "PAGE1PPR" */
#define PPR_VERSION	1
#define PPR_UNIT	4096UL			/* offsets are multiples of it */
#define PPR_UNIT_FRAMES	(PPR_UNIT * 8)

/* Words of the header. */
enum {
	PPR_H_MAGIC, PPR_H_VERSION, PPR_H_FEATURES, PPR_H_FRAMES, PPR_H_FREE, PPR_H_CLAIMS, PPR_H_SUMMARY, PPR_H_BYTES,
	PPR_H_GUEST_STATE, PPR_H_GUEST_STARTS, PPR_H_HOST_STATE = 12, PPR_H_HOST_STARTS,
};

enum { PPR_GUEST_ABSENT, PPR_GUEST_ACTIVE, PPR_GUEST_LEAVING };

struct ppr_pool {
	atomic64_t *header;
	atomic64_t *free;	/* F */
	atomic64_t *claims;	/* C */
	atomic64_t *summary;	/* S */
	unsigned long frames;	/* frame numbers are below it */
};

extern struct ppr_pool ppr_pool;
/* Whether pages may be marked. Cancelling does not depend on it. */
extern bool ppr_marking;
extern bool ppr_cycles;

struct ppr_stats {
	u64 marked;		/* pages */
	u64 marks;		/* calls */
	u64 mark_cycles;	/* with the parameter `cycles` */
	u64 cancelled;		/* pages whose mark was still there */
	u64 cancels;		/* calls */
	u64 cancel_cycles;
	u64 leaves;		/* pages for which a cancel was called, marked or not */
	u64 waits;		/* words that a host held */
	u64 wait_ns;
	u64 isolated;		/* pages taken out for compaction, contiguous allocation, reporting */
	u64 late;		/* pages found marked only when their allocation was complete (captured by compaction) */
	u64 late_frees;		/* the same, when they were freed again without having been handed out */
	u64 missed;		/* single pages found marked though allocated: never, or this module is wrong */
	u64 deferred;		/* frees of orders that bypass the per-CPU lists */
	u64 overflows;		/* of these, those that found no room in the ring */
};

DECLARE_PER_CPU(struct ppr_stats, ppr_stats);
#define ppr_count(field, n)	this_cpu_add(ppr_stats.field, (n))

int ppr_pool_open(void *base, size_t len, unsigned long frames);
void ppr_pool_cancel_all(void);
bool ppr_pool_wait_claims(unsigned int seconds, bool sleep);
bool ppr_pool_claimed(void);
unsigned long ppr_pool_marked(void);
void ppr_pool_wait_word(unsigned long word, u64 bits);
extern atomic_t ppr_stuck;
extern u64 ppr_longest_wait_ns;

/* Calls `body` with `word` and `bits` for each word that the frames lie in. */
#define ppr_for_each_word(pfn, n, word, bits, body) do {				\
	unsigned long __at = (pfn), __end = min(__at + (n), ppr_pool.frames);		\
	while (__at < __end) {								\
		unsigned long __low = __at % 64;					\
		unsigned long __len = min(64 - __low, __end - __at);			\
		unsigned long word = __at / 64;						\
		u64 bits = (~0ULL >> (64 - __len)) << __low;				\
		body									\
		__at += __len;								\
	}										\
} while (0)

/*
 * Says that the pages are not needed. The caller knows that they are in the buddy allocator or on
 * their way to it.
 */
static inline void ppr_mark(unsigned long pfn, unsigned long n)
{
	u64 start = ppr_cycles ? get_cycles() : 0;

	if (!READ_ONCE(ppr_marking))
		return;
	ppr_for_each_word(pfn, n, word, bits, {
		/* Who turns a word from 0 to something says so in S. */
		if (!atomic64_fetch_or(bits, &ppr_pool.free[word]))
			atomic64_or(1ULL << (word % 64), &ppr_pool.summary[word / 64]);
	});
	ppr_count(marked, n);
	ppr_count(marks, 1);
	if (start)
		ppr_count(mark_cycles, get_cycles() - start);
}

/*
 * Takes the pages back, before anybody uses them. When it returns, no host will touch them: a mark
 * that was still there is gone, so nobody can claim the page; and a claim that was there has been
 * waited for. Returns the pages whose mark was still there.
 */
static inline unsigned long ppr_cancel(unsigned long pfn, unsigned long n)
{
	u64 start = ppr_cycles ? get_cycles() : 0;
	unsigned long won = 0;

	ppr_for_each_word(pfn, n, word, bits, {
		u64 old = bits == ~0ULL ? atomic64_xchg(&ppr_pool.free[word], 0)
					: atomic64_fetch_andnot(bits, &ppr_pool.free[word]);
		won += bits == ~0ULL ? hweight64(old) : hweight64(old & bits);
		if (unlikely(atomic64_read(&ppr_pool.claims[word]) & bits))
			ppr_pool_wait_word(word, bits);
	});
	ppr_count(leaves, n);
	ppr_count(cancelled, won);
	ppr_count(cancels, 1);
	if (start)
		ppr_count(cancel_cycles, get_cycles() - start);
	return won;
}

/* Whether any of the pages is marked or claimed. */
static inline bool ppr_touched(unsigned long pfn, unsigned long n)
{
	ppr_for_each_word(pfn, n, word, bits, {
		if ((atomic64_read(&ppr_pool.free[word]) | atomic64_read(&ppr_pool.claims[word])) & bits)
			return true;
	});
	return false;
}

#endif
