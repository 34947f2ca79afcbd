/* SPDX-License-Identifier: GPL-2.0 */
/* Harvests of dirty bits, and digests: scan.c. */
#ifndef POFS_SCAN_H
#define POFS_SCAN_H

#include "inode.h"

long pofs_harvest(struct pofs_inode *pi, struct pageonefs_harvest *h);
long pofs_digest(struct pofs_inode *pi, struct pageonefs_digest *d);

#endif
