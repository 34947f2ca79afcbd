// SPDX-License-Identifier: GPL-2.0
/*
 * pageonefs: a memory file system whose pages can be merged one by one, below the mappings.
 *
 * It is tmpfs with operations put in front. A mount is made by tmpfs, with tmpfs's inodes, and a
 * page that belongs to one file is an ordinary page of tmpfs: LRU, swap, memory cgroups, NUMA
 * policies, limits, names and rights are tmpfs's own code. Exported symbols give no other way to
 * swap. tmpfs's functions are reached through its tables of operations.
 *
 * A merged page is not in the file's page cache. An entry in pofs_inode.merged says which frame
 * it is: a page of this module, never written, mapped read-only into whoever reads it. A write
 * through any mapping, or by write(2), makes a private page of tmpfs again, and copies the frame
 * into it.
 *
 * Rules:
 *  - private to merged: under the private page's lock, after its mappings are gone and nobody
 *    else holds it. The entry is stored, then the page leaves the file, then it is unlocked.
 *  - merged to private: under the lock of the new private page, which nobody has mapped; the
 *    entry goes under the mapping's lock (pofs_mapping_lock); then the frame's mappings at this
 *    index go.
 *  - A frame is mapped under that lock, with the entry checked under it. So the zap that follows
 *    an erased entry finds every mapping.
 *  - A frame that a fault leaves to the kernel (give_frame) is mapped later, under the frame's own
 *    lock, with the entry checked under that: an entry goes, or names another frame, then that lock
 *    is waited for, then comes the zap. Its holder takes no other lock of ours, and no page's.
 *  - Where there is an entry, a page in the file's cache is a hole that somebody has just filled:
 *    it means nothing until the frame is copied into it. Who makes such a page holds its lock
 *    until then.
 *  - A fault holds the file's `faults` for reading. A file that is punched unless it is pinned
 *    (pofs_punch) has no faults meanwhile, so that no page is mapped, and none can be pinned.
 *  - A huge page is mapped whole while nothing of its 2 MiB is merged: huge.c.
 *  - A page of a store's file may be a frame, too, and leaves the file before others would take it
 *    out: lend.c.
 *  - Whoever changes a file's length or punches holes blocks merges (pofs_block_merges)
 *    meanwhile.
 *
 * docs/design/module.md has the hazards, and what guards against each.
 */
#include <linux/module.h>
#include <linux/slab.h>

#include "pageonefs.h"

struct pofs_base pofs_base;
DEFINE_PER_CPU(struct pageonefs_stats, pofs_stats);

#ifdef POFS_SABOTAGE
bool pofs_no_pin_check;
module_param_named(no_pin_check, pofs_no_pin_check, bool, 0400);
MODULE_PARM_DESC(no_pin_check, "merge pages that others hold");

bool pofs_no_pin_bits;
module_param_named(no_pin_bits, pofs_no_pin_bits, bool, 0400);
MODULE_PARM_DESC(no_pin_bits, "a harvest does not keep the bits of pages that others hold");

bool pofs_no_handshake;
module_param_named(no_handshake, pofs_no_handshake, bool, 0400);
MODULE_PARM_DESC(no_handshake, "a harvest does not wait for a fault that is under way");

bool pofs_no_cut_bits;
module_param_named(no_cut_bits, pofs_no_cut_bits, bool, 0400);
MODULE_PARM_DESC(no_cut_bits, "holes have their bits only when their call ends");

bool pofs_no_compare;
module_param_named(no_compare, pofs_no_compare, bool, 0400);
MODULE_PARM_DESC(no_compare, "merge without looking at the content");

bool pofs_no_punch_check;
module_param_named(no_punch_check, pofs_no_punch_check, bool, 0400);
MODULE_PARM_DESC(no_punch_check, "punch pages that are pinned");

