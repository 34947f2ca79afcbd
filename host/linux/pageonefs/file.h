/* SPDX-License-Identifier: GPL-2.0 */
/* Reading, writing, holes and mapping: file.c. */
#ifndef POFS_FILE_H
#define POFS_FILE_H

#include "inode.h"

extern struct file_operations pofs_file_ops;

void pofs_file_start(void);

#endif
