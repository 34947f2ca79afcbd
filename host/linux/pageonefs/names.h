/* SPDX-License-Identifier: GPL-2.0 */
/* Names, lengths, and the end of a file: names.c. */
#ifndef POFS_NAMES_H
#define POFS_NAMES_H

#include <linux/fs.h>

extern struct inode_operations pofs_dir_ops;

void pofs_names_start(void);
void pofs_evict_inode(struct inode *inode);

#endif
