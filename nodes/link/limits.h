/*
 * limits: what a peer may say. A process with the certificate of a node is known by name, and may
 * still lie: the sizes and numbers of its messages are checked here before anything is made of
 * them.
 *
 * Times: real_ns is CLOCK_REALTIME of this machine. Clocks of a cluster agree to a day, which TLS
 *   needs as well.
 * Threads: any; pure functions.
 */
#ifndef COX_NODES_LIMITS_H
#define COX_NODES_LIMITS_H

#include "nodes_common.h"
#include "nodes/node.pb-c.h"

/* Of a hello; an agent of this release has two. */
#define COX_HELLO_FACT_MAX 64
/* Of requests, and of incarnations of the rank group, whose words have 40 bits for them. A lead that
 * takes ranks over goes on behind the largest number that a node names, if that is at most half of
 * it. Otherwise it begins with 0 and other ranks: so no number that is believed can end a group for
 * good. */
#define COX_NODE_SEQUENCE_MAX ((UINT64_C(1) << 40) - 1)

/* CLOCK_REALTIME, in ns. */
uint64_t cox_real_ns(void);
/* An epoch is the time at which its lead began, or a little more: it is not of the future. */
bool cox_epoch_can_be(uint64_t epoch, uint64_t real_ns);
/* Returns 0; COX_CORRUPT: a hello that no honest agent says. */
int cox_hello_check(const CoxNode__Hello *hello, uint64_t real_ns, struct cox_error *err);
/* The same of a beat: it speaks of no request of this channel behind the last one that was sent. */
int cox_agent_beat_check(const CoxNode__AgentBeat *beat, uint32_t channel, uint64_t last_sent,
                         struct cox_error *err);

#endif
