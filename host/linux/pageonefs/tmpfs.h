/* SPDX-License-Identifier: GPL-2.0 */
#ifndef POFS_TMPFS_H
#define POFS_TMPFS_H

#include <linux/shmem_fs.h>

#include "pageonefs.h"

/* tmpfs's own operations. Set once, before a mount is made. */
struct pofs_base {
	const struct file_operations *file;
	const struct file_operations *dir_file;
	const struct inode_operations *inode;
	const struct inode_operations *dir;
	const struct super_operations *super;
	const struct vm_operations_struct *vm;
	struct file_system_type *type;
};

extern struct pofs_base pofs_base;

int pofs_tmpfs_start(void);
void pofs_recount(struct inode *inode);

#endif
