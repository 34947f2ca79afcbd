/* Merging of guest memory for virtual machine monitors: link with -lpageone_agent.
 *
 * Functions return 0, or -1; then pageone_error() says why. Nothing that they refuse stops the
 * program: its guests run, unmerged. Any thread may call them, but no signal handler.
 *
 * Until version 1.0 of the library this interface may change. From then on structures only grow,
 * and `size` tells versions apart.
 */
#ifndef PAGEONE_H
#define PAGEONE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What pageone_start() is told. Set `size` to sizeof(struct pageone_options), and what you do not
 * know to 0. */
struct pageone_options {
    size_t size;
    /* The daemon's socket for agents. Null: that of PAGEONE_SOCKET in the environment, else the
     * system's, /run/pageone/agent.sock. */
    const char *socket;
};

/* Starts the agent: two threads, which sleep until the daemon asks for something. `options` may be
 * null. The daemon may come and go: the agent looks for it every few seconds. Fails if the agent
 * cannot run here, or has ended. */
int pageone_start(const struct pageone_options *options);

/* Lets the daemon merge `length` bytes from `address` on, as madvise(MADV_MERGEABLE) does: private
 * anonymous memory of mmap(2), readable and writable, in pages of 4 KiB, at least 1 MiB, not pinned
 * (vfio, RDMA), not registered with a userfaultfd. Guests may run meanwhile. What is fit is taken
 * even if some of it is not, and -1 returned. Starts the agent if pageone_start() has not, but only
 * where PAGEONE_SOCKET is set.
 *
 * From here on the program changes these mappings (munmap, mremap, mprotect, madvise, mmap over
 * them) by the functions of the C library only, and not by system calls of its own: the library
 * must see them. */
int pageone_register(void *address, size_t length);

/* Makes these bytes plain anonymous memory again. Not needed before munmap(). */
int pageone_unregister(void *address, size_t length);

/* Gives all memory back, and ends the agent's threads. The process cannot start it again. */
int pageone_stop(void);

/* Why this thread's last call failed, in one sentence; empty if it did not. Valid until its next
 * call. */
const char *pageone_error(void);

#ifdef __cplusplus
}
#endif

#endif
