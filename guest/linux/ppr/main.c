// SPDX-License-Identifier: GPL-2.0
/*
 * Per-Page Recycler, the guest's side: tells the host which pages this guest does not need, without
 * a word between them.
 *
 * The pool is BAR 2 of an ivshmem-plain device, which may come and go: while there is none, nothing
 * is watched and nothing marked. A device is refused where it is not sure that every page that
 * leaves the buddy allocator is seen. When it is unplugged, or the module unloaded, every mark is
 * cancelled. A guest that ends in order (reboot, kexec, panic) does that too.
 */
#include <linux/cc_platform.h>
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/init.h>
#include <linux/io.h>
#include <linux/memory.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/panic_notifier.h>
#include <linux/pci.h>
#include <linux/reboot.h>
#include <linux/suspend.h>
#include <linux/version.h>
#include <linux/workqueue.h>

#include "hooks.h"
#include "pool.h"
#include "stats.h"
#include "versions.h"

#define IVSHMEM_VENDOR	0x1af4
#define IVSHMEM_DEVICE	0x1110
#define IVSHMEM_BAR	2

bool ppr_check;
module_param_named(check, ppr_check, bool, 0644);
MODULE_PARM_DESC(check, "look at every allocation for a page that is still marked (costs time; the count 'missed' has to stay 0)");

bool ppr_cycles;
module_param_named(cycles, ppr_cycles, bool, 0644);
MODULE_PARM_DESC(cycles, "count the cycles that marks and cancels take");

static unsigned int period_ms = 100;
module_param(period_ms, uint, 0444);
MODULE_PARM_DESC(period_ms, "how often blocks freed past the per-CPU lists are marked, in milliseconds");

static struct pci_dev *device;
static void *mapping;
static bool mapped_uncached;

/* ---- the pool's device ------------------------------------------------------------ */

static void pool_unmap(void)
{
	if (!mapping)
		return;
	if (mapped_uncached)
		iounmap((void __iomem *)mapping);
	else
		memunmap(mapping);
	mapping = NULL;
}

/* BAR 2 is memory. A kernel whose MTRRs say otherwise maps it write-combining, which is correct,
 * and slower. */
static int pool_map(struct pci_dev *pdev)
{
	resource_size_t start = pci_resource_start(pdev, IVSHMEM_BAR);
	size_t len = pci_resource_len(pdev, IVSHMEM_BAR);

	mapped_uncached = false;
	mapping = memremap(start, len, MEMREMAP_WB);
	if (!mapping) {
		mapped_uncached = true;
		mapping = (void __force *)ioremap_wc(start, len);
	}
	return mapping ? 0 : -ENOMEM;
}

static void device_close(void)
{
	pool_unmap();
	pci_release_region(device, IVSHMEM_BAR);
	pci_disable_device(device);
	pci_dev_put(device);
	device = NULL;
}

/* -ENODEV: its memory is no pool. */
static int device_open(struct pci_dev *pdev)
{
	int err;

	if (!pci_resource_len(pdev, IVSHMEM_BAR))
		return -ENODEV;
	err = pci_enable_device(pdev);
	if (err)
		return err;
	err = pci_request_region(pdev, IVSHMEM_BAR, "ppr");
	if (err) {
		pr_warn("ppr: the memory of %s is in use by another driver (%d)\n", pci_name(pdev), err);
		pci_disable_device(pdev);
		return err;
	}
	device = pci_dev_get(pdev);
	err = pool_map(pdev);
	if (!err)
		err = ppr_pool_open(mapping, pci_resource_len(pdev, IVSHMEM_BAR), ppr_last_frame());
	if (err)
		device_close();
	return err;
}

/* ---- marking, and not ------------------------------------------------------------ */

static DEFINE_MUTEX(marks_lock);
/* How many reasons there are not to mark; that there is no device is one. */
static unsigned int holds = 1;
/* The host was found to hold pages for too long: one more reason. */
static bool stuck;

/* After this nothing is marked, until it is released. Pages that a host is zeroing at this moment
 * stay claimed. */
static void marks_hold(void)
{
	mutex_lock(&marks_lock);
	if (!holds++) {
		WRITE_ONCE(ppr_marking, false);
		/* Marking code holds a zone's lock, with interrupts off. */
		synchronize_rcu();
		ppr_pool_cancel_all();
	}
	mutex_unlock(&marks_lock);
}

static void marks_release(void)
{
	mutex_lock(&marks_lock);
	if (!--holds) {
		WRITE_ONCE(ppr_marking, true);
		ppr_mark_free_lists(0);
	}
	mutex_unlock(&marks_lock);
}

static void work_fn(struct work_struct *work);
/* Deferrable: a guest that sleeps is not woken for this. */
static DECLARE_DEFERRABLE_WORK(work, work_fn);

