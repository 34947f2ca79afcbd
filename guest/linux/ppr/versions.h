/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The kernels whose every way out of the buddy allocator was read (docs/design/ppr.md). Another
 * version may have another way, and a page that leaves unseen is a page whose content is lost: so
 * others do not compile, and a module of one kernel does not load into another.
 */
#ifndef PPR_VERSIONS_H
#define PPR_VERSIONS_H

#include <linux/version.h>

#define PPR_IS(major, minor, patch) (LINUX_VERSION_CODE == KERNEL_VERSION(major, minor, patch))

#if !(PPR_IS(6, 1, 170) || PPR_IS(6, 1, 176) || PPR_IS(6, 1, 187) || PPR_IS(6, 1, 190) || PPR_IS(6, 1, 192) || \
      PPR_IS(6, 12, 95) || PPR_IS(6, 12, 107) || PPR_IS(6, 12, 111) || PPR_IS(6, 12, 117))
#error "ppr: this kernel's page allocator has not been examined: see docs/design/ppr.md"
#endif
#if !defined(CONFIG_X86_64) || !defined(CONFIG_DYNAMIC_FTRACE_WITH_REGS) || !defined(CONFIG_TRACEPOINTS)
#error "ppr: needs x86-64, ftrace with registers, and tracepoints"
#endif
#if defined(CONFIG_PREEMPT_RT) || defined(CONFIG_KASAN) || defined(CONFIG_KMSAN)
#error "ppr: has not been examined with PREEMPT_RT, KASAN or KMSAN"
#endif

#endif
