// SPDX-License-Identifier: GPL-2.0
/*
 * Opening a pool, emptying it, and waiting for the host.
 */
#include <linux/delay.h>
#include <linux/jiffies.h>
#include <linux/kernel.h>
#include <linux/math64.h>
#include <linux/sched/clock.h>
#include <linux/timekeeping.h>

#include "pool.h"

struct ppr_pool ppr_pool;
bool ppr_marking;
DEFINE_PER_CPU(struct ppr_stats, ppr_stats);
/* Set by a wait that takes long; main.c says so, and stops marking until the host lets go. */
atomic_t ppr_stuck = ATOMIC_INIT(0);
u64 ppr_longest_wait_ns;

/*
 * Checks the header against what follows from the pool's length. The host wrote it, and is trusted
 * with all memory anyway: this is against other versions, and against devices that are not pools.
 */
int ppr_pool_open(void *base, size_t len, unsigned long frames)
{
	atomic64_t *header = base;
	unsigned long pages = len / PPR_UNIT, rest, units;
	u64 expected[8];
	unsigned int i;

	if (pages < 4 || atomic64_read(&header[PPR_H_MAGIC]) != PPR_MAGIC)
		return -ENODEV;
	if (atomic64_read(&header[PPR_H_VERSION]) != PPR_VERSION) {
		pr_err("ppr: the host's pool has version %lld, this module speaks %d: update the older side\n",
		       atomic64_read(&header[PPR_H_VERSION]), PPR_VERSION);
		return -EPROTO;
	}
	if (atomic64_read(&header[PPR_H_FEATURES])) {
		pr_err("ppr: the host asks for features %#llx, which this module does not know: update it\n",
		       atomic64_read(&header[PPR_H_FEATURES]));
		return -EPROTO;
	}
	/* Of 129 pages behind the header, 64 are F, 64 are C, and one is S. */
	rest = pages - 1;
	units = rest / 129 * 64 + (rest % 129 ? (rest % 129 - 1) / 2 : 0);
	expected[PPR_H_MAGIC] = PPR_MAGIC;
	expected[PPR_H_VERSION] = PPR_VERSION;
	expected[PPR_H_FEATURES] = 0;
	expected[PPR_H_FRAMES] = units * PPR_UNIT_FRAMES;
	expected[PPR_H_FREE] = PPR_UNIT;
	expected[PPR_H_CLAIMS] = (1 + units) * PPR_UNIT;
	expected[PPR_H_SUMMARY] = (1 + 2 * units) * PPR_UNIT;
	expected[PPR_H_BYTES] = (1 + 2 * units + DIV_ROUND_UP(units, 64)) * PPR_UNIT;
	for (i = 0; i < ARRAY_SIZE(expected); i++) {
		if (atomic64_read(&header[i]) == expected[i])
			continue;
		pr_err("ppr: word %u of the pool's header is %#llx, and %#llx follows from its length: it is damaged\n",
		       i, atomic64_read(&header[i]), expected[i]);
		return -EPROTO;
	}
	if (expected[PPR_H_FRAMES] < frames) {
		pr_err("ppr: the pool stands for %llu pages and this guest's memory ends at page %lu: the host has to make it larger\n",
		       expected[PPR_H_FRAMES], frames);
		return -ENOSPC;
	}
	ppr_pool.header = header;
	ppr_pool.free = base + expected[PPR_H_FREE];
	ppr_pool.claims = base + expected[PPR_H_CLAIMS];
	ppr_pool.summary = base + expected[PPR_H_SUMMARY];
	ppr_pool.frames = expected[PPR_H_FRAMES];
	return 0;
}

/* Takes all marks back. Claims that are there stay: wait for them before the pages are used by
 * somebody who does not cancel. */
void ppr_pool_cancel_all(void)
{
	unsigned long word;

	for (word = 0; word < ppr_pool.frames / 64; word++)
		if (atomic64_read(&ppr_pool.free[word]))
			atomic64_xchg(&ppr_pool.free[word], 0);
}

bool ppr_pool_claimed(void)
{
	unsigned long word;

	for (word = 0; word < ppr_pool.frames / 64; word++)
		if (atomic64_read(&ppr_pool.claims[word]))
			return true;
	return false;
}

unsigned long ppr_pool_marked(void)
{
	unsigned long word, marked = 0;

	for (word = 0; word < ppr_pool.frames / 64; word++)
		marked += hweight64(atomic64_read(&ppr_pool.free[word]));
	return marked;
}

/*
 * Whether the pool has vanished: a device that was torn out, or whose memory is switched off, reads
 * as all ones or as zeros, and every page would seem claimed for ever. A host that has lost the
 * device has no pool either.
 */
static bool ppr_pool_gone(void)
{
	return unlikely(atomic64_read(&ppr_pool.header[PPR_H_MAGIC]) != PPR_MAGIC);
}

/*
 * Waits until the host has let go of every page; false: it has not within `seconds`. `sleep`:
 * where that is allowed, since a CPU that spins for seconds is taken for one that hangs.
 */
bool ppr_pool_wait_claims(unsigned int seconds, bool sleep)
{
	u64 end = ktime_get_mono_fast_ns() + seconds * (u64)NSEC_PER_SEC;

	while (ppr_pool_claimed() && !ppr_pool_gone()) {
		if (ktime_get_mono_fast_ns() > end)
			return false;
		if (sleep)
			usleep_range(200, 1000);
		else
			cpu_relax();
	}
	return true;
}

/*
 * The host has the pages: they must not be used before it lets go, whatever that takes, for nothing
 * here can tell a host that is slow from one that is dead. Called with a zone's lock held and
 * interrupts off, so nothing is printed.
 */
noinline void ppr_pool_wait_word(unsigned long word, u64 bits)
{
	u64 start = ktime_get_mono_fast_ns(), waited;
	unsigned int spins = 0;

	while (atomic64_read(&ppr_pool.claims[word]) & bits) {
		cpu_relax();
		if (!(++spins % 256) && ppr_pool_gone())
			break;
		if (!(spins % 4096) && ktime_get_mono_fast_ns() - start > NSEC_PER_SEC)
			atomic_set(&ppr_stuck, 1);
	}
	/* What the host wrote to the page is there before what the guest does next. */
	smp_mb();
	waited = ktime_get_mono_fast_ns() - start;
	ppr_count(waits, 1);
	ppr_count(wait_ns, waited);
	if (waited > READ_ONCE(ppr_longest_wait_ns))
		WRITE_ONCE(ppr_longest_wait_ns, waited);
}
