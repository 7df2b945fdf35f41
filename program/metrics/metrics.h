/*
 * metrics: a group's status as text for Prometheus (exposition format 0.0.4,
 * https://prometheus.io/docs/instrumenting/exposition_formats/).
 *
 * Names begin with coxswain_; times are in seconds, sizes in bytes, counters end in _total. All of
 * a group are in docs/metrics.md, which a test compares with what is written here.
 *
 * Threads: any.
 * Blocks: as the stream it writes to.
 * If the process dies: private memory.
 */
#ifndef COX_PROGRAM_METRICS_H
#define COX_PROGRAM_METRICS_H

#include "program/client/health.h"

#include <jansson.h>
#include <stdio.h>

struct CoxswainControl__StatusReply;

#define COX_METRICS_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* Texts of the status may have any bytes: they are escaped. weights: what this user's holder of
 * weights has, as cox_weights_list; NULL: nothing. */
void cox_metrics_write(FILE *file, const struct CoxswainControl__StatusReply *status,
                       const json_t *weights);

/* Whether the group can serve: it is healthy (health.h), and no rank owes a reply to a request that
 * has ended. Otherwise reason says why not, in one line. */
bool cox_metrics_ready(const struct CoxswainControl__StatusReply *status,
                       char reason[COX_HEALTH_SIZE]);

#endif
