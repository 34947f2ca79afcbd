/* SPDX-License-Identifier: GPL-2.0 */
#ifndef PPR_STATS_H
#define PPR_STATS_H

void ppr_stats_start(void);
void ppr_stats_stop(void);

#endif
