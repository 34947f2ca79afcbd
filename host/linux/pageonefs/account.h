/* SPDX-License-Identifier: GPL-2.0 */
/* The pages of a mount, and its limit: account.c. */
#ifndef POFS_ACCOUNT_H
#define POFS_ACCOUNT_H

#include <linux/percpu_counter.h>
#include <linux/shmem_fs.h>
#include <linux/spinlock.h>
#include <linux/wait.h>

#include "pageonefs.h"

/* How many pages may have counted too much, and count right again. */
struct pofs_moves {
	unsigned long begun, ended;
};

/* All counts of ours only grow. */
struct pofs_account {
	struct shmem_sb_info *tmpfs;		/* counts private pages */
	struct percpu_counter merged, unmerged;	/* pages that became merged, and those that did not stay so */
	struct percpu_counter promised, kept;	/* new pages: before they are made, and when they are counted */
	struct pofs_moves __percpu *moves;
	spinlock_t asking;			/* near the limit one asks after the other */
	wait_queue_head_t waiting;		/* for a move to end */
};

/* What a call holds while it makes pages. */
struct pofs_room {
	struct pofs_account *account;
	long pages;		/* new ones that are promised */
	unsigned int moves;	/* how many may count too much */
	unsigned long ended;	/* moves, when there was an answer last */
};

int pofs_account_init(struct pofs_account *a);
void pofs_account_mounted(struct pofs_account *a, struct shmem_sb_info *tmpfs);
void pofs_account_free(struct pofs_account *a);
s64 pofs_account_used(struct pofs_account *a);
s64 pofs_account_merged(struct pofs_account *a);
int pofs_account_fits(struct pofs_account *a, s64 most);
void pofs_move_begin(struct pofs_account *a, unsigned int pages);
void pofs_move_end(struct pofs_account *a, unsigned int pages);
int pofs_room_enter(struct pofs_room *room, struct pofs_account *a, long pages, unsigned int moves);
int pofs_room_wait(struct pofs_room *room);
int pofs_room_new(struct pofs_room *room, struct pofs_account *a, long pages);
void pofs_room_take(struct pofs_room *room, struct pofs_room *whole);
void pofs_room_leave(struct pofs_room *room);

/* A page counts twice while it is made, and so does one that left, if tmpfs looks just then. */
#define POFS_PAGE_MOVES	2

#endif
