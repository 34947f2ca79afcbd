/* SPDX-License-Identifier: GPL-2.0 */
/* The control interface: control.c. */
#ifndef POFS_CONTROL_H
#define POFS_CONTROL_H

void pofs_control_start(void);

#endif
