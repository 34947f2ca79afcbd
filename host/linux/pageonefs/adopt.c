// SPDX-License-Identifier: GPL-2.0
/*
 * Who pays for a frame. It is charged to one cgroup, and counts the entries of that. Others'
 * entries are marked, and listed: by which file each is of. When the last of the first goes, the
 * frame gets a mark in its domain's table, LEFT. Harvests look at frames with that mark alone,
 * ask the files on the list, and move the charge to one whose payer has room. So what this takes
 * follows how many frames were left, and not how many there are, nor how long files are.
 *
 * If nobody has room the charge stays, and the frame waits. That is a debt of the first cgroup
 * that was asked and has none: that one uses no more frames of others while it owes much. Who is
 * above `high` owes nothing: the kernel takes what is too much.
 */
#include <linux/cgroup.h>
#include <linux/memcontrol.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "adopt.h"
#include "mapping.h"

/* In the domain's table, of frames that are used and that nobody pays for who uses them. */
#define LEFT		XA_MARK_0	/* they are looked at next */
#define WAITING		XA_MARK_1	/* nobody had room for them */
/* In the table of debts: caches of the cgroup could not be taken, and rest for a second. */
#define STUCK		XA_MARK_0

/* A frame that is charged to the root, or while nothing is counted, has no cgroup. Under RCU. */
static bool charged_to(struct page *frame, struct mem_cgroup *memcg)
{
	struct mem_cgroup *is = folio_memcg(page_folio(frame));

	return is ? is == memcg : !memcg || !parent_mem_cgroup(memcg);
}

/*
 * Whether `user` may use a frame that others pay for: not if that would be a debt at once, nor
 * while it, or one above it, owes a 64th of its limit. Under RCU.
 */
static bool may_keep(struct pofs_domain *domain, struct page *frame, struct mem_cgroup *user)
{
	struct mem_cgroup *pays = folio_memcg(page_folio(frame));

	if (pofs_no_debt_bound)
		return true;
	if (!atomic_long_read(pofs_payers(frame)) && pofs_payer_full(user, pays, true))
		return false;
	if (xa_empty(&domain->debts))
		return true;
	for (; pofs_payer_new(user, pays); user = parent_mem_cgroup(user)) {
		void *debt = xa_load(&domain->debts, mem_cgroup_id(user));

		if (debt && (xa_to_value(debt) > pofs_payer_most(user) / 64 || pofs_no_small_debt))
			return false;
	}
	return true;
}

/* The last who paid for the frame has left it. Others may keep it. */
static void unpaid(struct pofs_domain *domain, struct page *frame)
{
	/* After it left: it is seen here who comes to keep it, or there that nobody pays. */
	if (!READ_ONCE(*pofs_keepers_of(frame)))
		return;
	xa_lock(&domain->frames);
	if ((*pofs_keepers_of(frame))->n && !atomic_long_read(pofs_payers(frame)))
		__xa_set_mark(&domain->frames, pofs_frame_handle(frame), LEFT);
	xa_unlock(&domain->frames);
}

/*
 * A new user is of the cgroup `user`, and an entry of the file that has its payer at `file`. 0:
 * that cgroup pays for the frame; 1: others do, and the entry is to be marked; -EBUSY: it may not
 * be a user; -ENOMEM. It goes by pofs_frame_leave(), and after an error by pofs_frame_put().
 * Nobody asks who pays for a page of a store. Under RCU.
 */
int pofs_frame_join(struct pofs_domain *domain, struct page *frame, struct mem_cgroup *user, struct mem_cgroup **file)
{
	struct mem_cgroup *active;
	bool added;

	if (!(READ_ONCE(frame->private) & POFS_OWN))
		return 0;
	if (atomic_long_inc_not_zero(pofs_payers(frame))) {
		/* Nobody adopts it now. */
		if (charged_to(frame, user))
			return 0;
		if (atomic_long_dec_and_test(pofs_payers(frame)))
			unpaid(domain, frame);
	}
	if (!may_keep(domain, frame, user))
		return -EBUSY;
	active = set_active_memcg(user);
	xa_lock(&domain->frames);
	added = pofs_keepers_add(pofs_keepers_of(frame), file);
	/* Pairs with unpaid(). */
	smp_mb();
	if (added && !atomic_long_read(pofs_payers(frame)))
		__xa_set_mark(&domain->frames, pofs_frame_handle(frame), LEFT);
	xa_unlock(&domain->frames);
	set_active_memcg(active);
	return added ? 1 : -ENOMEM;
}

