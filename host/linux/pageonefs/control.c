// SPDX-License-Identifier: GPL-2.0
/*
 * The control interface (uapi.h): ioctls on the mount's root. Whoever may do these could read all
 * memory anyway; the files themselves have no ioctls.
 */
#include <linux/capability.h>
#include <linux/eventfd.h>
#include <linux/module.h>
#include <linux/uaccess.h>

#include "control.h"
#include "inode.h"
#include "lend.h"
#include "merge.h"
#include "punch.h"
#include "scan.h"
#include "super.h"
#include "tmpfs.h"

/* The layout that crates/kmem/src/pageonefs.rs asserts, too. */
static_assert(sizeof(struct pageonefs_info) == 80 && offsetof(struct pageonefs_info, domain) == 16);
static_assert(sizeof(struct pageonefs_file) == 48 && offsetof(struct pageonefs_file, plain) == 40);
static_assert(sizeof(struct pageonefs_list) == 24 && offsetof(struct pageonefs_list, room) == 16);
static_assert(sizeof(struct pageonefs_harvest) == 56 && offsetof(struct pageonefs_harvest, flags) == 48);
static_assert(sizeof(struct pageonefs_digest) == 64 && offsetof(struct pageonefs_digest, only) == 32);
static_assert(sizeof(struct pageonefs_entry) == 24 && offsetof(struct pageonefs_entry, result) == 16);
static_assert(sizeof(struct pageonefs_merge) == 24 && offsetof(struct pageonefs_merge, count) == 16);
static_assert(sizeof(struct pageonefs_plain) == 8);
static_assert(sizeof(struct pageonefs_punch) == 40 && offsetof(struct pageonefs_punch, held) == 24);
static_assert(sizeof(struct pageonefs_notify) == 8);
static_assert(sizeof(struct pageonefs_slot) == 40 && offsetof(struct pageonefs_slot, pid) == 32);
static_assert(sizeof(struct pageonefs_stats) == 104 && offsetof(struct pageonefs_stats, drains) == 96);

/* The file with this id, with a reference; or NULL. */
static struct inode *file_find(struct pofs_super *ps, u64 id)
{
	struct inode *inode;

	/* An inode leaves the table before it goes. */
	xa_lock(&ps->files);
	inode = xa_load(&ps->files, id);
	if (inode)
		inode = igrab(inode);
	xa_unlock(&ps->files);
	return inode;
}

static void file_describe(struct inode *inode, struct pageonefs_file *file)
{
	struct pofs_inode *pi = POFS_I(inode);

	*file = (struct pageonefs_file){
		.id = pi->id,
		.inode = inode->i_ino,
		.size = i_size_read(inode),
		.private_pages = READ_ONCE(inode->i_mapping->nrpages),
		.merged_pages = atomic_long_read(&pi->count),
		.plain = READ_ONCE(pi->plain),
		.uid = i_uid_read(inode),
	};
}

static long info(struct pofs_super *ps, void __user *arg)
{
	struct pageonefs_info i = { .version = PAGEONEFS_VERSION, .page_size = PAGE_SIZE, .digest = 2 };

	strscpy(i.domain, ps->domain->name, sizeof(i.domain));
	return copy_to_user(arg, &i, sizeof(i)) ? -EFAULT : 0;
}

