/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The fuzzer's model: what each byte of each file has to be. fuzz.c says how it works.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdbool.h>

#include "pages.h"

#define OWNERS	8	/* threads that change files */
#define THREADS	2	/* of a process */
#define SHARED	3	/* files that all have open; and one for each owner */
#define FILES	(SHARED + OWNERS)
#define BLOCK	8	/* pages in a row that one owner has in a shared file */
/* Each is as long as a huge page. */
#define HEAD	512	/* pages of a shared file that are owned by blocks, and always there */
#define TAIL	512	/* pages after them, owned by one thread, which changes the file's length */
#define PAGES	(HEAD + TAIL)
#define SLOTS	6	/* mappings of a thread */
#define DISK	(2ul << 20)	/* bytes of the disks that are used, by all and by one owner */

/* What a thread is about to change: each byte of it is still `is`, or already `will`. */
struct pending {
	int active, file;
	uint64_t from, to;
};

/* What an owner has done last. */
#define HISTORY 512
struct deed {
	const char *what;
	int file;
	uint64_t from, len;
	long ret;
};

enum {
	OP_STORE, OP_PWRITE, OP_CHECK, OP_FOREIGN, OP_FALLOCATE, OP_TRUNCATE, OP_ADVISE, OP_MAP, OP_UNMAP, OP_PROTECT,
	OP_REMAP, OP_FORK, OP_DISK_IN, OP_DISK_OUT, OP_VMSPLICE, OP_SPLICE, OP_VM_WRITE, OP_PRIVATE, OP_RENEW, OP_NAMES,
	OP_SEEK, OP_LOCK, OPS
};

/* What all processes share. Odd versions: the page is being changed. */
struct world {
	uint64_t seed, size[FILES];
	bool faults, poison, keep, quiet;
	long done[OPS], failed[OPS], made[9], kills, dirty_checks;
	struct pending pending[OWNERS];
	struct deed history[OWNERS][HISTORY];
	uint32_t deeds[OWNERS];
	uint32_t version[FILES][PAGES];
	char is[FILES][PAGES * PAGE], will[FILES][PAGES * PAGE];
	char disk[DISK];
};
extern struct world *w;

/* A mapping. A private one has its own content, in `copy`, where `cow` says so. */
struct slot {
	char *at, *copy;
	int file, prot;
	uint32_t first, pages;
	bool private, nofork;
	uint64_t cow;
};

struct me {
	int owner;
	uint64_t r;
	int fd[FILES], direct[FILES], disk, scratch, fail;
	bool child;
	struct slot slots[SLOTS];
};

/* fuzz-model.c */
uint64_t rnd(struct me *me, uint64_t below);
void me_open(struct me *me, int owner, uint64_t seed);
void may_fail(struct me *me, bool on);
void own_file(struct me *me);
bool pick(struct me *me, int file, uint64_t most, uint64_t *from, uint64_t *len);
bool mine(struct me *me, int file, uint32_t page);
void content(struct me *me, char *to, uint64_t len);
void note(struct me *me, const char *what, int file, uint64_t from, uint64_t len, long ret);
void change(struct me *me, int file, uint64_t from, uint64_t len);
void changed(struct me *me, bool wholly);
void settle(struct me *me);
void history(int owner, int file, uint64_t from, uint64_t len);
bool right(struct me *me, const char *how, int file, uint64_t from, uint64_t len, const char *seen);
struct slot *slot_new(struct me *me, int file, uint32_t page, uint32_t pages, bool private);
void slot_drop(struct slot *s);
char *mapped(struct me *me, int file, uint64_t from, uint64_t len, int prot);

/* fuzz-ops.c, fuzz-calls.c */
void work(struct me *me, int rounds);
void check_all(struct me *me);
long op_calls(struct me *me, int op);
long op_mappings(struct me *me, int op);

/* fuzz-daemon.c */
void daemon_harvests(uint64_t seed);
void daemon_merges(uint64_t seed);

#endif