bool pofs_no_huge_bits;
module_param_named(no_huge_bits, pofs_no_huge_bits, bool, 0400);
MODULE_PARM_DESC(no_huge_bits, "a huge page that is mapped writable has one dirty bit");

bool pofs_no_huge_walk;
module_param_named(no_huge_walk, pofs_no_huge_walk, bool, 0400);
MODULE_PARM_DESC(no_huge_walk, "go from a huge page to the next page as from a small one");

bool pofs_no_recall;
module_param_named(no_recall, pofs_no_recall, bool, 0400);
MODULE_PARM_DESC(no_recall, "pages that are lent leave their file as others do");

bool pofs_no_frame_wait;
module_param_named(no_frame_wait, pofs_no_frame_wait, bool, 0400);
MODULE_PARM_DESC(no_frame_wait, "an entry that has gone does not wait until a fault has mapped its frame");

unsigned int pofs_slow_us;
module_param_named(slow, pofs_slow_us, uint, 0400);
MODULE_PARM_DESC(slow, "microseconds between a dirty bit or an entry and the mapping, between a hole and its bit, and after a huge page");
#endif

/* A reference count is an int, and every process that maps a file takes one for each entry. */
unsigned int pofs_max_users = 65536;
module_param_named(max_users, pofs_max_users, uint, 0600);
MODULE_PARM_DESC(max_users, "how many pages of files may use one frame");

struct file_system_type pofs_type = {
	.owner = THIS_MODULE,
	.name = "pageonefs",
	.init_fs_context = pofs_init_fs_context,
	.kill_sb = pofs_kill_sb,
};

/* Looks at a file of tmpfs, to learn its operations. */
static int __init base_read(void)
{
	struct file *file = shmem_file_setup("pageonefs", 0, VM_NORESERVE);
	struct vm_area_struct *vma;
	struct super_block *sb;
	int ret = -ENOMEM;

	if (IS_ERR(file))
		return PTR_ERR(file);
	/* tmpfs's mmap sets vm_ops, and looks at the flags. */
	vma = kzalloc(sizeof(*vma), GFP_KERNEL);
	if (vma) {
		vma->vm_file = file;
		ret = file->f_op->mmap(file, vma);
		pofs_base.vm = vma->vm_ops;
		kfree(vma);
	}
	sb = file_inode(file)->i_sb;
	pofs_base.file = file->f_op;
	pofs_base.inode = file_inode(file)->i_op;
	pofs_base.super = sb->s_op;
	pofs_base.dir = d_inode(sb->s_root)->i_op;
	pofs_base.type = sb->s_type;
	pofs_root_file_ops = *d_inode(sb->s_root)->i_fop;
	fput(file);
	if (!ret && (!pofs_base.vm || !pofs_base.vm->fault || !pofs_base.file->fallocate || !pofs_base.dir->create))
		ret = -EOPNOTSUPP;
	return ret;
}

static int __init pofs_start(void)
{
	int ret = base_read();

	if (ret) {
		pr_err("pageonefs: this kernel's tmpfs is not as expected (%d)\n", ret);
		return ret;
	}
	pofs_inode_ops_start();
	pofs_file_ops_start();
	pofs_vm_ops_start();
	pofs_vector_start();
	pofs_merge_start();
	pofs_root_file_ops.owner = THIS_MODULE;
	pofs_root_file_ops.unlocked_ioctl = pofs_ioctl;
	ret = pofs_inodes_start();
	if (ret)
		return ret;
	ret = register_filesystem(&pofs_type);
	if (ret)
		pofs_inodes_stop();
	return ret;
}

static void __exit pofs_stop(void)
{
	unregister_filesystem(&pofs_type);
	/* Inodes go after a grace period. */
	rcu_barrier();
	pofs_merge_stop();
	pofs_inodes_stop();
}

module_init(pofs_start);
module_exit(pofs_stop);

MODULE_ALIAS_FS("pageonefs");
MODULE_DESCRIPTION("PageONE: a memory file system whose pages can be merged");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
