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
 * tmpfs's pages are. `lru.prev` counts the entries of the cgroup that pays, and `lru.next` lists
 * the others (adopt.c). Other frames are pages of a store's files (lend.c).
 */
#include <linux/highmem.h>
#include <linux/memcontrol.h>
#include <linux/module.h>
#include <linux/pagemap.h>
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
		xa_init(&domain->debts);
		domain->adopt_after = jiffies;
		domain->try_after = jiffies;
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
	WARN_ON(!xa_empty(&domain->debts));
	xa_destroy(&domain->frames);
	xa_destroy(&domain->debts);
	kfree(domain);
}

void pofs_domain_put(struct pofs_domain *domain)
{
	kref_put_mutex(&domain->kref, domain_release, &domains_lock);
}

/* ---- frames ------------------------------------------------------------------------ */

void pofs_frame_count(struct page *frame, int n)
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

	atomic_long_set(pofs_users(page), handle << POFS_HANDLE | (zeros ? POFS_ZEROS : 0) | own | 1);
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
		atomic_long_set(pofs_payers(frame), 1);
		*pofs_keepers_of(frame) = NULL;
		if (pofs_frame_begin(domain, frame)) {
			put_page(frame);
			frame = NULL;
		} else {
			pofs_frame_count(frame, 1);
		}
	}
	set_active_memcg(active);
	return frame;
}

/* One more user, without a reference, unless it has that many, or none. Returns what it had. */
unsigned long pofs_frame_use(struct page *frame, unsigned long most)
{
	long n = atomic_long_read(pofs_users(frame));

	while (n & POFS_USERS && (n & POFS_USERS) < most)
		if (atomic_long_try_cmpxchg(pofs_users(frame), &n, n + 1))
			break;
	return n;
}

/* One more user that pays as the caller does, who is one, with a reference. False: it is full. */
bool pofs_frame_again(struct page *frame)
{
	unsigned long most = pofs_frame_most(), n = pofs_frame_use(frame, most);

	if ((n & POFS_USERS) >= most)
		return false;
	get_page(frame);
	if (n & POFS_OWN)
		atomic_long_inc(pofs_payers(frame));
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
		n = pofs_frame_use(frame, most);
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
		atomic_long_or(POFS_ANOTHER, pofs_users(full));
	}
	put_page(full);
	return frame;
}

/* A cgroup has no room for `n` frames more. Their number is exact while there is memory for it. */
void pofs_owe(struct pofs_domain *domain, unsigned short number, long n)
{
	if (!number)
		return;
	xa_lock(&domain->debts);
	n += xa_to_value(xa_load(&domain->debts, number) ?: xa_mk_value(0));
	__xa_store(&domain->debts, number, n > 0 ? xa_mk_value(n) : NULL, GFP_NOWAIT | __GFP_NOWARN);
	xa_unlock(&domain->debts);
}

/* The opposite of all of them. Returns how many users are left. */
unsigned long pofs_frame_put(struct pofs_domain *domain, struct page *frame)
{
	unsigned long left = atomic_long_dec_return(pofs_users(frame));

	if (!(left & POFS_USERS)) {
		xa_erase(&domain->frames, left >> POFS_HANDLE);
		if (left & POFS_OWN && *pofs_keepers_of(frame)) {
			pofs_owe(domain, (*pofs_keepers_of(frame))->full, -1);
			kfree(*pofs_keepers_of(frame));
		}
		set_page_private(frame, 0);
		pofs_frame_count(frame, -1);
		atomic64_dec(&domain->count);
	}
	put_page(frame);
	return left & POFS_USERS;
}
