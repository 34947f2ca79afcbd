/* SPDX-License-Identifier: GPL-2.0 */
/* The pages of a mount, and its limit: account.c. */
#ifndef POFS_ACCOUNT_H
#define POFS_ACCOUNT_H

#include <linux/percpu-rwsem.h>
#include <linux/percpu_counter.h>
#include <linux/shmem_fs.h>

#include "pageonefs.h"

/* How often `moving` was taken, and left again, for reading. */
struct pofs_moves {
	unsigned long begun, ended;
};

struct pofs_account {
	struct shmem_sb_info *tmpfs;		/* counts private pages */
	struct percpu_counter merged;
	struct percpu_counter promised;		/* new pages that are being made */
	struct percpu_rw_semaphore moving;	/* held for reading while pages are made, or merged */
	struct pofs_moves __percpu *moves;
	s64 shown;		/* to tmpfs, of what it does not count; under `moving` */
};

/* What a call holds while it makes pages, or merges them. */
struct pofs_room {
	struct pofs_account *account;
	long pages;		/* new ones at most */
	bool alone;		/* nobody else makes pages, or merges them */
};

int pofs_account_init(struct pofs_account *a);
void pofs_account_mounted(struct pofs_account *a, struct shmem_sb_info *tmpfs);
void pofs_account_free(struct pofs_account *a);
s64 pofs_account_used(struct pofs_account *a);
void pofs_account_open(struct pofs_account *a);
void pofs_account_close(struct pofs_account *a);
bool pofs_room_enter(struct pofs_room *room, struct pofs_account *a, long pages);
void pofs_room_wait(struct pofs_room *room, struct pofs_account *a);
bool pofs_room_promise(struct pofs_room *room, long pages);
int pofs_room_new(struct pofs_room *room, struct pofs_account *a, long pages);
void pofs_room_leave(struct pofs_room *room);

#endif
