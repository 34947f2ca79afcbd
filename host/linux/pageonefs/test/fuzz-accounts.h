/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The fuzzer of accounts: fuzz-accounts.c says how it works.
 */
#ifndef FUZZ_ACCOUNTS_H
#define FUZZ_ACCOUNTS_H

#include <stdbool.h>

#include "pages.h"

#define TENANTS		3
#define DOMAINS		2	/* the last tenant has one of its own */
#define WORKERS		2	/* of a tenant, each a process */
#define HANDS		(TENANTS * WORKERS)
#define DAEMON		HANDS
#define PROCESSES	(HANDS + 1)
#define BLOCK		8	/* pages in a row of the shared file that one worker has */
#define SHARED_PAGES	512
#define OWN_PAGES	256	/* of a worker's own file, at most */
#define TENANT_PAGES	(SHARED_PAGES + WORKERS * OWN_PAGES)
#define KNOWN		(1 << 13)
#define GROUPS		"/sys/fs/cgroup/accounts"
#define ROOMY		(2 * TENANT_PAGES)
#define DOMAIN_OF(tenant) ((tenant) == TENANTS - 1)

/* Whether the mount has a page there. A fault of a hole makes one. */
enum { HERE_NO, HERE_YES, HERE_MAYBE };

/* A page: what it holds, or is about to hold while its version is odd. */
struct model {
	uint64_t is, will;
	uint32_t version;
	uint8_t here;
	bool looked;	/* at a hole, which may have a page since, by another than its owner */
	const char *deed;
	int round;
};

/* Pages of a worker's: of the file that its tenant shares (0), or of its own (1). */
struct range {
	int file;
	uint32_t first, n;
};

enum {
	OP_STORE, OP_TOUCH, OP_LOAD, OP_LOOK, OP_PWRITE, OP_PREAD, OP_PUNCH, OP_PUNCH_UNPINNED, OP_ALLOCATE, OP_ZERO, OP_TRUNCATE,
	OP_RENEW, OP_FORK, OP_REMAP, OP_PRIVATE, OPS
};
enum { DID_MERGE, DID_WRONG, DID_PLAIN, DID_HARVEST, DID_REFUSED, DIDS };

struct world {
	bool faults;
	/* The round: all are parked between two. */
	int round, parking, parked[PROCESSES];
	/* What it is like. */
	bool commit, plain;
	int tight;
	uint32_t size[TENANTS], max_users;
	long swap_pages;
	/* What workers know. */
	struct model pages[TENANTS][TENANT_PAGES];
	struct range pending[HANDS];
	bool active[HANDS];
	uint32_t own[HANDS];
	uint64_t inode[TENANTS][1 + WORKERS];
	char *map[HANDS][2];
	int fd[HANDS][2];
	pid_t pid[HANDS];
	/* What the daemon knows: digests and their frames, and whose page a frame was made of. */
	struct { uint64_t digest, frame; } known[DOMAINS][KNOWN];
	uint8_t maker[DOMAINS][1 << 16];
	long done[OPS], failed[OPS], did[DIDS], kills;
};
extern struct world *w;

static inline uint64_t rnd(uint64_t *r, uint64_t below)
{
	*r = mix(*r);
	return (*r >> 8) % below;
}

/* fuzz-accounts.c */
bool go_on(int process);
void become(uid_t user);
void may_fail(bool on);
int group_write(const char *group, const char *file, long value);
void mount_path(char *path, int tenant);

/* fuzz-accounts-worker.c, fuzz-accounts-daemon.c */
void worker_runs(int number, uint64_t seed, bool first);
void daemon_runs(uint64_t seed);

/* fuzz-accounts-check.c */
void accounts_begin(bool processes);
void accounts_drain(void);
/* What is wrong, or NULL. `used` gets how many pages each mount has. */
const char *accounts_wrong(const pid_t *pids, long *used);
const char *accounts_left(void);
void models_agree(void);
long group_stat(const char *group, const char *name);

#endif
