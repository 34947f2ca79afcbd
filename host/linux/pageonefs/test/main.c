// SPDX-License-Identifier: GPL-2.0
/*
 * pageonefs-test [NAME...]: runs the tests, each in a process of its own. Needs the file system at
 * /mnt, and root. scripts/lanes/pageonefs.sh runs it in guests.
 */
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

static int chosen(const char *name, int argc, char **argv)
{
	int i;

	for (i = 1; i < argc; i++)
		if (!strcmp(argv[i], name))
			return 1;
	return argc == 1;
}

int main(int argc, char **argv)
{
	const struct test *groups[] = { file_tests, hazard_tests, memory_tests, frame_tests, huge_tests, protect_tests, lend_tests,
		account_tests, committed_tests, held_up_tests, refuse_tests, tenant_tests };
	int passed = 0, failed = 0, status;

	setvbuf(stdout, 0, _IOLBF, 0);
	sh = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (unsigned int g = 0; g < sizeof(groups) / sizeof(*groups); g++) {
		for (const struct test *t = groups[g]; t->name; t++) {
			double start = now();
			pid_t pid;

			if (!chosen(t->name, argc, argv))
				continue;
			memset(sh, 0, sizeof(*sh));
			fflush(stdout);
			pid = fork();
			if (!pid) {
				t->run();
				_exit(!!sh->bad);
			}
			waitpid(pid, &status, 0);
			printf("test %s ... %s, %.1f s\n", t->name, status ? "FAILED" : "ok", now() - start);
			if (status) {
				printf("    it ended with %x\n", status);
				failed++;
			} else {
				passed++;
			}
		}
	}
	/* What frames are left belongs to nobody. */
	struct pageonefs_stats s = stats();

	if (s.frames || s.merged_pages) {
		printf("    FAILED: %lu frames and %lu merged pages are left\n", (long)s.frames, (long)s.merged_pages);
		failed++;
	}
	printf("RESULT %d passed, %d failed\n", passed, failed);
	return !!failed;
}
