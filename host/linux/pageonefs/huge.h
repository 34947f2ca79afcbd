/* SPDX-License-Identifier: GPL-2.0 */
/* Huge pages, until the first merge in their 2 MiB: huge.c. */
#ifndef POFS_HUGE_H
#define POFS_HUGE_H

#include "inode.h"

#define POFS_HUGE_PAGES	PTRS_PER_PTE

bool pofs_huge_whole(struct pofs_inode *pi, struct folio *folio);
bool pofs_huge_wanted(struct pofs_inode *pi, struct vm_fault *vmf);
vm_fault_t pofs_tmpfs_fault(struct vm_fault *vmf, bool huge);
void pofs_huge_split(struct pofs_inode *pi, pgoff_t index);
vm_fault_t pofs_map_small(struct vm_fault *vmf);

#endif
