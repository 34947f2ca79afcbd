/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the tests share: pages with a known content, files on a mount, and the control interface.
 */
#ifndef PAGES_H
#define PAGES_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "../uapi.h"

#define PAGE 4096ul
#define MOUNT "/mnt"

/* What the processes of a test share. */
struct shared {
	int stop, bad;
	long checks, writes;
};
extern struct shared *sh;

/* Notes that the test has failed, and goes on. */
#define BAD(...) do {								\
	int errno_ = errno;							\
	printf("    FAILED: " __VA_ARGS__);					\
	printf(" (%s:%d, errno %s)\n", __func__, __LINE__, strerror(errno_));	\
	__atomic_add_fetch(&sh->bad, 1, 5);					\
} while (0)
#define CHECK(condition) do { if (!(condition)) BAD("%s", #condition); } while (0)

/* Page contents: each number is another content; 0 is zeros. */
uint64_t mix(uint64_t x);
void fill_words(void *page, uint64_t content, int from, int to);
void fill(void *page, uint64_t content);
int holds(const void *page, uint64_t content);
double now(void);

static inline char *at(char *memory, uint32_t index)
{
	return memory + index * PAGE;
}

/* A file of MOUNT without a name, as long as so many pages, and its id. */
struct file {
	int fd;
	uint64_t id;
	uint32_t pages;
};
struct file file_make(uint32_t pages);
char *file_map(struct file f);
char *file_map_privately(struct file f);
/* As memcpy(), memcmp() and madvise(), of memory that may have SIGBUS: -1 then. */
void catch_faults(void);
int copy_guarded(void *to, const void *from, size_t len);
int compare_guarded(const void *a, const void *b, size_t len);
int advise_guarded(void *at, size_t len, int advice);
int path_write(const char *path, const char *value);
long path_number(const char *path, const char *name);

/* The control interface, of the mount MOUNT. Each notes failures. */
int control_open(const char *mount);
struct pageonefs_stats stats(void);
struct pageonefs_file describe(uint64_t id);
uint64_t id_of(int fd);
int digests(struct file f, uint64_t *out);
int harvest(struct file f, uint64_t *bits);
/* Returns the result; *frame as in struct pageonefs_entry. */
int merge_page(struct file f, uint32_t index, uint64_t *frame);
/* The same, of a file of any mount; and until a page that was just made is in no batch any more. */
int merge_in(int mount, struct file f, uint32_t index, uint64_t *frame);
int merge_patiently(int mount, struct file f, uint32_t index, uint64_t *frame);
uint64_t punch(struct file f, uint32_t start, uint32_t pages);
/* lend.c: a file, of a store or of a mount of one domain, with a mapping. */
struct lender {
	int control;
	struct file f;
	char *m;
};
struct lender guest_make(const char *path, uint32_t pages);
/* A store of the domain that this guest's mount has. */
struct lender store_make(struct lender *guest, uint32_t pages);
void area_close(struct lender *a, const char *path);
/* The error number of PAGEONEFS_SLOT, with a page that this process pays for; 0: it is made. */
int slot_make(struct lender *store, uint32_t index, pid_t pid);
pid_t fork_child(void);
/* Merges all pages that have a double in the file, or a frame that this process has seen. */
int merge_round(struct file f);
/* Fills all pages with a content and merges them; a second call has them in the same frame. */
void all_merged(struct file f, char *memory, uint64_t content);
void say(const char *test);
/* tenants.c: memory cgroups, with a limit, and a process in one. */
#define CGROUPS "/sys/fs/cgroup/"
void make_group(const char *group, const char *limit);
pid_t fork_in(const char *group);
/* hazards.c: a process that merges, and sees that what changes is dirty. */
pid_t harvester(struct file f);

struct test {
	const char *name;
	void (*run)(void);
};
extern const struct test file_tests[], hazard_tests[], memory_tests[], frame_tests[], huge_tests[], protect_tests[];
extern const struct test lend_tests[], account_tests[], committed_tests[], held_up_tests[], refuse_tests[], tenant_tests[];

/* Parameters of the module. */
#define PARAMETERS "/sys/module/pageonefs/parameters/"

#endif
