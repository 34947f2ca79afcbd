// SPDX-License-Identifier: GPL-2.0
/*
 * The pages of a mount, and its limit. A file's page counts once, private or merged: tmpfs counts
 * those that are private, `merged` less `unmerged` the others. Only a new page can be refused, one
 * where neither was. A copy of a merged page is never refused, and waits for nobody.
 *
 *  - tmpfs's own limit is out of reach: OFFSET is taken off what it has counted, once, when it is
 *    mounted. size= stays where tmpfs has it.
 *  - A new page is promised before anybody looks whether there is room for it. Its promise ends
 *    (`kept`) when it is counted, or was not made.
 *  - While a page goes from merged to private, or back, it counts twice, and never less than once.
 *    Who moves pages says before how many may count too much (`begun`), and that they do not any
 *    more (`ended`).
 *
 * No lock keeps pages from moving while they are added up. So the order of reading has to do:
 *
 *  - What makes the sum less (`unmerged`, `kept`) is read first, then tmpfs's count, then what
 *    makes it more (`merged`, `promised`). A page that moves meanwhile is seen where it was, or
 *    where it goes, or at both: who moves it counts it there first. So the sum is never too low,
 *    and a new page for which it leaves room may be made.
 *  - `ended` is read before all of these, and `begun` after: their difference has all moves of that
 *    time. Without them, and without promises, the sum is not more than what was there when it
 *    began: if even that leaves no room, there is none.
 *  - Otherwise nobody can tell. Only who asks waits then, until a move ends, and asks again. Moves
 *    are short, unless one waits for memory. All others go on.
 *  - Of two who promise, one sees the other's promise, or page: near the limit they ask one after
 *    the other, and who finds none is gone before the next one asks; elsewhere there is a barrier
 *    between a promise and the look.
 *
 * A page that goes after it was found, and before tmpfs's turn, is made anew without a promise: at
 * most one for each thread that is there just then.
 */
#include <linux/delay.h>

#include "account.h"

#define OFFSET	(1ll << 50)

/* Whatever is returned, pofs_account_free() is for the caller. */
int pofs_account_init(struct pofs_account *a)
{
	spin_lock_init(&a->asking);
	init_waitqueue_head(&a->waiting);
	a->moves = alloc_percpu(struct pofs_moves);
	if (!a->moves)
		return -ENOMEM;
	return percpu_counter_init(&a->merged, 0, GFP_KERNEL) ?: percpu_counter_init(&a->unmerged, 0, GFP_KERNEL) ?:
	       percpu_counter_init(&a->promised, 0, GFP_KERNEL) ?: percpu_counter_init(&a->kept, 0, GFP_KERNEL);
}

/* Once, also where not all of it could be made. */
void pofs_account_free(struct pofs_account *a)
{
	free_percpu(a->moves);
	percpu_counter_destroy(&a->kept);
	percpu_counter_destroy(&a->promised);
	percpu_counter_destroy(&a->unmerged);
	percpu_counter_destroy(&a->merged);
}

/* Nobody has seen the mount yet. */
void pofs_account_mounted(struct pofs_account *a, struct shmem_sb_info *tmpfs)
{
	a->tmpfs = tmpfs;
	percpu_counter_add(&tmpfs->used_blocks, -OFFSET);
}

/* ---- sums ------------------------------------------------------------------------------ */

struct sum {
	s64 used, promised;
};

static __always_inline s64 count(struct percpu_counter *c, bool exact)
{
	return exact ? percpu_counter_sum(c) : percpu_counter_read(c);
}

/* In the order that the head of this file gives. */
static __always_inline struct sum add_up(struct pofs_account *a, bool exact)
{
	struct sum sum = { OFFSET - count(&a->unmerged, exact), -count(&a->kept, exact) };

	/* What makes it less comes first. */
	smp_rmb();
	sum.used += count(&a->tmpfs->used_blocks, exact);
	/* What makes it more comes last. */
	smp_rmb();
	sum.used += count(&a->merged, exact);
	sum.promised += count(&a->promised, exact);
	return sum;
}

/* Exact while nobody moves pages, or else too high. */
s64 pofs_account_used(struct pofs_account *a)
{
	return add_up(a, true).used;
}

s64 pofs_account_merged(struct pofs_account *a)
{
	s64 unmerged = percpu_counter_sum(&a->unmerged);

	/* As in add_up(). */
	smp_rmb();
	return percpu_counter_sum(&a->merged) - unmerged;
}

/* Of one of the counts in `moves`. */
static unsigned long total(unsigned long __percpu *moves)
{
	unsigned long n = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		n += READ_ONCE(*per_cpu_ptr(moves, cpu));
	return n;
}

/* ---- moves ----------------------------------------------------------------------------- */

