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
 * tmpfs's pages are. Others are pages of a store's files (lend.c).
 */
#include <linux/highmem.h>
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
	return clamp_t(unsigned int, READ_ONCE(max_users), 1, POFS_USERS - 1);
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
	int ret;

	atomic_long_set(users(page), handle << POFS_HANDLE | (zeros ? POFS_ZEROS : 0) | 1);
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

/*
 * The frame, or another of its content where it is full: the caller is a new user of it, and has a
 * reference. NULL: neither, and why. Under RCU; *xas is of the domain's table.
 */
struct page *pofs_frame_find(struct xa_state *xas, u64 handle, int *error)
{
	unsigned long most = pofs_no_user_bound ? POFS_USERS - 1 : pofs_frame_most();

	*error = -ENOENT;
	while (handle) {
		struct page *frame = pofs_load(xas, handle);
		long n;

		if (!frame)
			break;
		n = atomic_long_read(users(frame));
		while (n & POFS_USERS && (n & POFS_USERS) < most) {
			if (atomic_long_try_cmpxchg(users(frame), &n, n + 1)) {
				*error = 0;
				return frame;
			}
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

/* The opposite of all of them. */
void pofs_frame_put(struct pofs_domain *domain, struct page *frame)
{
	unsigned long left = atomic_long_dec_return(users(frame));

	if (!(left & POFS_USERS)) {
		xa_erase(&domain->frames, left >> POFS_HANDLE);
		set_page_private(frame, 0);
		count_frame(frame, -1);
		atomic64_dec(&domain->count);
	}
	put_page(frame);
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

/*
 * Whether the payer, and the machine, have room for a page and a node of the file's table. tmpfs's
 * own charge would have one of its tasks killed: it comes with PF_MEMALLOC, and so waits for no
 * room. What is freed here is there for it, on this processor.
 */
bool pofs_payer_has_room(void)
{
	gfp_t gfp = GFP_HIGHUSER | __GFP_ACCOUNT | __GFP_NORETRY | __GFP_NOWARN;
	struct page *page = alloc_page(gfp), *node = alloc_page(gfp);

	if (page)
		__free_page(page);
	if (node)
		__free_page(node);
	return page && node;
}
