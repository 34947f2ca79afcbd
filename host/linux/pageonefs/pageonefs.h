/* SPDX-License-Identifier: GPL-2.0 */
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
 *   struct pofs_super --domain--> struct pofs_domain
 *    a mount                       mounts that share frames
 *     | files[id]                   | frames[handle]
 *     v                             v
 *   struct pofs_inode --merged[index]--> frame: a struct page, `private` counts its entries
 *    a file                              ^
 *     | | |                              |
 *     | | +--lent[index]-----------------+ of a store: page of the file and frame, too
 *     | +--dirty[index / POFS_DIRTY_BITS]--> a page of bits
 *     +--shmem.vfs_inode.i_mapping[index]--> a private page, of tmpfs
 *
 * Layers: a file uses those below it, none above and none beside it. scripts/floors.sh checks that.
 *
 *   main                         loading
 *   control                      ioctls on a mount's root
 *   super                        mounts, their options; stores
 *   names                        directories, lengths, how a file ends
 *   file  punch                  read(2), write(2), holes, mmap(2); punching for the daemon
 *   fault  merge  scan  lend     faults; merging; dirty bits and digests; pages of stores
 *   read   holders               reads of frames; who else holds a page
 *   huge                         huge pages, until the first merge in their 2 MiB
 *   inode                        a file: its entries, its dirty bits, who keeps merges away
 *   adopt                        who pays for a frame
 *   frame                        frames and domains
 *   mapping  vector  payer       page caches and page tables; the content of pages; memory cgroups
 *   account                      the pages of a mount, and its limit
 *   tmpfs                        its operations
 *   guards                       what tests switch off, and what is counted
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
 *    until then. If it stays without content, it leaves the file before it is unlocked.
 *  - Pages are made and merged within a mount's account (pofs_room): account.c. Who asks for new
 *    ones may wait for others who make some: without `faults`, and before any lock of pages.
 *    Mappings of stores, and on 6.1 of plain files, are tmpfs's own: their pages are counted, and
 *    not refused.
 *  - A fault holds the file's `faults` for reading. A file that is punched unless it is pinned
 *    (pofs_punch) has no faults meanwhile, so that no page is mapped, and none can be pinned. A
 *    fault may sleep for seconds (memory.high): so they are waited for some milliseconds only.
 *  - A huge page is mapped whole while nothing of its 2 MiB is merged: huge.c.
 *  - A page of a store's file may be a frame, too, and leaves the file before others would take it
 *    out: lend.c.
 *  - Whoever changes a file's length or punches holes blocks merges (pofs_block_merges)
 *    meanwhile.
 *
 * docs/design/module.md has the hazards, and what guards against each.
 */
#ifndef PAGEONEFS_H
#define PAGEONEFS_H

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/percpu.h>

#include "uapi.h"
#include "versions.h"

/*
 * Guards that are off, with which the tests have to fail: parameters of a module that is built for
 * that alone, with PAGEONEFS_SABOTAGE=y.
 */
#ifdef POFS_SABOTAGE
#define POFS_GUARD(name) extern bool pofs_##name
extern unsigned int pofs_slow_us, pofs_slow_around;
#else
#define POFS_GUARD(name) static const bool __maybe_unused pofs_##name
#define pofs_slow_us 0
#define pofs_slow_around 0
#endif
POFS_GUARD(no_pin_check); POFS_GUARD(no_pin_bits); POFS_GUARD(no_handshake);
POFS_GUARD(no_cut_bits); POFS_GUARD(no_compare); POFS_GUARD(no_punch_check);
POFS_GUARD(no_huge_bits); POFS_GUARD(no_frame_wait); POFS_GUARD(no_recall);
POFS_GUARD(no_huge_walk); POFS_GUARD(no_payer); POFS_GUARD(no_sure_charge);
POFS_GUARD(no_adopt); POFS_GUARD(no_figures); POFS_GUARD(no_fork_bound);
POFS_GUARD(no_user_bound); POFS_GUARD(no_copy_room); POFS_GUARD(no_room_wait);
POFS_GUARD(no_lone_wait); POFS_GUARD(no_range_room); POFS_GUARD(no_take_back);
POFS_GUARD(no_whole_page); POFS_GUARD(no_first_check); POFS_GUARD(no_commit);
POFS_GUARD(no_length_bound); POFS_GUARD(no_end_check); POFS_GUARD(no_plain_bound);
POFS_GUARD(no_bounded_wait); POFS_GUARD(no_reserve); POFS_GUARD(no_version_check);
POFS_GUARD(no_rest); POFS_GUARD(no_left_list); POFS_GUARD(no_cache_room);
POFS_GUARD(no_debt_bound); POFS_GUARD(no_small_debt); POFS_GUARD(no_stuck_debt);
POFS_GUARD(no_common_high); POFS_GUARD(no_high_wait); POFS_GUARD(no_one_try);
POFS_GUARD(no_settled); POFS_GUARD(no_real_room);

/* All fields of the statistics that are counted here. */
DECLARE_PER_CPU(struct pageonefs_stats, pofs_stats);
#define pofs_count(field) this_cpu_inc(pofs_stats.field)
#define pofs_count_by(field, n) this_cpu_add(pofs_stats.field, n)

#endif
