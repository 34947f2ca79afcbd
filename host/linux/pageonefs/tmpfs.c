// SPDX-License-Identifier: GPL-2.0
/*
 * tmpfs: its operations.
 */
#include <linux/dcache.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "tmpfs.h"

struct pofs_base pofs_base;

/* Looks at a file of tmpfs, to learn its operations. */
int __init pofs_tmpfs_start(void)
{
	struct file *file = shmem_file_setup("pageonefs", 0, VM_NORESERVE);
	struct vm_area_struct *vma;
	struct super_block *sb;
	int ret = -ENOMEM;

	if (IS_ERR(file))
		return PTR_ERR(file);
	/* tmpfs's mmap sets vm_ops, and looks at the flags. */
	vma = kzalloc(sizeof(*vma), GFP_KERNEL);
	if (vma) {
		vma->vm_file = file;
		ret = file->f_op->mmap(file, vma);
		pofs_base.vm = vma->vm_ops;
		kfree(vma);
	}
	sb = file_inode(file)->i_sb;
	pofs_base.file = file->f_op;
	pofs_base.inode = file_inode(file)->i_op;
	pofs_base.super = sb->s_op;
	pofs_base.dir = d_inode(sb->s_root)->i_op;
	pofs_base.type = sb->s_type;
	pofs_base.dir_file = d_inode(sb->s_root)->i_fop;
	fput(file);
	if (!ret && (!pofs_base.vm || !pofs_base.vm->fault || !pofs_base.file->read_iter || !pofs_base.dir->create))
		ret = -EOPNOTSUPP;
	return ret;
}

/*
 * tmpfs notices that pages have left a file when it looks at it the next time: it does so now. A
 * file that nobody can open any more has no dentry; tmpfs looks when it ends.
 */
void pofs_recount(struct inode *inode)
{
	struct dentry *dentry = d_find_any_alias(inode);
	struct path path = { .dentry = dentry };
	struct kstat stat = {};

	if (!dentry)
		return;
	pofs_base.inode->getattr(POFS_NO_IDMAP, &path, &stat, 0, 0);
	dput(dentry);
}