/* So many pages may count too much from now on. */
void pofs_move_begin(struct pofs_account *a, unsigned int pages)
{
	this_cpu_add(a->moves->begun, pages);
	/* Before the first of them counts too much. Pairs with ask(). */
	smp_wmb();
}

void pofs_move_end(struct pofs_account *a, unsigned int pages)
{
	/* When the last of them counts right. Pairs with ask(). */
	smp_wmb();
	this_cpu_add(a->moves->ended, pages);
	/* With a full barrier: who begins to wait looks at `ended` after it can be seen waiting. */
	if (wq_has_sleeper(&a->waiting))
		wake_up_all(&a->waiting);
}

/* ---- room ------------------------------------------------------------------------------ */

/* Whether there is room for so many more, whatever processors have still to add to the counts. */
static bool plenty(struct pofs_account *a, s64 most, long pages)
{
	struct sum sum = add_up(a, false);

	return sum.used + sum.promised + pages + 3ll * percpu_counter_batch * num_online_cpus() <= most;
}

/* -EAGAIN: nobody can tell before a move ends. */
static int ask(struct pofs_room *room, long pages, s64 most)
{
	struct pofs_account *a = room->account;
	unsigned long moves;
	struct sum sum;
	int ret = 0;

	spin_lock(&a->asking);
	percpu_counter_add(&a->promised, pages);
	/* Who promises elsewhere sees this, or it is seen here. Pairs with pofs_room_enter(). */
	smp_mb();
	room->ended = total(&a->moves->ended);
	/* Moves that end from now on count as under way. Pairs with pofs_move_end(). */
	smp_rmb();
	sum = add_up(a, true);
	/* And so do those that have begun by now. Pairs with pofs_move_begin(). */
	smp_rmb();
	moves = total(&a->moves->begun) - room->ended;
	if (most && sum.used + sum.promised > most)
		ret = sum.used - (s64)moves + pages > most ? -ENOSPC : -EAGAIN;
	if (ret) {
		percpu_counter_add(&a->kept, pages);
	} else {
		room->pages = pages;
		pofs_move_begin(a, room->moves);
	}
	spin_unlock(&a->asking);
	return ret;
}

/*
 * Before pages are made, `pages` of them new. -ENOSPC: there is no room. -EAGAIN: nobody can tell,
 * before pofs_room_wait() returns.
 */
int pofs_room_enter(struct pofs_room *room, struct pofs_account *a, long pages, unsigned int moves)
{
	s64 most = READ_ONCE(a->tmpfs->max_blocks);

	*room = (struct pofs_room){ .account = a, .moves = moves };
	/* As a lock would have it. */
	while (pofs_no_lone_wait && waitqueue_active(&a->waiting))
		usleep_range(100, 200);
	if (pages && most && !plenty(a, most, pages))
		return ask(room, pages, most);
	pofs_move_begin(a, moves);
	if (!pages)
		return 0;
	room->pages = pages;
	percpu_counter_add(&a->promised, pages);
	/* Pairs with ask(), and with itself. */
	smp_mb();
	if (!most || plenty(a, most, 0))
		return 0;
	/* Others have promised as much since. */
	pofs_room_leave(room);
	room->moves = moves;
	return ask(room, pages, most);
}

/* Until a move has ended since the last answer. -EINTR: the caller is killed. */
int pofs_room_wait(struct pofs_room *room)
{
	struct pofs_account *a = room->account;

	return wait_event_killable(a->waiting, total(&a->moves->ended) != room->ended) ? -EINTR : 0;
}

/* For new pages, whatever is there. */
int pofs_room_new(struct pofs_room *room, struct pofs_account *a, long pages)
{
	int ret;

	while ((ret = pofs_room_enter(room, a, pages, POFS_PAGE_MOVES)) == -EAGAIN && !(ret = pofs_room_wait(room)))
		;
	return ret;
}

/* For one page of those that were promised for a whole range. */
void pofs_room_take(struct pofs_room *room, struct pofs_room *whole)
{
	*room = (struct pofs_room){ .account = whole->account, .pages = 1, .moves = POFS_PAGE_MOVES };
	whole->pages--;
	pofs_move_begin(room->account, room->moves);
}

/* What was promised is counted, or not made. Does nothing where that was said before. */
void pofs_room_leave(struct pofs_room *room)
{
	/* The pages are counted. Pairs with add_up(). */
	smp_wmb();
	if (room->pages)
		percpu_counter_add(&room->account->kept, room->pages);
	if (room->moves)
		pofs_move_end(room->account, room->moves);
	room->pages = room->moves = 0;
}

/* Whether `most` pages would be enough for all that is there: 0, or -ENOSPC. */
int pofs_account_fits(struct pofs_account *a, s64 most)
{
	struct pofs_room room = { .account = a };
	int ret;

	while ((ret = ask(&room, 0, most)) == -EAGAIN && !(ret = pofs_room_wait(&room)))
		;
	return ret;
}
