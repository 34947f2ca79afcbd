// SPDX-License-Identifier: GPL-2.0
/*
 * Frames and domains.
 *
 * A frame is a page that is never written. Its `private` has its handle, and counts the entries
 * that use it; the reference count counts entries, page tables and readers. Its domain's table
 * finds it by its handle while it has entries; the last one takes it out.
 *
 * Most are the module's own pages, without a mapping and off the LRU. They are charged to the
 * memory cgroup of the process that merges, and lie on the node of the page that they were made
 * from. Others are pages of a store's files (lend.c).
 */
#include <linux/highmem.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/slab.h>

#include "frame.h"
#include "mapping.h"

/* A reference count is an int, and every process that maps a file takes one for each entry. */
static unsigned int max_users = 65536;
module_param(max_users, uint, 0600);
MODULE_PARM_DESC(max_users, "how many pages of files may use one frame");

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
		xa_init(&domain->frames);
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

/* A page that nobody writes any more becomes a frame with one user, which has the reference. */
int pofs_frame_begin(struct pofs_domain *domain, struct page *page)
{
	u64 handle = atomic64_inc_return(&domain->last_handle);
	bool zeros = !memchr_inv(page_address(page), 0, PAGE_SIZE);
	int ret;

	atomic_long_set(users(page), handle << POFS_HANDLE | (zeros ? POFS_ZEROS : 0) | 1);
	ret = xa_err(xa_store(&domain->frames, handle, page, GFP_KERNEL));
	if (ret)
		set_page_private(page, 0);
	else
		atomic64_inc(&domain->count);
	return ret;
}

/* Nobody is killed for a frame: pages are locked, and the daemon comes again. */
#define FRAME_GFP (GFP_HIGHUSER | __GFP_ACCOUNT | __GFP_NORETRY | __GFP_NOWARN)

/*
 * A frame with the content of a page that nobody writes. It has one user, and the caller its
 * reference.
 */
struct page *pofs_frame_new(struct pofs_domain *domain, struct page *content)
{
	struct page *frame = alloc_pages_node(page_to_nid(content), FRAME_GFP, 0);

	if (!frame)
		return NULL;
	copy_highpage(frame, content);
	/* A pipe does not give away what is not. */
	SetPageUptodate(frame);
	if (pofs_frame_begin(domain, frame)) {
		put_page(frame);
		return NULL;
	}
	return frame;
}

/*
 * As a new user of it, with a reference; or NULL, and why. Under RCU; *xas is of the domain's
 * table.
 */
struct page *pofs_frame_find(struct xa_state *xas, u64 handle, int *error)
{
	unsigned long most = min_t(unsigned long, READ_ONCE(max_users), POFS_USERS - 1);
	struct page *frame = pofs_load(xas, handle);
	long n;

	*error = -ENOENT;
	if (!frame)
		return NULL;
	n = atomic_long_read(users(frame));
	do {
		if (!(n & POFS_USERS) || (n & POFS_USERS) >= most) {
			*error = n & POFS_USERS ? -EMLINK : -ENOENT;
			put_page(frame);
			return NULL;
		}
	} while (!atomic_long_try_cmpxchg(users(frame), &n, n + 1));
	*error = 0;
	return frame;
}

/* The opposite of both. */
void pofs_frame_put(struct pofs_domain *domain, struct page *frame)
{
	unsigned long left = atomic_long_dec_return(users(frame));

	if (!(left & POFS_USERS)) {
		xa_erase(&domain->frames, left >> POFS_HANDLE);
		set_page_private(frame, 0);
		atomic64_dec(&domain->count);
	}
	put_page(frame);
}
