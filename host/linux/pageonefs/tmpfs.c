// SPDX-License-Identifier: GPL-2.0
/*
 * tmpfs: its operations, and its account of a mount's pages.
 */
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
	if (!ret && (!pofs_base.vm || !pofs_base.vm->fault || !pofs_base.file->fallocate || !pofs_base.dir->create))
		ret = -EOPNOTSUPP;
	return ret;
}

void pofs_charge(struct inode *inode, long pages)
{
	struct shmem_sb_info *sbinfo = inode->i_sb->s_fs_info;

	if (sbinfo->max_blocks)
		percpu_counter_add(&sbinfo->used_blocks, pages);
}

/*
 * tmpfs notices that pages have left a file when it looks at it the next time: it does so now. Of
 * the path it takes nothing but the inode, and the file may have no name.
 */
void pofs_recount(struct inode *inode)
{
	struct dentry *dentry = kzalloc(sizeof(*dentry), GFP_KERNEL);
	struct path path = { .dentry = dentry };
	struct kstat stat = {};

	if (!dentry)
		return;
	dentry->d_inode = inode;
	pofs_base.inode->getattr(POFS_NO_IDMAP, &path, &stat, 0, 0);
	kfree(dentry);
}
