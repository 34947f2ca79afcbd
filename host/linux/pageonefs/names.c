// SPDX-License-Identifier: GPL-2.0
/*
 * Names and inodes. tmpfs makes an inode and gives it a name in one step, with its own
 * operations; they are replaced before anybody can find it. Therefore no name of a file that is
 * not there stays in the cache: a new one's dentry is not hashed until its operations are ours,
 * and who looks for it waits for the directory's lock.
 */
#include <linux/module.h>
#include <linux/slab.h>

#include "file.h"
#include "lend.h"
#include "names.h"
#include "tmpfs.h"

static struct inode_operations file_inode_ops;
struct inode_operations pofs_dir_ops;

#define STORE_INODES	(1ul << 48)

static int inode_adopt(struct inode *inode)
{
	static atomic64_t last_id;
	struct pofs_inode *pi = POFS_I(inode);
	int ret;

	if (S_ISDIR(inode->i_mode)) {
		inode->i_op = &pofs_dir_ops;
		return 0;
	}
	if (!S_ISREG(inode->i_mode))
		return 0;
	inode->i_op = &file_inode_ops;
	inode->i_fop = &pofs_file_ops;
	pi->id = atomic64_inc_return(&last_id);
	if (POFS_SB(inode->i_sb)->store) {
		/* As a memfd that may be sealed. */
		SHMEM_I(inode)->seals = 0;
		/* Pages that are lent do not move: so they lie where others need not, either. */
		mapping_set_gfp_mask(inode->i_mapping, GFP_HIGHUSER);
		pi->plain = PAGEONEFS_PLAIN_STORE;
		/* Its users go by the number alone: no other store's file, and no memfd, has it. */
		inode->i_ino = STORE_INODES + pi->id;
	} else if (!pofs_no_commit) {
		/*
		 * tmpfs commits the file's length then, and no pages: no write fails for it later. All
		 * lengths go through its setattr() (file.c).
		 */
		SHMEM_I(inode)->flags &= ~VM_NORESERVE;
	}
	ret = xa_err(xa_store(&POFS_SB(inode->i_sb)->files, pi->id, inode, GFP_KERNEL_ACCOUNT));
	if (ret)
		pi->id = 0;
	else
		pofs_news(POFS_SB(inode->i_sb));
	return ret;
}

/* What is left of a file when its last name and user are gone. */
void pofs_evict_inode(struct inode *inode)
{
	struct pofs_inode *pi = POFS_I(inode);

	if (!pi->id)
		return;
	xa_erase(&POFS_SB(inode->i_sb)->files, pi->id);
	pofs_news(POFS_SB(inode->i_sb));
	pofs_recall(pi, 0, ULONG_MAX);
	pofs_erase(pi, 0, ULONG_MAX);
	xa_destroy(&pi->merged);
	xa_destroy(&pi->lent);
	pofs_dirty_free(pi);
	pofs_payer_clear(&pi->payer);
}

/* ---- directories ----------------------------------------------------------------- */

static struct dentry *dir_lookup(struct inode *dir, struct dentry *dentry, unsigned int flags)
{
	return dentry->d_name.len > NAME_MAX ? ERR_PTR(-ENAMETOOLONG) : NULL;
}

/* Shows a new name, whose inode is ours now. */
static int dir_publish(struct inode *dir, struct dentry *dentry, int ret)
{
	if (ret)
		return ret;
	ret = inode_adopt(d_inode(dentry));
	if (ret) {
		pofs_base.dir->unlink(dir, dentry);
		d_drop(dentry);
		return ret;
	}
	if (d_unhashed(dentry))
		d_rehash(dentry);
	return 0;
}

/* A name that is not there must not be in the cache when tmpfs fills it. */
static void dir_hide(struct dentry *dentry)
{
	if (!d_unhashed(dentry))
		d_drop(dentry);
}

static int dir_create(pofs_idmap *idmap, struct inode *dir, struct dentry *dentry, umode_t mode, bool excl)
{
	dir_hide(dentry);
	return dir_publish(dir, dentry, pofs_base.dir->create(idmap, dir, dentry, mode, excl));
}

static int dir_mkdir(pofs_idmap *idmap, struct inode *dir, struct dentry *dentry, umode_t mode)
{
	dir_hide(dentry);
	return dir_publish(dir, dentry, pofs_base.dir->mkdir(idmap, dir, dentry, mode));
}

static int dir_mknod(pofs_idmap *idmap, struct inode *dir, struct dentry *dentry, umode_t mode, dev_t dev)
{
	dir_hide(dentry);
	return dir_publish(dir, dentry, pofs_base.dir->mknod(idmap, dir, dentry, mode, dev));
}

/* A longer target has a page of its own. */
#define SHORT_TARGET	128

