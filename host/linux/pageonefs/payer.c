// SPDX-License-Identifier: GPL-2.0
/*
 * Memory cgroups that pay: payer.h. Nothing here knows what a frame is.
 */
#include <linux/cgroup.h>
#include <linux/log2.h>
#include <linux/pid.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "payer.h"

/* ---- who pays for a file ---------------------------------------------------------------- */

/*
 * A page pays for what is made for its file, whoever makes it: its memory cgroup is returned, which
 * stays while the page is locked.
 */
struct mem_cgroup *pofs_payer_set(struct mem_cgroup **payer, struct page *page)
{
	struct mem_cgroup *memcg = folio_memcg(page_folio(page));

	if (READ_ONCE(*payer) != memcg && memcg) {
		css_get(&memcg->css);
		mem_cgroup_put(xchg(payer, memcg));
	}
	return memcg;
}

/* With a reference. In the place of a cgroup that was removed: what it was in. */
struct mem_cgroup *pofs_payer_get(struct mem_cgroup **payer)
{
	struct mem_cgroup *memcg;

	rcu_read_lock();
	memcg = READ_ONCE(*payer);
	while (memcg && !css_tryget_online(&memcg->css))
		memcg = parent_mem_cgroup(memcg);
	rcu_read_unlock();
	return memcg;
}

/* The cgroup of a process, with a reference. */
int pofs_payer_of(pid_t pid, struct mem_cgroup **payer)
{
	struct mem_cgroup *memcg;
	struct task_struct *task;

	rcu_read_lock();
	task = pid_task(find_vpid(pid), PIDTYPE_TGID);
	if (task) {
		memcg = mem_cgroup_from_task(task);
		*payer = pofs_payer_get(&memcg);
	}
	rcu_read_unlock();
	return task ? 0 : -ESRCH;
}

void pofs_payer_clear(struct mem_cgroup **payer)
{
	mem_cgroup_put(xchg(payer, NULL));
}

/* ---- room --------------------------------------------------------------------------------- */

/* Room is looked for, and nobody is killed. */
#define ROOM_GFP (GFP_HIGHUSER | __GFP_ACCOUNT | __GFP_NORETRY | __GFP_NOWARN)

/*
 * Whether the payer, and the machine, have room for a page and a node of the file's table. tmpfs's
 * own charge would have one of its tasks killed: it comes with PF_MEMALLOC, and so waits for no
 * room. What is freed here is there for it, on this processor.
 */
bool pofs_payer_has_room(void)
{
	struct page *page = alloc_page(ROOM_GFP), *node = alloc_page(ROOM_GFP);

	if (page)
		__free_page(page);
	if (node)
		__free_page(node);
	return page && node;
}

/* Its limit, in pages. */
unsigned long pofs_payer_most(struct mem_cgroup *payer)
{
	return min(READ_ONCE(payer->memory.max), READ_ONCE(payer->memory.high));
}

/* Below one cgroup others are counted up to here, so that a look ends soon. */
#define CACHE_GROUPS	64

/* Pages of files' caches in a zone, in either kind of lists that the kernel has for them. */
static unsigned long cached_in(struct lruvec *lruvec, int zone)
{
	unsigned long pages = mem_cgroup_get_zone_lru_size(lruvec, LRU_INACTIVE_FILE, zone) +
			      mem_cgroup_get_zone_lru_size(lruvec, LRU_ACTIVE_FILE, zone);
#ifdef CONFIG_LRU_GEN
	int generation;

	for (generation = 0; generation < MAX_NR_GENS; generation++)
		pages += max(READ_ONCE(lruvec->lrugen.nr_pages[generation][LRU_GEN_FILE][zone]), 0L);
#endif
	return pages;
}

/* What the kernel takes when there is no other room; or fewer. Under RCU. */
static unsigned long cached(struct mem_cgroup *payer)
{
	struct cgroup_subsys_state *css;
	unsigned long pages = 0;
	int nid, zone, groups = 0;

	css_for_each_descendant_pre(css, &payer->css) {
		if (groups++ == CACHE_GROUPS)
			break;
		for_each_node_state(nid, N_MEMORY) {
			struct lruvec *lruvec = mem_cgroup_lruvec(mem_cgroup_from_css(css), NODE_DATA(nid));

			for (zone = 0; zone < MAX_NR_ZONES; zone++)
				pages += cached_in(lruvec, zone);
		}
	}
	return pages;
}

/*
 * Which of `payer` and those above it has no eighth of its limit free, or no MiB; NULL: none. Those
 * above `pays`, who pays until now, count it already. With `cache`, files' caches are free. Under
 * RCU.
 */
struct mem_cgroup *pofs_payer_full(struct mem_cgroup *payer, struct mem_cgroup *pays, bool cache)
{
	for (; pofs_payer_new(payer, pays); payer = parent_mem_cgroup(payer)) {
		unsigned long most = pofs_payer_most(payer), used = page_counter_read(&payer->memory);
		unsigned long free = max(most / 8, SZ_1M / PAGE_SIZE);

		if (used + free >= most && (!cache || used + free >= most + cached(payer)))
			return payer;
	}
	return NULL;
}

