// SPDX-License-Identifier: GPL-2.0
/*
 * The pages of a mount, and its limit. A file's page counts once, private or merged: tmpfs counts
 * those that are private, `merged` the others. Only a new page can be refused, one where neither
 * was. A copy of a merged page is never refused.
 *
 *  - tmpfs's own limit is out of reach: OFFSET is taken off what it has counted, once, when it is
 *    mounted. size= stays where tmpfs has it.
 *  - While a page goes from merged to private, or back, it may be counted twice, and never less
 *    than once. Who moves pages holds `moving` for reading. Who finds no room waits until nobody
 *    moves any, and then the sum is exact: so nobody is refused for a page that counts twice.
 *  - A new page is promised before the room for it is checked: so two never take the same room.
 *    Near the limit a sum holds only if nobody has moved pages while it was made (`moves`). A page
 *    that goes after it was found, and before tmpfs's turn, is made anew without a promise: at most
 *    one for each thread that is there just then.
 *
 * `moving` comes before the locks of pages and after all others. Nobody takes it twice.
 */
#include "account.h"

#define OFFSET	(1ll << 50)

/* Whatever is returned, pofs_account_free() is for the caller. */
int pofs_account_init(struct pofs_account *a)
{
	a->moves = alloc_percpu(struct pofs_moves);
	if (!a->moves)
		return -ENOMEM;
	return percpu_counter_init(&a->merged, 0, GFP_KERNEL) ?: percpu_counter_init(&a->promised, 0, GFP_KERNEL) ?:
	       percpu_init_rwsem(&a->moving);
}

/* Once, also where not all of it could be made. */
void pofs_account_free(struct pofs_account *a)
{
	free_percpu(a->moves);
	percpu_free_rwsem(&a->moving);
	percpu_counter_destroy(&a->promised);
	percpu_counter_destroy(&a->merged);
}

/* Nobody has seen the mount yet. */
void pofs_account_mounted(struct pofs_account *a, struct shmem_sb_info *tmpfs)
{
	a->tmpfs = tmpfs;
	percpu_counter_add(&tmpfs->used_blocks, -OFFSET);
}

/* Exact while nobody moves pages, or else too high. */
s64 pofs_account_used(struct pofs_account *a)
{
	return percpu_counter_sum(&a->tmpfs->used_blocks) + OFFSET + percpu_counter_sum(&a->merged);
}

/* tmpfs's count is right until pofs_account_close(): it may compare it with a new limit. */
void pofs_account_open(struct pofs_account *a)
{
	percpu_down_write(&a->moving);
	a->shown = OFFSET + percpu_counter_sum(&a->merged);
	percpu_counter_add(&a->tmpfs->used_blocks, a->shown);
}

void pofs_account_close(struct pofs_account *a)
{
	percpu_counter_sub(&a->tmpfs->used_blocks, a->shown);
	percpu_up_write(&a->moving);
}

/* Whether there is room for what is promised. False, too, where others move pages just now. */
static bool fits(struct pofs_account *a, s64 most, bool alone)
{
	unsigned long moves = 0;
	s64 pages;
	int cpu;

	for_each_possible_cpu(cpu)
		moves -= READ_ONCE(per_cpu_ptr(a->moves, cpu)->ended);
	smp_rmb();
	/* Its locks make sure that of two at least one sees the other's promise. It becomes a page. */
	pages = percpu_counter_sum(&a->promised);
	pages += pofs_account_used(a);
	smp_rmb();
	for_each_possible_cpu(cpu)
		moves += READ_ONCE(per_cpu_ptr(a->moves, cpu)->begun);
	/* One is the caller's. */
	return pages <= most && (alone || moves <= 1);
}

/* Promises new pages. False: there is no room, or nobody can tell while others move pages. */
bool pofs_room_promise(struct pofs_room *room, long pages)
{
	struct pofs_account *a = room->account;
	s64 most = READ_ONCE(a->tmpfs->max_blocks), rough;

	room->pages = pages;
	if (!pages)
		return true;
	percpu_counter_add(&a->promised, pages);
	if (!most)
		return true;
	rough = percpu_counter_read(&a->tmpfs->used_blocks) + OFFSET + percpu_counter_read(&a->merged) +
		percpu_counter_read(&a->promised);
	if (rough + 3ll * percpu_counter_batch * num_online_cpus() <= most)
		return true;
	if (fits(a, most, room->alone))
		return true;
	percpu_counter_sub(&a->promised, pages);
	room->pages = 0;
	return false;
}

/* Before pages are made, or merged: `pages` of them new. False: there seems to be no room. */
bool pofs_room_enter(struct pofs_room *room, struct pofs_account *a, long pages)
{
	*room = (struct pofs_room){ .account = a };
	percpu_down_read(&a->moving);
	this_cpu_inc(a->moves->begun);
	if (pofs_room_promise(room, pages))
		return true;
	pofs_room_leave(room);
	return false;
}

/* Waits until nobody else is there: the sum is exact then. */
void pofs_room_wait(struct pofs_room *room, struct pofs_account *a)
{
	*room = (struct pofs_room){ .account = a, .alone = true };
	percpu_down_write(&a->moving);
}

/* For new pages, whatever is there. */
int pofs_room_new(struct pofs_room *room, struct pofs_account *a, long pages)
{
	if (pofs_room_enter(room, a, pages))
		return 0;
	pofs_room_wait(room, a);
	if (pofs_room_promise(room, pages))
		return 0;
	pofs_room_leave(room);
	return -ENOSPC;
}

void pofs_room_leave(struct pofs_room *room)
{
	struct pofs_account *a = room->account;

	if (room->pages)
		percpu_counter_sub(&a->promised, room->pages);
	if (room->alone) {
		percpu_up_write(&a->moving);
	} else {
		this_cpu_inc(a->moves->ended);
		percpu_up_read(&a->moving);
	}
}