static int dir_symlink(pofs_idmap *idmap, struct inode *dir, struct dentry *dentry, const char *target)
{
	struct pofs_room room;
	int ret = pofs_room_new(&room, &POFS_SB(dir->i_sb)->account, strlen(target) + 1 > SHORT_TARGET);

	if (ret)
		return ret;
	dir_hide(dentry);
	ret = pofs_base.dir->symlink(idmap, dir, dentry, target);
	pofs_room_leave(&room);
	return dir_publish(dir, dentry, ret);
}

static int dir_link(struct dentry *old, struct inode *dir, struct dentry *dentry)
{
	int ret;

	dir_hide(dentry);
	ret = pofs_base.dir->link(old, dir, dentry);
	if (!ret && d_unhashed(dentry))
		d_rehash(dentry);
	return ret;
}

static int dir_unlink(struct inode *dir, struct dentry *dentry)
{
	int ret = pofs_base.dir->unlink(dir, dentry);

	if (!ret)
		d_drop(dentry);
	return ret;
}

static int dir_rmdir(struct inode *dir, struct dentry *dentry)
{
	int ret = pofs_base.dir->rmdir(dir, dentry);

	if (!ret)
		d_drop(dentry);
	return ret;
}

/* tmpfs opens the file with its operations before it returns; nobody else has it yet. */
static int dir_tmpfile(pofs_idmap *idmap, struct inode *dir, struct file *file, umode_t mode)
{
	int ret = pofs_base.dir->tmpfile(idmap, dir, file, mode);

	if (ret)
		return ret;
	ret = inode_adopt(file_inode(file));
	if (ret)
		return ret;
	__module_get(THIS_MODULE);
	file->f_op = &pofs_file_ops;
	return 0;
}

/* ---- files ----------------------------------------------------------------------- */

/* Merged pages count as the file's, for du(1) and df(1). */
static int file_getattr(pofs_idmap *idmap, const struct path *path, struct kstat *stat, u32 mask, unsigned int flags)
{
	struct inode *inode = d_inode(path->dentry);
	int ret = pofs_base.inode->getattr(idmap, path, stat, mask, flags);

	stat->blocks += (u64)atomic_long_read(&POFS_I(inode)->count) << (PAGE_SHIFT - 9);
	return ret;
}

/* tmpfs clears the rest of a page that the new end cuts: so it must be there. */
static int file_setattr(pofs_idmap *idmap, struct dentry *dentry, struct iattr *attr)
{
	struct inode *inode = d_inode(dentry);
	struct pofs_inode *pi = POFS_I(inode);
	loff_t old = i_size_read(inode), size = attr->ia_size;
	pgoff_t first = DIV_ROUND_UP_ULL(size, PAGE_SIZE);
	int ret;

	/* What is as long as it was is cut, too: the rest of its last page, and what lies behind. */
	if (!(attr->ia_valid & ATTR_SIZE) || size > old || (size == old && pi->plain == PAGEONEFS_PLAIN_STORE)) {
		ret = pofs_base.inode->setattr(idmap, dentry, attr);
		if (!ret && i_size_read(inode) != old)
			pofs_news(POFS_SB(inode->i_sb));
		return ret;
	}
	/* Pages that are lent would be cut in place. */
	if (pi->plain == PAGEONEFS_PLAIN_STORE)
		return -EPERM;
	ret = setattr_prepare(idmap, dentry, attr);
	if (ret)
		return ret;
	pofs_block_merges(pi);
	if (size & ~PAGE_MASK)
		ret = pofs_unmerge(pi, size >> PAGE_SHIFT, size >> PAGE_SHIFT);
	if (!ret) {
		pofs_cut_begin(pi, size >> PAGE_SHIFT, ULONG_MAX);
		ret = pofs_base.inode->setattr(idmap, dentry, attr);
		if (!ret)
			pofs_erase(pi, first, ULONG_MAX);
		pofs_cut_end(pi, size >> PAGE_SHIFT, ULONG_MAX);
	}
	pofs_unblock_merges(pi);
	if (size < old)
		pofs_news(POFS_SB(inode->i_sb));
	return ret;
}

void pofs_names_start(void)
{
	file_inode_ops = *pofs_base.inode;
	file_inode_ops.getattr = file_getattr;
	file_inode_ops.setattr = file_setattr;

	pofs_dir_ops = *pofs_base.dir;
	pofs_dir_ops.lookup = dir_lookup;
	pofs_dir_ops.create = dir_create;
	pofs_dir_ops.mkdir = dir_mkdir;
	pofs_dir_ops.mknod = dir_mknod;
	pofs_dir_ops.symlink = dir_symlink;
	pofs_dir_ops.link = dir_link;
	pofs_dir_ops.unlink = dir_unlink;
	pofs_dir_ops.rmdir = dir_rmdir;
	pofs_dir_ops.tmpfile = dir_tmpfile;
}