/*
 * Whether the payer, or one above it that does not count `other` already, is above `high`. Then the
 * kernel is asked to take something, as it asks itself for who charges others. That comes soon, and
 * nobody waits for it. It may write and swap for it.
 */
static bool above_high(struct mem_cgroup *payer, struct page *other)
{
	struct mem_cgroup *pays;
	bool above = false;

	rcu_read_lock();
	pays = pofs_no_common_high ? NULL : folio_memcg(page_folio(other));
	for (; pofs_payer_new(payer, pays); payer = parent_mem_cgroup(payer)) {
		if (page_counter_read(&payer->memory) > READ_ONCE(payer->memory.high)) {
			schedule_work(&payer->high_work);
			above = true;
		}
	}
	rcu_read_unlock();
	return above;
}

/* Of files' caches only clean pages go for a frame. */
#define CACHE_GFP	(GFP_NOIO | __GFP_ACCOUNT | __GFP_NORETRY | __GFP_NOWARN)

/* Whether a MiB is free without taking anything. */
static bool has_mib(struct mem_cgroup *payer, struct page *other)
{
	struct mem_cgroup *pays;
	bool has = true;

	rcu_read_lock();
	pays = folio_memcg(page_folio(other));
	for (; has && pofs_payer_new(payer, pays); payer = parent_mem_cgroup(payer))
		has = page_counter_read(&payer->memory) + SZ_1M / PAGE_SIZE <= READ_ONCE(payer->memory.max);
	rcu_read_unlock();
	return has || pofs_no_real_room;
}

/*
 * Caches that count as room cannot always be taken: pipes hold them, or they wait for a disk. So
 * what the payer's own tasks need next is made free before: a MiB. A charge of twice that at once
 * has the kernel take it, and is given back. It succeeds as a whole or holds nothing, so nobody
 * lacks room meanwhile. -EAGAIN: the machine has no such piece of memory; -ENOMEM: too little came.
 */
static int make_room(struct mem_cgroup *payer, struct page *other)
{
	unsigned int order = get_order(SZ_2M);
	struct page *page;

	if (has_mib(payer, other))
		return 0;
	page = alloc_pages(__GFP_NOWARN, order);
	if (!page)
		return -EAGAIN;
	__free_pages(page, order);
	page = alloc_pages(CACHE_GFP, order);
	if (page)
		__free_pages(page, order);
	return page || has_mib(payer, other) ? 0 : -ENOMEM;
}

/*
 * A page that `payer` is charged for, in the place of another one. No memory but clean pages of
 * files' caches is taken for it at once, where these are all that is in the way; above `high` the
 * kernel takes what it likes later. -EAGAIN: not now; -ENOMEM: caches cannot be taken, or there is
 * no memory.
 */
struct page *pofs_payer_charge(struct mem_cgroup *payer, struct page *other)
{
	gfp_t gfp = GFP_NOWAIT | __GFP_ACCOUNT | __GFP_NOWARN;
	struct mem_cgroup *active, *pays;
	struct page *page = NULL;
	bool crowded, full;
	int error = 0;

	rcu_read_lock();
	pays = folio_memcg(page_folio(other));
	crowded = pofs_payer_full(payer, pays, false);
	full = crowded && (pofs_no_cache_room || pofs_payer_full(payer, pays, true));
	rcu_read_unlock();
	if ((full || (crowded && above_high(payer, other))) && !pofs_no_reserve)
		return ERR_PTR(-EAGAIN);
	active = set_active_memcg(payer);
	if (crowded && !pofs_no_reserve) {
		gfp = CACHE_GFP;
		error = make_room(payer, other);
	}
	if (!error)
		page = alloc_page(pofs_no_reserve ? ROOM_GFP : gfp);
	set_active_memcg(active);
	if (crowded)
		above_high(payer, other);
	return page ?: ERR_PTR(error ?: -ENOMEM);
}

/* ---- who keeps what others pay for -------------------------------------------------------- */

/* It is made where it was not. It has room for one less than a power of two. False: no memory. */
bool pofs_keepers_add(struct pofs_keepers **keepers, struct mem_cgroup **file)
{
	struct pofs_keepers *k = *keepers;
	unsigned int n = k ? k->n : 0;

	if (is_power_of_2(n + 1)) {
		k = krealloc(k, struct_size(k, files, 2 * n + 1), POFS_MERGE_GFP);
		if (!k)
			return false;
		if (!*keepers)
			k->full = 0;
		WRITE_ONCE(*keepers, k);
	}
	k->files[n] = file;
	k->n = n + 1;
	return true;
}

/* At most so many of the file's. Returns how many. */
unsigned int pofs_keepers_remove(struct pofs_keepers *k, struct mem_cgroup **file, unsigned int most)
{
	unsigned int i, removed = 0;

	for (i = k ? k->n : 0; i-- && removed < most; ) {
		if (k->files[i] == file) {
			k->files[i] = k->files[--k->n];
			removed++;
		}
	}
	return removed;
}
