// SPDX-License-Identifier: GPL-2.0
/*
 * Loading. pageonefs.h says how the module works, and has its layers and its rules of locking.
 */
#include <linux/module.h>

#include "control.h"
#include "fault.h"
#include "file.h"
#include "holders.h"
#include "names.h"
#include "super.h"
#include "tmpfs.h"
#include "vector.h"

static int __init pofs_start(void)
{
	int ret = pofs_tmpfs_start();

	if (ret) {
		pr_err("pageonefs: this kernel's tmpfs is not as expected (%d)\n", ret);
		return ret;
	}
	pofs_vector_start();
	pofs_holders_start();
	pofs_fault_start();
	pofs_file_start();
	pofs_names_start();
	pofs_control_start();
	ret = pofs_super_start();
	if (ret)
		return ret;
	ret = register_filesystem(&pofs_type);
	if (ret)
		pofs_super_stop();
	return ret;
}

static void __exit pofs_stop(void)
{
	unregister_filesystem(&pofs_type);
	/* Inodes go after a grace period. */
	rcu_barrier();
	pofs_holders_stop();
	pofs_super_stop();
}

module_init(pofs_start);
module_exit(pofs_stop);

MODULE_ALIAS_FS("pageonefs");
MODULE_DESCRIPTION("PageONE: a memory file system whose pages can be merged");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