static void work_fn(struct work_struct *unused)
{
	if (atomic_read(&ppr_stuck) && !stuck) {
		stuck = true;
		marks_hold();
		pr_warn("ppr: the host has held pages for more than a second: nothing is marked until it lets go\n");
	}
	if (stuck && !ppr_pool_claimed()) {
		stuck = false;
		atomic_set(&ppr_stuck, 0);
		marks_release();
		pr_info("ppr: the host has let go of all pages: marking again\n");
	}
	ppr_mark_deferred();
	schedule_delayed_work(&work, msecs_to_jiffies(period_ms));
}

/*
 * Tracepoints do not fire on a processor that is not online (tracepoint.h). So while one comes or
 * goes there are no marks, and what it may allocate need not be seen.
 */
static int cpu_changes(unsigned int cpu)
{
	marks_hold();
	if (ppr_pool_wait_claims(10, true))
		return 0;
	marks_release();
	pr_err("ppr: the host holds pages: processor %u cannot come or go before it lets go of them\n", cpu);
	return -EBUSY;
}

static int cpu_changed(unsigned int cpu)
{
	marks_release();
	return 0;
}

static int cpu_prepare_state, cpu_online_state;

static void cpus_stop(void)
{
	cpus_read_lock();
	__cpuhp_remove_state_cpuslocked(cpu_online_state, false);
	__cpuhp_remove_state_cpuslocked(cpu_prepare_state, false);
	cpus_read_unlock();
}

static int cpus_start(void)
{
	int ret;

	/* Up: prepare, (the processor starts), online. Down: the same backwards. Both at once, or a hold
	 * could be left over. */
	cpus_read_lock();
	ret = cpuhp_setup_state_nocalls_cpuslocked(CPUHP_BP_PREPARE_DYN, "ppr:prepare", cpu_changes, cpu_changed);
	if (ret >= 0) {
		cpu_prepare_state = ret;
		ret = cpuhp_setup_state_nocalls_cpuslocked(CPUHP_AP_ONLINE_DYN, "ppr:online", cpu_changed, cpu_changes);
		if (ret >= 0)
			cpu_online_state = ret;
		else
			__cpuhp_remove_state_cpuslocked(cpu_prepare_state, false);
	}
	cpus_read_unlock();
	return min(ret, 0);
}

/* Memory passes to a kernel that does not know of the pool. Waits until the host has nothing in its
 * hands. */
static int on_reboot(struct notifier_block *nb, unsigned long action, void *data)
{
	cancel_delayed_work_sync(&work);
	marks_hold();
	if (!ppr_pool_wait_claims(60, true))
		pr_emerg("ppr: the host still holds pages: it may zero pages of the next kernel\n");
	return NOTIFY_DONE;
}

/* The other processors are stopped, wherever they were. */
static int on_panic(struct notifier_block *nb, unsigned long action, void *data)
{
	WRITE_ONCE(ppr_marking, false);
	ppr_pool_cancel_all();
	ppr_pool_wait_claims(5, false);
	return NOTIFY_DONE;
}

/*
 * A device that is asleep, or not set up yet, reads as all ones: every page would seem claimed, and
 * be waited for. And an image on disk knows nothing of marks that were made after it.
 */
static int on_pm(struct notifier_block *nb, unsigned long action, void *data)
{
	if (action != PM_SUSPEND_PREPARE && action != PM_HIBERNATION_PREPARE && action != PM_RESTORE_PREPARE)
		return NOTIFY_DONE;
	pr_err("ppr: this guest cannot sleep while its free pages are recycled: unload the module first\n");
	return notifier_from_errno(-EBUSY);
}

/*
 * Memory that goes offline leaves the free lists without being allocated, and memory that comes may
 * start with its own struct pages, which never see an allocator.
 */
static int on_memory(struct notifier_block *nb, unsigned long action, void *data)
{
	struct memory_notify *arg = data;

	/* What was freed there and waits to be marked is looked at no more: its struct pages may be about
	 * to go. */
	if (action == MEM_OFFLINE)
		ppr_mark_deferred();
	if (action == MEM_OFFLINE || action == MEM_GOING_ONLINE)
		ppr_cancel(arg->start_pfn, arg->nr_pages);
	return NOTIFY_OK;
}

static struct notifier_block reboot_nb = { .notifier_call = on_reboot };
static struct notifier_block panic_nb = { .notifier_call = on_panic };
static struct notifier_block pm_nb = { .notifier_call = on_pm };
static struct notifier_block memory_nb = { .notifier_call = on_memory };

static void notifiers_stop(void)
{
	unregister_memory_notifier(&memory_nb);
	unregister_pm_notifier(&pm_nb);
	atomic_notifier_chain_unregister(&panic_notifier_list, &panic_nb);
	unregister_reboot_notifier(&reboot_nb);
}

static int notifiers_start(void)
{
	int ret = register_reboot_notifier(&reboot_nb);

	if (!ret)
		ret = atomic_notifier_chain_register(&panic_notifier_list, &panic_nb);
	if (!ret)
		ret = register_pm_notifier(&pm_nb);
	if (!ret)
		ret = register_memory_notifier(&memory_nb);
	if (ret)
		notifiers_stop();
	return ret;
}

/* ---- coming and going ------------------------------------------------------------ */

