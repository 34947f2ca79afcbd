/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The kernels that the tests run on, and what differs between them. The module builds upon tmpfs's
 * own operations, so another series has to be read first (docs/design/module.md).
 */
#ifndef PAGEONEFS_VERSIONS_H
#define PAGEONEFS_VERSIONS_H

#include <linux/eventfd.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/pagevec.h>
#include <linux/version.h>

#define POFS_SERIES(major, minor) \
	(LINUX_VERSION_CODE >= KERNEL_VERSION(major, minor, 0) && LINUX_VERSION_CODE < KERNEL_VERSION(major, minor + 1, 0))

#if !POFS_SERIES(6, 1) && !POFS_SERIES(6, 12)
#error "pageonefs: this kernel's tmpfs has not been examined: see docs/design/module.md"
#endif
#if !defined(CONFIG_X86_64) || !defined(CONFIG_SHMEM) || !defined(CONFIG_TMPFS) || !defined(CONFIG_MEMCG)
#error "pageonefs: needs x86-64, tmpfs and memory cgroups"
#endif

/* Its code changes in one step, as move_charge() wants. */
#if !defined(CONFIG_JUMP_LABEL)
#error "pageonefs: needs a kernel with CONFIG_JUMP_LABEL"
#endif

#if POFS_SERIES(6, 12)
typedef struct mnt_idmap pofs_idmap;
typedef struct folio pofs_begun;
#define POFS_NO_IDMAP	(&nop_mnt_idmap)
#define pofs_page_of(begun, index) folio_file_page(begun, index)
#define POFS_SPLICE_READ copy_splice_read

static inline void pofs_remove_page(struct address_space *mapping, struct page *page)
{
	generic_error_remove_folio(mapping, page_folio(page));
}

static inline void pofs_release_batch(struct folio_batch *batch)
{
	__folio_batch_release(batch);
}

static inline void pofs_vma_flags(struct vm_area_struct *vma, unsigned long flags)
{
	vm_flags_set(vma, flags);
}

/* Of a copy of a mapping. */
static inline void pofs_copy_flags(struct vm_area_struct *copy, unsigned long flags)
{
	vm_flags_init(copy, flags);
}

static inline void pofs_signal(struct eventfd_ctx *news)
{
	eventfd_signal(news);
}
#else
typedef struct user_namespace pofs_idmap;
typedef struct page pofs_begun;
#define POFS_NO_IDMAP	(&init_user_ns)
#define pofs_page_of(begun, index) (begun)
#define POFS_SPLICE_READ generic_file_splice_read

static inline void pofs_remove_page(struct address_space *mapping, struct page *page)
{
	generic_error_remove_page(mapping, page);
}

static inline void pofs_release_batch(struct folio_batch *batch)
{
	__pagevec_release((struct pagevec *)batch);
}

static inline void pofs_vma_flags(struct vm_area_struct *vma, unsigned long flags)
{
	vma->vm_flags |= flags;
}

static inline void pofs_copy_flags(struct vm_area_struct *copy, unsigned long flags)
{
	copy->vm_flags = flags;
}

static inline void pofs_signal(struct eventfd_ctx *news)
{
	eventfd_signal(news, 1);
}
#endif

#endif
