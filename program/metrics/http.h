/*
 * http: a group's metrics over HTTP, for Prometheus, and its health, for probes.
 *
 *     GET /metrics   metrics.h; 503 where the group does not reply
 *     GET /healthz   200 as long as this process runs
 *     GET /readyz    200 where the group can serve (cox_metrics_ready); 503, and why not
 *
 * Each request reads the group's status over its control socket, as `coxswain status` does: no rank
 * is asked, so that it replies also when all are stuck.
 *
 * One request per connection, HTTP/1.0 or 1.1, GET or HEAD; no TLS, which a proxy in front adds.
 *
 * 128 connections at a time. A further one is always accepted, and another is closed for it: of the
 * address (IPv6: the first 64 bits) that has the most of them, the oldest one whose request has not
 * come. So slow and idle connections keep no probe out, whoever makes them.
 *
 * Threads: new and free from one. One thread serves all connections; another asks for the status,
 *   once for all requests that wait for it. A connection whose head has not come whole within 5 s
 *   is closed, and one whose reply is not taken within 5 s.
 * Blocks: new, until the address is bound; free, until the status that is being asked for has come,
 *   5 s at most.
 * Bytes: requests are untrusted input (request.h); nothing of them is used but method and path.
 * If the process dies: a unix socket stays as a file; the next one at this path removes it.
 */
#ifndef COX_PROGRAM_METRICS_SERVER_H
#define COX_PROGRAM_METRICS_SERVER_H

#include "channel/base/idioms.h"

#include <coxswain/base.h>

#include "http_address.h"

struct cox_metrics_server;

/* Port 0 of address: one that is free. name, or socket_path of its control socket: of the group;
 * copied; it is looked for at each request, and may come and go. Neither: the only group that is
 * alive then. Returns 0, or -errno: the address cannot be bound.
 */
int cox_metrics_server_new(const struct cox_http_address *address, const char *name,
                           const char *socket_path, struct cox_metrics_server **ret_server,
                           struct cox_error *err);
/* Where it listens: "http://127.0.0.1:9400/metrics", or the path of the unix socket. Lent. */
const char *cox_metrics_server_url(const struct cox_metrics_server *server);
/* NULL-safe, returns NULL. */
struct cox_metrics_server *cox_metrics_server_free(struct cox_metrics_server *server);
COX_DEFINE_FREEP(struct cox_metrics_server, cox_metrics_server_free);

#endif
