/* SPDX-License-Identifier: GPL-2.0 */
/* Pages of stores that are frames, too: lend.c. */
#ifndef POFS_LEND_H
#define POFS_LEND_H

#include "inode.h"

long pofs_lend(struct pofs_inode *pi, struct pageonefs_merge *m);
void pofs_recall(struct pofs_inode *pi, pgoff_t first, pgoff_t last);

#endif
