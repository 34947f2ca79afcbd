// SPDX-License-Identifier: GPL-2.0
/*
 * /sys/kernel/debug/ppr/stats: what was done since the module was loaded, a name and a number in
 * each line.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "pool.h"
#include "stats.h"

static struct dentry *dir;

static int stats_show(struct seq_file *m, void *unused)
{
	struct ppr_stats sum = {};
	int cpu;
	size_t i;

	/* All fields are u64. */
	for_each_possible_cpu(cpu)
		for (i = 0; i < sizeof(sum) / sizeof(u64); i++)
			((u64 *)&sum)[i] += READ_ONCE(((u64 *)per_cpu_ptr(&ppr_stats, cpu))[i]);
#define SHOW(field) seq_printf(m, #field " %llu\n", sum.field)
	SHOW(marked);
	SHOW(marks);
	SHOW(cancelled);
	SHOW(cancels);
	SHOW(leaves);
	SHOW(waits);
	SHOW(wait_ns);
	seq_printf(m, "wait_longest_ns %llu\n", READ_ONCE(ppr_longest_wait_ns));
	SHOW(isolated);
	SHOW(late);
	SHOW(late_frees);
	SHOW(missed);
	SHOW(deferred);
	SHOW(overflows);
	if (ppr_cycles) {
		SHOW(mark_cycles);
		SHOW(cancel_cycles);
	}
#undef SHOW
	seq_printf(m, "marked_now %lu\n", ppr_pool_marked());
	seq_printf(m, "marking %d\n", READ_ONCE(ppr_marking));
	seq_printf(m, "frames %lu\n", ppr_pool.frames);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

void ppr_stats_start(void)
{
	dir = debugfs_create_dir("ppr", NULL);
	debugfs_create_file("stats", 0444, dir, NULL, &stats_fops);
}

void ppr_stats_stop(void)
{
	debugfs_remove_recursive(dir);
}
