// SPDX-License-Identifier: GPL-2.0
/*
 * Guards that the tests switch off, and what is counted: pageonefs.h.
 */
#include <linux/module.h>

#include "pageonefs.h"

DEFINE_PER_CPU(struct pageonefs_stats, pofs_stats);

#ifdef POFS_SABOTAGE
#define GUARD(name, off)				\
	bool pofs_##name;				\
	module_param_named(name, pofs_##name, bool, 0400); \
	MODULE_PARM_DESC(name, off)

GUARD(no_pin_check, "merge pages that others hold");
GUARD(no_pin_bits, "a harvest does not keep the bits of pages that others hold");
GUARD(no_handshake, "a harvest does not wait for a fault that is under way");
GUARD(no_cut_bits, "holes have their bits only when their call ends");
GUARD(no_compare, "merge without looking at the content");
GUARD(no_punch_check, "punch pages that are pinned");
GUARD(no_huge_bits, "a huge page that is mapped writable has one dirty bit");
GUARD(no_huge_walk, "go from a huge page to the next page as from a small one");
GUARD(no_recall, "pages that are lent leave their file as others do");
GUARD(no_payer, "frames and copies are charged to who makes them");
GUARD(no_sure_charge, "a copy for others waits for room that its payer has no more, and has a task killed");
GUARD(no_adopt, "a frame stays charged to who gave it, when that uses it no more");
GUARD(no_reserve, "who adopts a frame takes all the room that can be found, and has it looked for");
GUARD(no_version_check, "frames are adopted where charges may move by version 1 of control groups, too");
GUARD(no_rest, "each harvest looks at frames that nobody had room for");
GUARD(no_left_list, "frames that were left are looked for among all, 1,024 at a time");
GUARD(no_cache_room, "files' caches leave no room for frames");
GUARD(no_debt_bound, "who owes frames joins more of others");
GUARD(no_stuck_debt, "who has room but for caches that cannot be taken owes nothing");
GUARD(no_common_high, "a frame waits while a cgroup is above high that counts it already");
GUARD(no_high_wait, "who is above high owes");
GUARD(no_one_try, "what could not be taken of caches is tried for each frame");
GUARD(no_settled, "who keeps a frame no more owes it");
GUARD(no_real_room, "frames take all that is free beside caches");
GUARD(no_small_debt, "who owes a frame joins none of others");
GUARD(no_figures, "frames are counted nowhere");
GUARD(no_fork_bound, "fork copies entries of shared mappings, and private ones have as many");
GUARD(no_user_bound, "a frame has any number of users");
GUARD(no_frame_wait, "an entry that has gone does not wait until a fault has mapped its frame");
GUARD(no_copy_room, "a copy of a merged page needs room in the mount, as a new page does");
GUARD(no_room_wait, "a new page is refused while others are counted twice");
GUARD(no_lone_wait, "all wait while somebody waits for room");
GUARD(no_range_room, "an allocation has room for all its pages at its start only");
GUARD(no_take_back, "an allocation that ends early leaves the pages that it made");
GUARD(no_whole_page, "a page becomes private when it is in the file already, and not locked");
GUARD(no_first_check, "what refuses a call is looked at when it has changed something");
GUARD(no_commit, "a file's length is not committed");
GUARD(no_length_bound, "a file is as long as a number can say");
GUARD(no_plain_bound, "a file becomes private in one call");
GUARD(no_bounded_wait, "a punch waits for faults as long as they take, and a harvest for tasks that are throttled");
GUARD(no_end_check, "pages beyond a file's end merge");

unsigned int pofs_slow_us, pofs_slow_around;
module_param_named(slow_around, pofs_slow_around, uint, 0400);
MODULE_PARM_DESC(slow_around, "microseconds between the look for entries around a fault and the mapping");
module_param_named(slow, pofs_slow_us, uint, 0400);
MODULE_PARM_DESC(slow, "microseconds between a dirty bit or an entry and the mapping, between a hole and its bit, and after a huge page");
#endif
