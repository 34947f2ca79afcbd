/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Where pages leave the buddy allocator, and where they enter it.
 */
#ifndef PPR_HOOKS_H
#define PPR_HOOKS_H

#include <linux/types.h>

extern bool ppr_check;

int ppr_hooks_init(void);
void ppr_hooks_exit(void);
int ppr_hooks_cancel_start(void);
void ppr_hooks_cancel_stop(void);
int ppr_hooks_mark_start(void);
void ppr_hooks_mark_stop(void);
void ppr_mark_free_lists(unsigned int lowest);
void ppr_mark_deferred(void);
unsigned long ppr_last_frame(void);

#endif
