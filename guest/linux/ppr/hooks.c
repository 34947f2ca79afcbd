// SPDX-License-Identifier: GPL-2.0
/*
 * Where pages leave the buddy allocator, and where they enter it.
 *
 * A page that leaves without being cancelled may be zeroed while it is in use. So there is no
 * "mostly" on that side: docs/design/ppr.md lists every caller of del_page_from_free_list() in each
 * supported kernel, and which of the hooks here sees it. On the other side, a page that enters
 * without being marked is a saving lost.
 *
 *   leaves by                                          seen by
 *   __rmqueue_smallest                                 tracepoint mm_page_alloc_zone_locked, zone
 *                                                      lock held
 *   __rmqueue_steal, try_to_steal_block (6.12)         tracepoint mm_page_alloc_extfrag, zone lock
 *                                                      held
 *   __isolate_free_page: compaction, contiguous        ftrace, on entry, zone lock held
 *     allocation, reporting, page isolation
 *   compaction_capture, with the free pages that it    tracepoint mm_page_alloc, before the caller
 *                                                      has the page
 *     was merged with
 *   __offline_isolated_pages                           memory notifier (main.c)
 *   take_page_off_buddy (a broken page)                not used until it is put back
 *
 *   enters by                                          seen by
 *   free_pcppages_bulk                                 tracepoint mm_page_pcpu_drain, zone lock
 *                                                      held
 *   free_one_page, for orders without per-CPU lists    tracepoint mm_page_free; looked at again,
 *                                                      and marked, under the zone lock
 */
#include <linux/ftrace.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/string.h>
#include <linux/tracepoint.h>
#include <linux/version.h>

#include "hooks.h"
#include "pool.h"

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
#define PPR_ORDERS	NR_PAGE_ORDERS
#else
#define PPR_ORDERS	MAX_ORDER
#endif

/* ---- leaving ------------------------------------------------------------ */

static void on_zone_locked(void *data, struct page *page, unsigned int order, int migratetype, int percpu_refill)
{
	ppr_cancel(page_to_pfn(page), 1UL << order);
}

/* In 6.1 it is called for a page that stays on the lists; there it is not used. */
static void __maybe_unused on_extfrag(void *data, struct page *page, int order, int fallback_order, int migratetype,
				      int fallback_migratetype)
{
	ppr_cancel(page_to_pfn(page), 1UL << order);
}

/*
 * A page that compaction captures on its way into the buddy allocator takes with it the free pages
 * that it was merged with, and these are marked. Until here nothing has been written to it but
 * zeros. Only orders above 0 are captured; with `check`, single pages are looked at too, to prove
 * that nothing else leaves unseen.
 */
static void on_alloc(void *data, struct page *page, unsigned int order, gfp_t gfp, int migratetype)
{
	unsigned long pfn;

	if (!page || (!order && !ppr_check))
		return;
	pfn = page_to_pfn(page);
	if (likely(!ppr_touched(pfn, 1UL << order)))
		return;
	ppr_count(late, order ? 1UL << order : 0);
	ppr_count(missed, order ? 0 : 1);
	ppr_cancel(pfn, 1UL << order);
}

/* Called by those who take a certain block off the lists, with the zone's lock held, before it
 * goes. */
static void on_isolate(unsigned long ip, unsigned long parent_ip, struct ftrace_ops *ops, struct ftrace_regs *fregs)
{
	struct pt_regs *regs = ftrace_get_regs(fregs);
	struct page *page;
	unsigned int order;

	/* Without the arguments a page would be lost. FTRACE_OPS_FL_SAVE_REGS promises them. */
	BUG_ON(!regs);
	page = (struct page *)regs->di;
	order = (unsigned int)regs->si;
	ppr_count(isolated, 1UL << order);
	ppr_cancel(page_to_pfn(page), 1UL << order);
}

static struct ftrace_ops isolate_ops = {
	.func = on_isolate,
	/* PERMANENT: the sysctl kernel.ftrace_enabled cannot switch it off. RECURSION: it calls nothing
	 * that is traced, so none is skipped. */
	.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_PERMANENT | FTRACE_OPS_FL_RECURSION,
};

/* ---- entering ------------------------------------------------------------ */

static void on_drain(void *data, struct page *page, unsigned int order, int migratetype)
{
	ppr_mark(page_to_pfn(page), 1UL << order);
}

/* Blocks that were freed past the per-CPU lists, to be marked once they are seen on the
 * free lists. */
struct ring {
	raw_spinlock_t lock;
	unsigned int count;
	unsigned long blocks[256];	/* frame number, and order in the low bits (blocks are aligned to their size) */
};
static DEFINE_PER_CPU(struct ring, rings);
static atomic_t overflowed = ATOMIC_INIT(0);