/* A debt ends when nobody of the cgroup keeps the frame: its number may be another's then. */
static unsigned short settled(struct pofs_keepers *k)
{
	struct mem_cgroup *payer, *owes;
	unsigned short full = k->full;
	unsigned int i;

	for (i = 0; full && i < k->n; i++) {
		payer = owes = pofs_payer_get(k->files[i]);
		while (owes && mem_cgroup_id(owes) != full)
			owes = parent_mem_cgroup(owes);
		mem_cgroup_put(payer);
		if (owes)
			return 0;
	}
	if (pofs_no_settled)
		return 0;
	k->full = 0;
	return full;
}

/* pofs_frame_put(), of a user; `alien`: others than that paid when it came. */
void pofs_frame_leave(struct pofs_domain *domain, struct page *frame, bool alien, struct mem_cgroup **file)
{
	bool own = READ_ONCE(frame->private) & POFS_OWN, kept = false;
	unsigned short owed = 0;

	if (own && alien) {
		xa_lock(&domain->frames);
		kept = pofs_keepers_remove(*pofs_keepers_of(frame), file, 1);
		if (kept)
			owed = settled(*pofs_keepers_of(frame));
		xa_unlock(&domain->frames);
		pofs_owe(domain, owed, -1);
	}
	/* Or its file has come to pay. */
	if (own && !kept && atomic_long_dec_and_test(pofs_payers(frame)))
		unpaid(domain, frame);
	pofs_frame_put(domain, frame);
}

/*
 * `payer` is charged for the frame. No exported function moves a charge: a page that `payer` is
 * charged for swaps that with the frame, and goes. Both are single pages of the kernel's
 * accounting. Returns as pofs_payer_charge() does.
 */
static int move_charge(struct page *frame, struct mem_cgroup *payer)
{
	struct page *page = pofs_payer_charge(payer, frame);
	unsigned long flags;
	int mapped, ret = -EAGAIN;

	if (IS_ERR(page))
		return PTR_ERR(page);
	/*
	 * With version 1 charges move with their tasks, and 6.1 then unlocks the cgroup of a page that
	 * it maps, which has to be the one that it locked. The controller comes there by a change of
	 * code that waits for this processor's interrupts.
	 */
	local_irq_save(flags);
	if (cgroup_subsys_on_dfl(memory_cgrp_subsys) || pofs_no_version_check) {
		mapped = atomic_read(&frame->_mapcount) >= 0;
		pofs_frame_count(frame, -1);
		lruvec_stat_mod_folio(page_folio(frame), NR_FILE_MAPPED, -mapped);
		swap(page->memcg_data, frame->memcg_data);
		pofs_frame_count(frame, 1);
		lruvec_stat_mod_folio(page_folio(frame), NR_FILE_MAPPED, mapped);
		ret = 0;
	}
	local_irq_restore(flags);
	__free_page(page);
	return ret;
}

/* So many of those who keep a frame are asked in a look. */
#define ASKED	16

/*
 * A file that keeps the frame and whose payer, which is returned with a reference, has room for
 * it; or which cgroup has none. Under the lock of the domain's frames, and RCU.
 */
static struct mem_cgroup *who_has_room(struct pofs_domain *domain, struct page *frame, struct mem_cgroup ***file,
				       unsigned short *full)
{
	struct pofs_keepers *k = *pofs_keepers_of(frame);
	struct mem_cgroup *pays = folio_memcg(page_folio(frame)), *payer, *has_none;
	unsigned int i, first = jiffies % k->n;

	for (i = 0; i < min_t(unsigned int, k->n, ASKED); i++) {
		*file = k->files[(first + i) % k->n];
		payer = pofs_payer_get(*file);
		has_none = payer ? pofs_payer_full(payer, pays, false) : NULL;
		if (has_none && !pofs_no_cache_room && !xa_get_mark(&domain->debts, mem_cgroup_id(has_none), STUCK))
			has_none = pofs_payer_full(payer, pays, true);
		if (payer && (!has_none || pofs_no_reserve)) {
			*full = 0;
			return payer;
		}
		if (has_none && !*full)
			*full = mem_cgroup_id(has_none);
		mem_cgroup_put(payer);
	}
	return NULL;
}

/* Its caches were room for the frame, and could not be taken. */
static unsigned short who_is_crowded(struct page *frame, struct mem_cgroup *payer)
{
	unsigned short number;

	rcu_read_lock();
	payer = pofs_payer_full(payer, folio_memcg(page_folio(frame)), false);
	number = payer ? mem_cgroup_id(payer) : 0;
	rcu_read_unlock();
	return number;
}

/*
 * Somebody who keeps the frame pays for it from now on, if nobody does and there is room. Returns 1
 * then, and otherwise 0; -EAGAIN: there is room soon.
 */