static long list(struct pofs_super *ps, void __user *arg)
{
	struct pageonefs_list l;
	struct pageonefs_file __user *out;
	unsigned long id;

	if (copy_from_user(&l, arg, sizeof(l)))
		return -EFAULT;
	out = u64_to_user_ptr(l.files);
	id = l.after;
	for (l.filled = 0; l.filled < l.room;) {
		struct pageonefs_file file;
		struct inode *inode;

		if (!xa_find_after(&ps->files, &id, ULONG_MAX, XA_PRESENT))
			break;
		inode = file_find(ps, id);
		if (!inode)
			continue;
		file_describe(inode, &file);
		iput(inode);
		if (copy_to_user(out + l.filled, &file, sizeof(file)))
			return -EFAULT;
		l.filled++;
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	return copy_to_user(arg, &l, sizeof(l)) ? -EFAULT : 0;
}

static long notify(struct pofs_super *ps, void __user *arg)
{
	struct eventfd_ctx *news = NULL;
	struct pageonefs_notify n;

	if (copy_from_user(&n, arg, sizeof(n)))
		return -EFAULT;
	if (n.reserved)
		return -EINVAL;
	if (n.eventfd != -1) {
		news = eventfd_ctx_fdget(n.eventfd);
		if (IS_ERR(news))
			return PTR_ERR(news);
	}
	pofs_news_to(ps, news);
	return 0;
}

static long stats(struct pofs_super *ps, void __user *arg)
{
	struct pageonefs_stats sum = {};
	int cpu;
	size_t i;

	/* All fields are u64. */
	for_each_possible_cpu(cpu)
		for (i = 0; i < sizeof(sum) / sizeof(u64); i++)
			((u64 *)&sum)[i] += READ_ONCE(((u64 *)per_cpu_ptr(&pofs_stats, cpu))[i]);
	sum.frames = atomic64_read(&ps->domain->count);
	sum.merged_pages = pofs_account_merged(&ps->account);
	return copy_to_user(arg, &sum, sizeof(sum)) ? -EFAULT : 0;
}

static long slot(struct pofs_super *ps, struct pofs_inode *pi, struct pageonefs_slot *s)
{
	struct inode *like = s->pid ? NULL : file_find(ps, s->like_id);
	long ret = pofs_slot(pi, like ? POFS_I(like) : NULL, s);

	iput(like);
	return ret;
}

/* The requests that name a file start with its id. */
union request {
	u64 id;
	struct pageonefs_harvest harvest;
	struct pageonefs_digest digest;
	struct pageonefs_merge merge;
	struct pageonefs_plain plain;
	struct pageonefs_punch punch;
	struct pageonefs_slot slot;
};

static long of_a_file(struct pofs_super *ps, unsigned int cmd, void __user *arg)
{
	union request request;
	struct inode *inode;
	long ret;

	if (_IOC_SIZE(cmd) > sizeof(request))
		return -ENOTTY;
	if (copy_from_user(&request, arg, _IOC_SIZE(cmd)))
		return -EFAULT;
	/* Or what has been done could not be said. */
	if (_IOC_DIR(cmd) & _IOC_READ && !pofs_no_first_check && copy_to_user(arg, &request, _IOC_SIZE(cmd)))
		return -EFAULT;
	inode = file_find(ps, request.id);
	if (!inode)
		return -ESRCH;
	switch (cmd) {
	case PAGEONEFS_HARVEST:
		ret = pofs_harvest(POFS_I(inode), &request.harvest);
		break;
	case PAGEONEFS_DIGEST:
		ret = pofs_digest(POFS_I(inode), &request.digest);
		break;
	case PAGEONEFS_MERGE:
		ret = (ps->store ? pofs_lend : pofs_merge)(POFS_I(inode), &request.merge);
		break;
	case PAGEONEFS_PUNCH:
		ret = pofs_punch(POFS_I(inode), &request.punch);
		break;
	case PAGEONEFS_MAKE_PLAIN:
		ret = pofs_make_plain(POFS_I(inode), PAGEONEFS_PLAIN_ASKED);
		break;
	case PAGEONEFS_SLOT:
		ret = slot(ps, POFS_I(inode), &request.slot);
		break;
	default:
		ret = -ENOTTY;
	}
	iput(inode);
	if (ret != -ENOTTY && _IOC_DIR(cmd) & _IOC_READ && copy_to_user(arg, &request, _IOC_SIZE(cmd)))
		return -EFAULT;
	return ret;
}

static long root_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct pofs_super *ps = POFS_SB(file_inode(file)->i_sb);
	void __user *user = (void __user *)arg;

	if (_IOC_TYPE(cmd) != _IOC_TYPE(PAGEONEFS_INFO))
		return -ENOTTY;
	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	switch (cmd) {
	case PAGEONEFS_INFO:
		return info(ps, user);
	case PAGEONEFS_LIST:
		return list(ps, user);
	case PAGEONEFS_STATS:
		return stats(ps, user);
	case PAGEONEFS_NOTIFY:
		return notify(ps, user);
	case PAGEONEFS_STORE:
		return pofs_store_open(ps->domain);
	case PAGEONEFS_HARVEST:
	case PAGEONEFS_DIGEST:
	case PAGEONEFS_MERGE:
	case PAGEONEFS_MAKE_PLAIN:
	case PAGEONEFS_PUNCH:
	case PAGEONEFS_SLOT:
		return of_a_file(ps, cmd, user);
	default:
		return -ENOTTY;
	}
}

void pofs_control_start(void)
{
	pofs_root_ops = *pofs_base.dir_file;
	pofs_root_ops.owner = THIS_MODULE;
	pofs_root_ops.unlocked_ioctl = root_ioctl;
}
