// SPDX-License-Identifier: GPL-2.0
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "protect.h"

/* A userfaultfd of this process; -1: the kernel has no asynchronous write protection. */
int protector(void)
{
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_WP_ASYNC };
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC);

	if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
		close(fd);
		return -1;
	}
	return fd;
}

/* This memory may be protected. */
int protector_add(int fd, char *p, uint32_t pages)
{
	struct uffdio_register all = { { (uintptr_t)p, pages * PAGE }, UFFDIO_REGISTER_MODE_WP, 0 };

	return ioctl(fd, UFFDIO_REGISTER, &all);
}

static long scan(struct pm_scan_arg *arg)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	long ret = ioctl(fd, PAGEMAP_SCAN, arg);

	close(fd);
	return ret;
}

int write_protect(char *p, uint32_t pages)
{
	struct pm_scan_arg arg = {
		.size = sizeof(arg), .flags = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
		.start = (uintptr_t)p, .end = (uintptr_t)p + pages * PAGE,
	};

	return scan(&arg) < 0;
}

/* What is said of one page. */
uint64_t categories(char *p)
{
	uint64_t all = PAGE_IS_WRITTEN | PAGE_IS_FILE | PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
	struct page_region region = { 0 };
	struct pm_scan_arg arg = {
		.size = sizeof(arg), .flags = PM_SCAN_CHECK_WPASYNC, .start = (uintptr_t)p, .end = (uintptr_t)p + PAGE,
		.vec = (uintptr_t)&region, .vec_len = 1, .category_anyof_mask = all, .return_mask = all,
	};

	if (scan(&arg) < 0)
		BAD("PAGEMAP_SCAN");
	return region.categories;
}
