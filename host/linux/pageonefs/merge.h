/* SPDX-License-Identifier: GPL-2.0 */
/* Merging: merge.c. */
#ifndef POFS_MERGE_H
#define POFS_MERGE_H

#include "inode.h"

long pofs_merge(struct pofs_inode *pi, struct pageonefs_merge *m);

#endif
