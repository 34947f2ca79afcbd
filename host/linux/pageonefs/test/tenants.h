/* SPDX-License-Identifier: GPL-2.0 */
/* What tests of memory cgroups share: tenants.c. */
#ifndef TENANTS_H
#define TENANTS_H

#include "pages.h"

#define TENANTS	CGROUPS "tenants/"
#define DAEMON	CGROUPS "daemon/"

long number(const char *path);
void groups_make(void);
void groups_end(void);
/* By a process of this group, which has then ended. */
void within(const char *group, void (*act)(struct lender *), struct lender *a);
void end(pid_t child);
/* The group is charged for so many pages, and the daemon's for nothing. */
void charged(const char *group, uint64_t pages, const char *when);
/* left.c: a giver, and a keeper that joins its frames, each in a group of its own. */
enum { LEFT = 8192 };
extern struct lender giver, keeper;
extern uint64_t generation;
struct lender lender_make(void);
void two_make(void);
void two_end(void);
/* The keeper's pages join the giver's frames; then the giver writes over its own. */
void share(void);
void give_up(void);
void harvest_times(int n);
/* The keeper's last page joins that of the giver. */
void join_last(struct lender *of);
/* Harvests until the group is charged for so many bytes, and for half a minute at most. */
long harvest_until(const char *group, long bytes);
void memcg_left(void);
void memcg_runs(void);
void memcg_room(void);
void memcg_rest(void);
void memcg_far(void);
void memcg_version(void);
/* debts.c */
void memcg_cache(void);
void memcg_debt(void);
void memcg_turns(void);
void memcg_stuck(void);
void memcg_high(void);
void memcg_common(void);
void memcg_settled(void);

#endif
