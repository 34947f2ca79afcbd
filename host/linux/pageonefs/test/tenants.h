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
void memcg_left(void);
void memcg_runs(void);
void memcg_room(void);
void memcg_rest(void);
void memcg_far(void);
void memcg_version(void);

#endif
