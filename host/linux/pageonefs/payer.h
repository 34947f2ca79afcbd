/* SPDX-License-Identifier: GPL-2.0 */
/* Memory cgroups that pay, and who keeps a frame that others pay for: payer.c. */
#ifndef POFS_PAYER_H
#define POFS_PAYER_H

#include <linux/memcontrol.h>

#include "pageonefs.h"

/*
 * What a merge allocates it gives back at once, with the page that leaves its file. So limits are
 * passed rather than waited for, and nobody is killed for it.
 */
#define POFS_MERGE_GFP	(__GFP_HIGH | __GFP_KSWAPD_RECLAIM | __GFP_ACCOUNT | __GFP_NOWARN)

/* Who pays for a file. */
struct mem_cgroup *pofs_payer_set(struct mem_cgroup **payer, struct page *page);
struct mem_cgroup *pofs_payer_get(struct mem_cgroup **payer);
int pofs_payer_of(pid_t pid, struct mem_cgroup **payer);
void pofs_payer_clear(struct mem_cgroup **payer);

/* Whether it has room. */
bool pofs_payer_has_room(void);
unsigned long pofs_payer_most(struct mem_cgroup *payer);
struct mem_cgroup *pofs_payer_full(struct mem_cgroup *payer, struct mem_cgroup *pays, bool cache);
struct page *pofs_payer_charge(struct mem_cgroup *payer, struct page *other);

/* Whether `payer` is a cgroup that counts nothing yet of what `pays` pays for. Under RCU. */
static inline bool pofs_payer_new(struct mem_cgroup *payer, struct mem_cgroup *pays)
{
	return payer && !(pays && mem_cgroup_is_descendant(pays, payer));
}

/* Entries whose frame others pay for: of each, where its file has its payer. */
struct pofs_keepers {
	unsigned short full;	/* the number of the cgroup that had no room for the frame; 0: none */
	unsigned int n;
	struct mem_cgroup **files[];
};

bool pofs_keepers_add(struct pofs_keepers **keepers, struct mem_cgroup **file);
unsigned int pofs_keepers_remove(struct pofs_keepers *keepers, struct mem_cgroup **file, unsigned int most);

#endif
