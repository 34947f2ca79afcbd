/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A worker of the fuzzer of accounts: what it has, and what it knows.
 */
#ifndef FUZZ_ACCOUNTS_WORKER_H
#define FUZZ_ACCOUNTS_WORKER_H

#include "fuzz-accounts.h"

#define MOST 8	/* pages of a call */

struct hand {
	int number, tenant, control, fd[2];
	uint64_t r, id[2];
	char *map[2];
	bool room;
};
extern struct hand me;
extern char buf[MOST * PAGE];

/* What a change is to leave there. */
enum { SAME, CONTENTS, HOLES };

uint64_t some(uint64_t below);
struct model *model(const struct range *g, uint32_t i);
char *there(const struct range *g);
bool pick(struct range *g, uint32_t most);
void change(const struct range *g, const char *deed, int what);
void changed(const struct range *g, int here);
void look_for_room(void);
void wrong(const struct range *g, uint32_t i, const char *how, const char *seen);
void refused(const struct range *g, uint32_t i, const char *what, int error);
void settle(const struct range *g, bool half);
void map_file(int file);
long renew(void);

/* fuzz-accounts-ops.c */
long do_one(int op);

#endif
