// SPDX-License-Identifier: GPL-2.0
/*
 * Guards that the tests switch off, and what is counted: pageonefs.h.
 */
#include <linux/module.h>

#include "pageonefs.h"

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
