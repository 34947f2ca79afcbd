/* SPDX-License-Identifier: GPL-2.0 */
/* Reads of merged pages, at a fault: read.c. */
#ifndef POFS_READ_H
#define POFS_READ_H

#include "inode.h"

vm_fault_t pofs_read_frame(struct vm_fault *vmf, struct pofs_inode *pi);

#endif
