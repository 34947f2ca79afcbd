/* SPDX-License-Identifier: GPL-2.0 */
/* Pages of stores that are frames, too: lend.c. */
#ifndef POFS_LEND_H
#define POFS_LEND_H

#include "inode.h"

long pofs_lend(struct pofs_inode *pi, struct pageonefs_merge *m);
int pofs_slot(struct pofs_inode *pi, struct pofs_inode *like, const struct pageonefs_slot *s);
void pofs_recall(struct pofs_inode *pi, pgoff_t first, pgoff_t last);

#endif
