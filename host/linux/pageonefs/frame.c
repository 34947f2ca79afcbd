// SPDX-License-Identifier: GPL-2.0
/*
 * Frames and domains.
 *
 * A frame is a page that is never written. Its `private` has its handle, and counts the entries
 * that use it; the reference count counts entries, page tables and readers. Its domain's table
 * finds it by its handle while it has entries; the last one takes it out.
 *
 * Most are the module's own pages, without a mapping and off the LRU. They lie on the node of the
 * page that they were made for, and are charged to that page's memory cgroup: its user, not the one
 * who merges. The kernel has the charge go to the parent when the cgroup goes. They are counted as
 * tmpfs's pages are. `lru.prev` counts the entries of the cgroup that pays; who uses a frame that
 * has none of these comes to pay (pofs_adopt). Others are pages of a store's files (lend.c).
 */
#include <linux/highmem.h>
#include <linux/cgroup.h>
#include <linux/memcontrol.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/pid.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "frame.h"
#include "mapping.h"

/* As KSM has it. A reference count is an int, and who maps a file takes one for each entry. */
static unsigned int max_users = 256;
module_param(max_users, uint, 0600);
MODULE_PARM_DESC(max_users, "how many pages of files may use one frame");

int pofs_frame_most(void)
{
	return pofs_no_user_bound ? POFS_USERS - 1 : clamp_t(unsigned int, READ_ONCE(max_users), 1, POFS_USERS - 1);
}

static DEFINE_MUTEX(domains_lock);
static LIST_HEAD(domains);

/* ---- domains ----------------------------------------------------------------------- */

/* The domain of this name; one of its own if it has none. NULL: no memory. */
struct pofs_domain *pofs_domain_get(const char *name)
{
	struct pofs_domain *domain;

	mutex_lock(&domains_lock);
	list_for_each_entry(domain, &domains, list) {
		if (name[0] && !strcmp(domain->name, name)) {
			kref_get(&domain->kref);
			goto out;
		}
	}
	domain = kzalloc(sizeof(*domain), GFP_KERNEL);
	if (domain) {
		kref_init(&domain->kref);
		xa_init_flags(&domain->frames, XA_FLAGS_ACCOUNT);
		mutex_init(&domain->adopting);
		strscpy(domain->name, name, sizeof(domain->name));
		list_add(&domain->list, &domains);
	}
out:
	mutex_unlock(&domains_lock);
	return domain;
}

static void domain_release(struct kref *kref)
{
	struct pofs_domain *domain = container_of(kref, struct pofs_domain, kref);

	list_del(&domain->list);
	mutex_unlock(&domains_lock);
	WARN_ON(atomic64_read(&domain->count));
	xa_destroy(&domain->frames);
	kfree(domain);
}

void pofs_domain_put(struct pofs_domain *domain)
{
	kref_put_mutex(&domain->kref, domain_release, &domains_lock);
}

/* ---- frames ------------------------------------------------------------------------ */

static atomic_long_t *users(struct page *frame)
{
	return (atomic_long_t *)&frame->private;
}

/* Of the module's own pages. The first word of `lru` would say whether it is a part of another. */
static atomic_long_t *payers(struct page *frame)
{
	return (atomic_long_t *)&frame->lru.prev;
}

static void count_frame(struct page *frame, int n)
{
	if (!pofs_no_figures)
		pofs_page_count(frame, n);
}

/* A page that nobody writes any more becomes a frame with one user, which has the reference. */
int pofs_frame_begin(struct pofs_domain *domain, struct page *page)
{
	u64 handle = atomic64_inc_return(&domain->last_handle);
	bool zeros = !memchr_inv(page_address(page), 0, PAGE_SIZE);
	unsigned long own = page->mapping ? 0 : POFS_OWN;
	int ret;

	atomic_long_set(users(page), handle << POFS_HANDLE | (zeros ? POFS_ZEROS : 0) | own | 1);
	ret = xa_err(xa_store(&domain->frames, handle, page, POFS_MERGE_GFP));
	if (ret)
		set_page_private(page, 0);
	else
		atomic64_inc(&domain->count);
	return ret;
}

#define FRAME_GFP (POFS_MERGE_GFP | __GFP_HIGHMEM | __GFP_HARDWALL)

/*
 * A frame with the content of a page that nobody writes. It has one user, and the caller its
 * reference. `user`: the page of a file that it is for, which is locked.
 */
struct page *pofs_frame_new(struct pofs_domain *domain, struct page *content, struct page *user)
{
	struct mem_cgroup *payer = pofs_no_payer ? NULL : folio_memcg(page_folio(user));
	struct mem_cgroup *active = set_active_memcg(payer);
	struct page *frame = alloc_pages_node(page_to_nid(user), FRAME_GFP, 0);

