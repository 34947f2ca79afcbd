// SPDX-License-Identifier: GPL-2.0
/*
 * pageonefs-merge: merges what is equal in all files of /mnt, until it is ended by SIGTERM.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pages.h"

static volatile int stop;

static void on_term(int s)
{
	(void)s;
	stop = 1;
}

int main(void)
{
	struct pageonefs_file files[64];
	long merged = 0, rounds = 0, most = 0;

	sh = calloc(1, sizeof(*sh));
	signal(SIGTERM, on_term);
	for (; !stop; rounds++) {
		struct pageonefs_list l = { .files = (uintptr_t)files, .room = 64 };

		if (ioctl(control_open(MOUNT), PAGEONEFS_LIST, &l))
			BAD("list");
		for (uint32_t i = 0; i < l.filled; i++)
			merged += merge_round((struct file){ -1, files[i].id, files[i].size / PAGE });
		if ((long)stats().merged_pages > most)
			most = stats().merged_pages;
		usleep(200000);
	}
	say("merger");
	printf("MERGER %ld pages merged, %ld at most at a time, in %ld rounds, %d failed\n", merged, most, rounds, sh->bad);
	return !!sh->bad;
}
