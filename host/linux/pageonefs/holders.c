// SPDX-License-Identifier: GPL-2.0
/*
 * Who else holds a page. Its reference count must be the file's and the caller's: whoever else has
 * one may write into it, or read what was there. What LRU batches of processors hold is no user,
 * and is drained. A page that stays pinned makes its file plain.
 */
#include <linux/module.h>
#include <linux/sched/isolation.h>
#include <linux/workqueue.h>

#include "holders.h"

/* A page that is pinned whenever it is looked at, and for so long, is pinned for good. */
static unsigned int pin_seconds = 10;
module_param(pin_seconds, uint, 0600);
MODULE_PARM_DESC(pin_seconds, "how long a page stays pinned until its file is not merged any more, in seconds");
#define PIN_LOOKS 3

/* Drops references. What this processor's LRU batches hold goes with them. */
void pofs_put_pages(struct page **pages, int n)
{
	struct folio_batch batch;
	int i;

	folio_batch_init(&batch);
	for (i = 0; i < n; i++) {
		if (folio_batch_add(&batch, page_folio(pages[i])) && i < n - 1)
			continue;
		pofs_release_batch(&batch);
		folio_batch_init(&batch);
	}
}

/*
 * Batches of other processors are emptied there, where a page seems to be in one: not often, and
 * not on processors that were isolated. What is in a batch there merges when that is full.
 */
static DEFINE_PER_CPU(struct work_struct, drain_work);

static void drain_here(struct work_struct *unused)
{
	struct folio_batch batch;

	folio_batch_init(&batch);
	pofs_release_batch(&batch);
}

static void drain_elsewhere(void)
{
	static unsigned long last;
	unsigned long then = READ_ONCE(last);
	int cpu;

	if (time_before(jiffies, then + HZ / 10) || cmpxchg(&last, then, jiffies) != then)
		return;
	pofs_count(drains);
	for_each_online_cpu(cpu)
		if (!cpu_is_isolated(cpu))
			queue_work_on(cpu, system_wq, per_cpu_ptr(&drain_work, cpu));
}

void pofs_holders_start(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		INIT_WORK(per_cpu_ptr(&drain_work, cpu), drain_here);
}

void pofs_holders_stop(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		flush_work(per_cpu_ptr(&drain_work, cpu));
}

/* Notes whether this page is pinned for good: the same page, at every look, for seconds. */
void pofs_look_for_pin(struct pofs_look *look, struct page *page, pgoff_t index)
{
	struct pofs_pin *pin = &look->pi->pin;
	bool now = folio_maybe_dma_pinned(page_folio(page));

	spin_lock(&pin->lock);
	if (now && (!pin->looks || (pin->index != index && time_after(jiffies, pin->last + 60 * HZ)))) {
		pin->index = index;
		pin->since = jiffies;
		pin->looks = 0;
	}
	if (pin->index == index) {
		pin->looks = now ? pin->looks + 1 : 0;
		pin->last = jiffies;
		if (pin->looks >= PIN_LOOKS && time_after(jiffies, pin->since + pin_seconds * HZ))
			look->pinned_for_good = true;
	}
	spin_unlock(&pin->lock);
}

/*
 * Whether nobody but the file and this function has the page. It is locked, and its mappings are
 * gone.
 */
bool pofs_alone(struct pofs_look *look, struct page *page, pgoff_t index)
{
	struct folio *folio = page_folio(page);
	bool held;

	if (folio_ref_count(folio) != 2 && !look->drained) {
		/* A new page is in a batch of its processor: of this one's, it comes out. */
		get_page(page);
		pofs_put_pages(&page, 1);
		look->drained = true;
		pofs_count(drains);
	}
	held = folio_ref_count(folio) != 2;
	if (held || look->pi->pin.index == index)
		pofs_look_for_pin(look, page, index);
	if (held && !folio_maybe_dma_pinned(folio))
		drain_elsewhere();
	if (held && !pofs_no_pin_check)
		return false;
	return !folio_test_large(folio) && !folio_test_writeback(folio) && folio_test_uptodate(folio) && !folio_mapped(folio);
}
