/* SPDX-License-Identifier: GPL-2.0 */
/* Page faults: fault.c. */
#ifndef POFS_FAULT_H
#define POFS_FAULT_H

#include <linux/mm.h>

/* tmpfs's operations with ours in front, as all tables of operations of the module are. */
extern struct vm_operations_struct pofs_vm_ops;
extern const struct vm_operations_struct *pofs_plain_vm_ops;

void pofs_fault_start(void);

#endif
