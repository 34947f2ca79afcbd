/* SPDX-License-Identifier: GPL-2.0 */
/* Mounts of a few pages, and files of theirs that are mapped: account.c. */
#ifndef AREAS_H
#define AREAS_H

#include "pages.h"

enum { MANY = 1024 };

/* A file of a mount of its own, with a mapping. */
struct area {
	struct file f;
	char *m;
};

/* The root of the mount that was made last. */
extern int control;

/* The handler of SIGBUS, and a write that may raise it. */
void on_bus(int s);
int write_fails(char *p, char value);
void mount_make(const char *path, uint32_t pages, const char *more);
void mount_end(const char *path);
long free_pages(const char *path);
struct area area_make(uint32_t pages);
void area_end(struct area *a);
struct pageonefs_file state(struct area *a);
void fill_area(struct area *a);
/* Once, and until all of it is merged. */
void merge_some(struct area *a);
void merge_area(struct area *a);

#endif