static bool bypasses_pcp(unsigned int order)
{
	if (order <= PAGE_ALLOC_COSTLY_ORDER)
		return false;
#ifdef CONFIG_TRANSPARENT_HUGEPAGE
	if (order == pageblock_order)
		return false;
#endif
	return true;
}

/*
 * Called early in a free, which may yet lead elsewhere than to the free lists (compaction keeps
 * what it has no use for, in 6.12). So nothing is marked here.
 */
static void on_free(void *data, struct page *page, unsigned int order)
{
	unsigned long pfn, flags;
	struct ring *ring;

	if (likely(!order))
		return;
	pfn = page_to_pfn(page);
	/* Captured by compaction, and then not handed out (a memory cgroup said no): a per-CPU list must
	 * not get a marked page. */
	if (unlikely(ppr_touched(pfn, 1UL << order))) {
		ppr_count(late_frees, 1UL << order);
		ppr_cancel(pfn, 1UL << order);
	}
	if (!bypasses_pcp(order) || !READ_ONCE(ppr_marking))
		return;
	ppr_count(deferred, 1);
	local_irq_save(flags);
	ring = this_cpu_ptr(&rings);
	raw_spin_lock(&ring->lock);
	if (ring->count < ARRAY_SIZE(ring->blocks)) {
		ring->blocks[ring->count++] = pfn | order;
	} else {
		ppr_count(overflows, 1);
		atomic_set(&overflowed, 1);
	}
	raw_spin_unlock(&ring->lock);
	local_irq_restore(flags);
}

/* The free block that a frame lies in. The zone's lock is held. */
static bool free_block(unsigned long pfn, unsigned long *head_pfn, unsigned int *head_order)
{
	unsigned int order;

	for (order = 0; order < PPR_ORDERS; order++) {
		unsigned long at = pfn & ~((1UL << order) - 1);
		struct page *head = pfn_to_page(at);

		if (PageBuddy(head) && page_private(head) >= order) {
			*head_pfn = at;
			*head_order = page_private(head);
			return true;
		}
	}
	return false;
}

static void mark_if_free(unsigned long block)
{
	unsigned int order = block % 16, head_order;
	unsigned long pfn = block - order, end = pfn + (1UL << order), head, flags;
	struct page *page = pfn_to_online_page(pfn);
	struct zone *zone;

	if (!page)
		return;
	zone = page_zone(page);
	spin_lock_irqsave(&zone->lock, flags);
	while (pfn < end) {
		if (!free_block(pfn, &head, &head_order)) {
			pfn++;
			continue;
		}
		head += 1UL << head_order;
		ppr_mark(pfn, min(head, end) - pfn);
		pfn = head;
	}
	spin_unlock_irqrestore(&zone->lock, flags);
}

/* Marks what was freed past the per-CPU lists. When it returns, nobody looks at what was freed
 * before. */
void ppr_mark_deferred(void)
{
	static DEFINE_MUTEX(lock);
	static unsigned long blocks[ARRAY_SIZE(((struct ring *)0)->blocks)];
	unsigned int cpu, count, i;

	mutex_lock(&lock);
	for_each_possible_cpu(cpu) {
		struct ring *ring = per_cpu_ptr(&rings, cpu);
		unsigned long flags;

		if (!READ_ONCE(ring->count))
			continue;
		raw_spin_lock_irqsave(&ring->lock, flags);
		count = ring->count;
		memcpy(blocks, ring->blocks, count * sizeof(blocks[0]));
		ring->count = 0;
		raw_spin_unlock_irqrestore(&ring->lock, flags);
		for (i = 0; i < count; i++)
			mark_if_free(blocks[i]);
	}
	if (atomic_xchg(&overflowed, 0))
		ppr_mark_free_lists(PAGE_ALLOC_COSTLY_ORDER + 1);
	mutex_unlock(&lock);
}

/* Marks all blocks of at least this order that are on the free lists. Holds a zone's lock for one
 * list at a time. */
void ppr_mark_free_lists(unsigned int lowest)
{
	int nid, zid, migratetype;
	unsigned int order;

	for_each_online_node(nid) {
		for (zid = 0; zid < MAX_NR_ZONES; zid++) {
			struct zone *zone = &NODE_DATA(nid)->node_zones[zid];

			if (!populated_zone(zone))
				continue;
			for (order = lowest; order < PPR_ORDERS; order++) {
				for (migratetype = 0; migratetype < MIGRATE_TYPES; migratetype++) {
					struct page *page;
					unsigned long flags;

					spin_lock_irqsave(&zone->lock, flags);
					list_for_each_entry(page, &zone->free_area[order].free_list[migratetype], buddy_list)
						ppr_mark(page_to_pfn(page), 1UL << order);
					spin_unlock_irqrestore(&zone->lock, flags);
				}
			}
		}
	}
}

