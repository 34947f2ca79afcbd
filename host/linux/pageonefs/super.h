/* SPDX-License-Identifier: GPL-2.0 */
/* Mounts, and stores: super.c. */
#ifndef POFS_SUPER_H
#define POFS_SUPER_H

#include "inode.h"

extern struct file_system_type pofs_type;
/* Of a mount's root. Set by control.c. */
extern struct file_operations pofs_root_ops;

int pofs_super_start(void);
void pofs_super_stop(void);
int pofs_store_open(struct pofs_domain *domain);

#endif