	if (frame) {
		copy_highpage(frame, content);
		/* A pipe does not give away what is not. */
		SetPageUptodate(frame);
		atomic_long_set(payers(frame), 1);
		if (pofs_frame_begin(domain, frame)) {
			put_page(frame);
			frame = NULL;
		} else {
			count_frame(frame, 1);
		}
	}
	set_active_memcg(active);
	return frame;
}

/* One more user, without a reference, unless it has that many, or none. Returns what it had. */
static unsigned long use(struct page *frame, unsigned long most)
{
	long n = atomic_long_read(users(frame));

	while (n & POFS_USERS && (n & POFS_USERS) < most)
		if (atomic_long_try_cmpxchg(users(frame), &n, n + 1))
			break;
	return n;
}

/* One more user that pays as the caller does, who is one, with a reference. False: it is full. */
bool pofs_frame_again(struct page *frame)
{
	unsigned long most = pofs_frame_most(), n = use(frame, most);

	if ((n & POFS_USERS) >= most)
		return false;
	get_page(frame);
	if (n & POFS_OWN)
		atomic_long_inc(payers(frame));
	return true;
}

/*
 * The frame, or another of its content where it is full: the caller is a new user of it, and has a
 * reference. NULL: neither, and why. Under RCU; *xas is of the domain's table.
 */
struct page *pofs_frame_find(struct xa_state *xas, u64 handle, int *error)
{
	unsigned long most = pofs_frame_most();

	*error = -ENOENT;
	while (handle) {
		struct page *frame = pofs_load(xas, handle);
		unsigned long n;

		if (!frame)
			break;
		n = use(frame, most);
		if (n & POFS_USERS && (n & POFS_USERS) < most) {
			*error = 0;
			return frame;
		}
		if (n & POFS_USERS)
			*error = -EMLINK;
		/* Pairs with pofs_frame_another(). */
		smp_rmb();
		handle = n & POFS_USERS && n & POFS_ANOTHER ? READ_ONCE(frame->index) : 0;
		put_page(frame);
	}
	return NULL;
}

/*
 * A frame with the content of a full one, as pofs_frame_new(). Who looks for the full one finds it
 * from now on. -EMLINK: the full one is a page of a store's file, whose `index` is taken.
 */
struct page *pofs_frame_another(struct pofs_domain *domain, u64 handle, struct page *user, int *error)
{
	struct page *full = pofs_page_load(&domain->frames, handle), *frame = NULL;

	*error = -ENOENT;
	if (!full)
		return NULL;
	if (READ_ONCE(full->mapping)) {
		*error = -EMLINK;
	} else if (!PageHWPoison(full)) {
		frame = pofs_frame_new(domain, full, user);
		*error = frame ? 0 : -ENOMEM;
	}
	if (frame) {
		WRITE_ONCE(full->index, pofs_frame_handle(frame));
		/* Who sees the bit sees the handle. */
		smp_mb__before_atomic();
		atomic_long_or(POFS_ANOTHER, users(full));
	}
	put_page(full);
	return frame;
}

/* The opposite of all of them. Returns how many users are left. */
unsigned long pofs_frame_put(struct pofs_domain *domain, struct page *frame)
{
	unsigned long left = atomic_long_dec_return(users(frame));

	if (!(left & POFS_USERS)) {
		xa_erase(&domain->frames, left >> POFS_HANDLE);
		set_page_private(frame, 0);
		count_frame(frame, -1);
		atomic64_dec(&domain->count);
	}
	put_page(frame);
	return left & POFS_USERS;
}

/* ---- who pays -------------------------------------------------------------------------- */

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

/* A frame that is charged to the root, or while nothing is counted, has no cgroup. Under RCU. */
static bool charged_to(struct page *frame, struct mem_cgroup *memcg)
{
	struct mem_cgroup *is = folio_memcg(page_folio(frame));

	return is ? is == memcg : !memcg || !parent_mem_cgroup(memcg);
}

/*
 * A new user is of this cgroup: whether that pays for the frame, and goes by pofs_frame_leave().
 * Or its entry is marked, and pofs_frame_marked() called.
 * Nobody asks who pays for a page of a store. Under RCU.
 */
bool pofs_frame_join(struct pofs_domain *domain, struct page *frame, struct mem_cgroup *user)
{
	if (!(READ_ONCE(frame->private) & POFS_OWN))
		return true;
	if (!atomic_long_inc_not_zero(payers(frame)))
		return false;
	/* Nobody adopts it now. */
	if (charged_to(frame, user))
		return true;
	if (atomic_long_dec_and_test(payers(frame)))
		atomic64_inc(&domain->left);
	return false;
}