/* Where this guest's memory ends, in frames. */
unsigned long ppr_last_frame(void)
{
	unsigned long last = 0;
	int nid, zid;

	for_each_online_node(nid)
		for (zid = 0; zid < MAX_NR_ZONES; zid++) {
			struct zone *zone = &NODE_DATA(nid)->node_zones[zid];

			if (populated_zone(zone))
				last = max(last, zone_end_pfn(zone));
		}
	return last;
}

/* ---- registration ------------------------------------------------------------ */

struct hook {
	const char *name;
	void *probe;
	struct tracepoint *tp;
	bool registered;
};

static struct hook cancel_hooks[] = {
	{ "mm_page_alloc_zone_locked", on_zone_locked },
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	{ "mm_page_alloc_extfrag", on_extfrag },
#endif
	{ "mm_page_alloc", on_alloc },
	/* This one cancels too, so it stays as long as they do. */
	{ "mm_page_free", on_free },
};

static struct hook mark_hooks[] = {
	{ "mm_page_pcpu_drain", on_drain },
};

struct hooks {
	struct hook *hooks;
	unsigned int count;
};

static void find_tracepoint(struct tracepoint *tp, void *data)
{
	struct hooks *wanted = data;
	unsigned int i;

	for (i = 0; i < wanted->count; i++)
		if (!strcmp(tp->name, wanted->hooks[i].name))
			wanted->hooks[i].tp = tp;
}

static void unregister_hooks(struct hook *hooks, unsigned int count)
{
	while (count--) {
		if (!hooks[count].registered)
			continue;
		tracepoint_probe_unregister(hooks[count].tp, hooks[count].probe, NULL);
		hooks[count].registered = false;
	}
	tracepoint_synchronize_unregister();
}

static int register_hooks(struct hook *hooks, unsigned int count)
{
	struct hooks wanted = { hooks, count };
	unsigned int i;
	int ret = 0;

	for_each_kernel_tracepoint(find_tracepoint, &wanted);
	for (i = 0; i < count && !ret; i++) {
		ret = hooks[i].tp ? tracepoint_probe_register(hooks[i].tp, hooks[i].probe, NULL) : -ENOENT;
		hooks[i].registered = !ret;
		if (ret)
			pr_err("ppr: cannot watch the tracepoint %s (%d): without it a page in use could be taken for free\n",
			       hooks[i].name, ret);
	}
	if (ret)
		unregister_hooks(hooks, count);
	return ret;
}

/* Which function is traced: said once. Freed and said again, the kernel would free it twice. */
int ppr_hooks_init(void)
{
	int ret = ftrace_set_filter(&isolate_ops, "__isolate_free_page", strlen("__isolate_free_page"), 1);

	if (ret) {
		pr_err("ppr: cannot trace __isolate_free_page (%d): without it compaction could use pages that are marked\n", ret);
		ftrace_free_filter(&isolate_ops);
	}
	return ret;
}

void ppr_hooks_exit(void)
{
	ftrace_free_filter(&isolate_ops);
}

int ppr_hooks_cancel_start(void)
{
	unsigned int cpu;
	int ret;

	for_each_possible_cpu(cpu) {
		raw_spin_lock_init(&per_cpu_ptr(&rings, cpu)->lock);
		/* What was freed before is on the free lists, which are walked. */
		per_cpu_ptr(&rings, cpu)->count = 0;
	}
	ret = register_ftrace_function(&isolate_ops);
	if (ret) {
		pr_err("ppr: cannot trace __isolate_free_page (%d): without it compaction could use pages that are marked%s\n", ret,
		       ret == -EBUSY ? " (is kernel.ftrace_enabled 0?)" : "");
		return ret;
	}
	ret = register_hooks(cancel_hooks, ARRAY_SIZE(cancel_hooks));
	if (ret) {
		unregister_ftrace_function(&isolate_ops);
		return ret;
	}
	/* Who passed a tracepoint before it was patched has let go of the zone's lock after this. Only now
	 * may anything be marked. */
	tracepoint_synchronize_unregister();
	return 0;
}

void ppr_hooks_cancel_stop(void)
{
	unregister_hooks(cancel_hooks, ARRAY_SIZE(cancel_hooks));
	unregister_ftrace_function(&isolate_ops);
}

int ppr_hooks_mark_start(void)
{
	return register_hooks(mark_hooks, ARRAY_SIZE(mark_hooks));
}

void ppr_hooks_mark_stop(void)
{
	unregister_hooks(mark_hooks, ARRAY_SIZE(mark_hooks));
}