/* Whether pages may change while they are free, and nobody checks that they have not. */
static int kernel_fits(void)
{
	const char *why = NULL;

	if (cc_platform_has(CC_ATTR_MEM_ENCRYPT) || cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT))
		why = "this guest's memory is encrypted, the host cannot take pages of it back";
	else if (page_poisoning_enabled())
		why = "page_poison checks that free pages keep their content";
	else if (debug_pagealloc_enabled())
		why = "debug_pagealloc keeps guard pages beside the free lists";
	if (!why)
		return 0;
	pr_err("ppr: refused: %s\n", why);
	return -EOPNOTSUPP;
}

/* A device has come: starts with what it finds in the pool, which another kernel may have left. */
static int start(struct pci_dev *pdev)
{
	int ret = device_open(pdev);

	if (ret)
		return ret;
	/* What was left over when the last device went. */
	holds = 1;
	stuck = false;
	atomic_set(&ppr_stuck, 0);
	/* Marks of a kernel that went before, and what the host still does about them. */
	ppr_pool_cancel_all();
	if (!ppr_pool_wait_claims(10, true)) {
		pr_err("ppr: a host has held pages for 10 seconds: it is dead or stopped; start it again first\n");
		ret = -EBUSY;
		goto close;
	}
	ret = ppr_hooks_cancel_start();
	if (ret)
		goto close;
	ret = notifiers_start();
	if (ret)
		goto hooks;
	ret = cpus_start();
	if (ret)
		goto notifiers;
	ret = ppr_hooks_mark_start();
	if (ret)
		goto cpus;
	ppr_stats_start();
	atomic64_set(&ppr_pool.header[PPR_H_GUEST_STATE], PPR_GUEST_ACTIVE);
	atomic64_inc(&ppr_pool.header[PPR_H_GUEST_STARTS]);
	marks_release();
	schedule_delayed_work(&work, msecs_to_jiffies(period_ms));
	pr_info("ppr: %s: a pool for %lu pages, %s; %lu pages marked\n", pci_name(device), ppr_pool.frames,
		mapped_uncached ? "mapped write-combining (slow)" : "cached", ppr_pool_marked());
	return 0;

cpus:
	cpus_stop();
notifiers:
	notifiers_stop();
hooks:
	ppr_hooks_cancel_stop();
close:
	device_close();
	return ret;
}

/* The device goes. When this returns nothing is marked or claimed, and nothing touches the pool. */
static void stop(void)
{
	unsigned int seconds = 0;

	atomic64_set(&ppr_pool.header[PPR_H_GUEST_STATE], PPR_GUEST_LEAVING);
	ppr_stats_stop();
	cancel_delayed_work_sync(&work);
	ppr_hooks_mark_stop();
	marks_hold();
	/* What the host has in its hands must not be used until it lets go, and only the hooks see to
	 * that. */
	while (!ppr_pool_wait_claims(1, true))
		if (!(++seconds % 10))
			pr_warn("ppr: stopping waits for the host to let go of pages, %u s now: start the host again\n", seconds);
	cpus_stop();
	notifiers_stop();
	ppr_hooks_cancel_stop();
	atomic64_set(&ppr_pool.header[PPR_H_GUEST_STATE], PPR_GUEST_ABSENT);
	device_close();
	pr_info("ppr: every mark is cancelled\n");
}

/* Devices are found, come and go on several threads; there is one pool at a time. */
static DEFINE_MUTEX(pool_lock);

static int ppr_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int ret = -EBUSY;

	mutex_lock(&pool_lock);
	if (device)
		pr_warn("ppr: %s is left alone: there is a pool already\n", pci_name(pdev));
	else
		ret = start(pdev);
	mutex_unlock(&pool_lock);
	return ret;
}

static void ppr_remove(struct pci_dev *pdev)
{
	mutex_lock(&pool_lock);
	if (device == pdev)
		stop();
	mutex_unlock(&pool_lock);
}

static const struct pci_device_id ppr_ids[] = {
	{ PCI_DEVICE(IVSHMEM_VENDOR, IVSHMEM_DEVICE) },
	{ }
};
MODULE_DEVICE_TABLE(pci, ppr_ids);

static struct pci_driver ppr_driver = {
	.name = "ppr",
	.id_table = ppr_ids,
	.probe = ppr_probe,
	.remove = ppr_remove,
};

static int __init ppr_init(void)
{
	int ret = kernel_fits();

	if (!ret)
		ret = ppr_hooks_init();
	if (ret)
		return ret;
	ret = pci_register_driver(&ppr_driver);
	if (ret)
		ppr_hooks_exit();
	else if (!READ_ONCE(device))
		pr_info("ppr: waits for an ivshmem device that the host has initialised as a pool\n");
	return ret;
}

static void __exit ppr_exit(void)
{
	pci_unregister_driver(&ppr_driver);
	ppr_hooks_exit();
}

module_init(ppr_init);
module_exit(ppr_exit);

MODULE_DESCRIPTION("Per-Page Recycler: lets the host take back pages that this guest has freed");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
