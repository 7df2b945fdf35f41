/*
 * leftovers: what groups that were killed have left in /dev/shm, in one line.
 *
 * A group's control region is locked as long as its coordinator lives (channel/shm/control.h): one
 * that is not locked is a dead group's. Nothing is removed here: coxswain clean does that, and the
 * next start under the same name.
 *
 * Threads: any.
 * Ownership: nothing.
 * Blocks: nothing but the file system.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_LEFTOVERS_H
#define COX_PROGRAM_LEFTOVERS_H

#include "channel/shm/geometry.h"

#include <stdbool.h>

#define COX_LEFTOVERS_TEXT_SIZE 320

/* The name of the group whose control region this entry of /dev/shm is; false: it is none. */
bool cox_leftovers_group(const char *entry, char name[COX_NAME_SIZE_MAX + 1]);

/* own_name: of the group that is about to start, which removes its own; NULL: none. Returns false
 * if nothing is left, and no text is written. */
bool cox_leftovers_find(const char *own_name, char text[COX_LEFTOVERS_TEXT_SIZE]);

#endif
