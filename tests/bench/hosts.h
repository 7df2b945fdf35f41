/*
 * hosts: subjects whose processes take long to start go through one row after the other: those that
 * have a host's name (kinds.h), and in a brief run every subject in Python.
 *
 * A row of such a kind takes the process, tells it to begin again with the row's arguments, and
 * gives it back when it is freed; the first one starts it. A process that has failed is started
 * again; of one that cannot run here all rows say so.
 *
 * One thread. The caller owns the hosts, and frees every process before them.
 */
#ifndef BENCH_HOSTS_H
#define BENCH_HOSTS_H

#include "kinds.h"
#include "process.h"

struct hosts;

/* NULL: no memory. */
struct hosts *hosts_new(void);
/* Ends the processes. NULL: nothing. */
void hosts_free(struct hosts *hosts);
/* Ends those of one name, which may have background threads. */
void hosts_end(struct hosts *hosts, const char *name);
/* Where processes of this kind are kept between rows; NULL: nowhere. */
struct process *hosts_home(struct hosts *hosts, const struct kind *kind, bool is_brief);

#endif
