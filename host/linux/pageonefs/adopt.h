/* SPDX-License-Identifier: GPL-2.0 */
/* Who pays for a frame: adopt.c. */
#ifndef POFS_ADOPT_H
#define POFS_ADOPT_H

#include "frame.h"

int pofs_frame_join(struct pofs_domain *domain, struct page *frame, struct mem_cgroup *user, struct mem_cgroup **file);
void pofs_frame_leave(struct pofs_domain *domain, struct page *frame, bool alien, struct mem_cgroup **file);
void pofs_adopt(struct pofs_domain *domain);

#endif