static int adopt_one(struct pofs_domain *domain, u64 handle)
{
	struct page *frame = pofs_page_load(&domain->frames, handle);
	struct mem_cgroup *payer = NULL, **file;
	unsigned short full = 0, was = 0;
	struct pofs_keepers *k;
	unsigned int n = 0;
	int error = 0;
	bool charged;

	if (!frame)
		return 0;
	/* With a user more its figures stay while they move. */
	if (!(READ_ONCE(frame->private) & POFS_OWN) || !(pofs_frame_use(frame, POFS_USERS) & POFS_USERS)) {
		put_page(frame);
		return 0;
	}
	rcu_read_lock();
	xa_lock(&domain->frames);
	__xa_clear_mark(&domain->frames, handle, LEFT);
	__xa_clear_mark(&domain->frames, handle, WAITING);
	k = *pofs_keepers_of(frame);
	if (k && k->n && !atomic_long_read(pofs_payers(frame)))
		payer = who_has_room(domain, frame, &file, &full);
	xa_unlock(&domain->frames);
	charged = payer && charged_to(frame, payer);
	rcu_read_unlock();
	if (payer && !charged) {
		error = move_charge(frame, payer);
		charged = !error;
		if ((error == -ENOMEM || (error && pofs_no_high_wait)) && !pofs_no_stuck_debt)
			full = who_is_crowded(frame, payer);
	}
	mem_cgroup_put(payer);
	xa_lock(&domain->frames);
	k = *pofs_keepers_of(frame);
	/* All entries of its file pay. They may have gone meanwhile. */
	if (charged)
		n = pofs_keepers_remove(k, file, UINT_MAX);
	if (n)
		atomic_long_set_release(pofs_payers(frame), n);
	if (k) {
		if (k->n && !atomic_long_read(pofs_payers(frame)))
			__xa_set_mark(&domain->frames, handle, charged ? LEFT : WAITING);
		was = k->full;
		k->full = full;
	}
	xa_unlock(&domain->frames);
	if (was != full) {
		pofs_owe(domain, was, -1);
		pofs_owe(domain, full, 1);
	}
	if (error == -ENOMEM && full && !pofs_no_one_try)
		xa_set_mark(&domain->debts, full, STUCK);
	pofs_frame_put(domain, frame);
	return n ? 1 : error == -EAGAIN ? error : 0;
}

/*
 * Frames with the mark, from *handle on, until `end`. Returns for how many jiffies they rest then:
 * none if many came to be paid for, and few if there is room soon.
 */
static unsigned long adopt_marked(struct pofs_domain *domain, xa_mark_t mark, unsigned long *handle, unsigned long end)
{
	int looks = 0, taken = 0, soon = 0;

	for (; time_before_eq(jiffies, end); looks++) {
		int ret;

		if (!xa_find(&domain->frames, handle, ULONG_MAX, pofs_no_left_list ? XA_PRESENT : mark)) {
			*handle = 0;
			break;
		}
		if (pofs_no_left_list && looks == 1024)
			break;
		ret = adopt_one(domain, (*handle)++);
		taken += ret > 0;
		soon += ret < 0;
		cond_resched();
	}
	if (looks <= 16 * taken)
		return 0;
	return soon ? HZ / 10 : HZ;
}

/* Each second what could not be taken is tried again. */
static void try_again(struct pofs_domain *domain)
{
	unsigned long number = 0;

	if (time_before(jiffies, domain->try_after))
		return;
	domain->try_after = jiffies + HZ;
	for (; xa_find(&domain->debts, &number, ULONG_MAX, STUCK); number++)
		xa_clear_mark(&domain->debts, number, STUCK);
}

/*
 * Where all who paid for a frame have left it, one of those who keep it pays. Each harvest looks
 * for some milliseconds at frames that were left, whoever uses them. Those for which nobody had
 * room wait; where little comes of a look at them, the next is a second later. With version 1
 * charges stay, and nobody owes.
 */
void pofs_adopt(struct pofs_domain *domain)
{
	unsigned long end = jiffies + msecs_to_jiffies(10), handle = 0, rests;

	if ((!xa_marked(&domain->frames, LEFT) && !xa_marked(&domain->frames, WAITING)) || pofs_no_adopt)
		return;
	if (!cgroup_subsys_on_dfl(memory_cgrp_subsys) && !pofs_no_version_check)
		return;
	if (!mutex_trylock(&domain->adopting))
		return;
	try_again(domain);
	adopt_marked(domain, LEFT, &handle, end);
	if (time_after_eq(jiffies, domain->adopt_after) || pofs_no_rest) {
		rests = adopt_marked(domain, WAITING, &domain->adopt_at, end);
		if (rests)
			domain->adopt_after = jiffies + rests;
	}
	mutex_unlock(&domain->adopting);
}
