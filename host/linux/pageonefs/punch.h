/* SPDX-License-Identifier: GPL-2.0 */
/* Punching for the daemon: punch.c. */
#ifndef POFS_PUNCH_H
#define POFS_PUNCH_H

#include "inode.h"

long pofs_punch(struct pofs_inode *pi, struct pageonefs_punch *p);

#endif