/* pofs_frame_put(), of a user; `alien`: others than that pay. */
void pofs_frame_leave(struct pofs_domain *domain, struct page *frame, bool alien)
{
	bool last = !alien && READ_ONCE(frame->private) & POFS_OWN && atomic_long_dec_and_test(payers(frame));

	if (pofs_frame_put(domain, frame) && last)
		atomic64_inc(&domain->left);
}

/*
 * An entry was marked: others pay for the frame. Unless they had left it before: then nobody who
 * looked since has seen the mark.
 */
void pofs_frame_marked(struct pofs_domain *domain, struct page *frame)
{
	/* Pairs with pofs_frame_leave(): its count, or the mark, is seen. */
	smp_mb();
	if (READ_ONCE(frame->private) & POFS_OWN && !atomic_long_read(payers(frame)))
		atomic64_inc(&domain->left);
}

/*
 * Whether the limits of `payer`, and of those above it, leave them an eighth, and a MiB. Those that
 * are above who pays for the frame now count it already. Under RCU.
 */
bool pofs_payer_roomy(struct mem_cgroup *payer, struct page *frame)
{
	struct mem_cgroup *pays = folio_memcg(page_folio(frame));

	for (; payer && !(pays && mem_cgroup_is_descendant(pays, payer)); payer = parent_mem_cgroup(payer)) {
		unsigned long most = min(READ_ONCE(payer->memory.max), READ_ONCE(payer->memory.high));

		if (page_counter_read(&payer->memory) + max(most / 8, SZ_1M / PAGE_SIZE) >= most)
			return false;
	}
	return true;
}

/*
 * `payer` is charged for the frame. No exported function moves a charge: a page that `payer` is
 * charged for swaps that with the frame, and goes. Both are single pages of the kernel's
 * accounting. Nothing is reclaimed for it: -ENOMEM, limits leave no room.
 */
static int move_charge(struct page *frame, struct mem_cgroup *payer)
{
	struct mem_cgroup *active;
	unsigned long flags;
	struct page *page;
	int mapped, ret = -EAGAIN;
	bool roomy;

	rcu_read_lock();
	roomy = pofs_payer_roomy(payer, frame);
	rcu_read_unlock();
	if (!roomy && !pofs_no_reserve)
		return -ENOMEM;
	active = set_active_memcg(payer);
	page = alloc_page(pofs_no_reserve ? ROOM_GFP : GFP_NOWAIT | __GFP_ACCOUNT | __GFP_NOWARN);
	set_active_memcg(active);
	if (!page)
		return -EAGAIN;
	/*
	 * With version 1 charges move with their tasks, and 6.1 then unlocks the cgroup of a page that
	 * it maps, which has to be the one that it locked. The controller comes there by a change of
	 * code that waits for this processor's interrupts.
	 */
	local_irq_save(flags);
	if (cgroup_subsys_on_dfl(memory_cgrp_subsys) || pofs_no_version_check) {
		mapped = atomic_read(&frame->_mapcount) >= 0;
		count_frame(frame, -1);
		lruvec_stat_mod_folio(page_folio(frame), NR_FILE_MAPPED, -mapped);
		swap(page->memcg_data, frame->memcg_data);
		count_frame(frame, 1);
		lruvec_stat_mod_folio(page_folio(frame), NR_FILE_MAPPED, mapped);
		ret = 0;
	}
	local_irq_restore(flags);
	__free_page(page);
	return ret;
}

/*
 * If nobody uses the frame who pays for it, `payer` does from now on, and the caller is a user that
 * pays: 0. -EEXIST: somebody does. Or as move_charge(). Under domain->adopting.
 */
int pofs_frame_adopt(struct pofs_domain *domain, struct page *frame, struct mem_cgroup *payer)
{
	int ret = 0;
	bool pays;

	/* With a user more its figures stay while they move. */
	if (!(READ_ONCE(frame->private) & POFS_OWN) || atomic_long_read(payers(frame)) || !(use(frame, POFS_USERS) & POFS_USERS))
		return -EEXIST;
	get_page(frame);
	rcu_read_lock();
	pays = charged_to(frame, payer);
	rcu_read_unlock();
	if (!pays)
		ret = move_charge(frame, payer);
	if (ret)
		pofs_frame_put(domain, frame);
	else
		atomic_long_set_release(payers(frame), 1);
	return ret;
}
