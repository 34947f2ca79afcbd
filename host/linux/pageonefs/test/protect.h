/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Asynchronous write protection by userfaultfd, and what /proc/self/pagemap says of it.
 */
#ifndef PROTECT_H
#define PROTECT_H

#include <linux/fs.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

#include "pages.h"

/* What the headers of older kernels lack. */
#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif
#ifndef PAGEMAP_SCAN
#define PAGE_IS_WRITTEN		(1 << 1)
#define PAGE_IS_FILE		(1 << 2)
#define PAGE_IS_PRESENT		(1 << 3)
#define PAGE_IS_SWAPPED		(1 << 4)
#define PM_SCAN_WP_MATCHING	(1 << 0)
#define PM_SCAN_CHECK_WPASYNC	(1 << 1)
struct page_region {
	uint64_t start, end, categories;
};
struct pm_scan_arg {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#endif

int protector(void);
int protector_add(int fd, char *p, uint32_t pages);
int write_protect(char *p, uint32_t pages);
uint64_t categories(char *p);

#endif
