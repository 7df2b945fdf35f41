/*
 * fault: fault injection. Each step of the protocol is followed by a named point, at which a test
 * can kill or stop the process that has just done the step.
 *
 * A step is anything that another process, or the next start, can see: a name in /dev/shm, a shared
 * word, a token, a process. The points are inside the functions that do the steps, so no step can
 * be done without passing its point. tests/fault/points.py finds steps without a point;
 * tests/fault/matrix_test.c strikes at every point.
 *
 * Points exist only in the testing build (COX_TESTING); elsewhere they compile to nothing.
 * COXSWAIN_FAULT is `NAME:ACTION[:RANK[:COUNT]]`:
 *   - ACTION: kill (SIGKILL), stop (SIGSTOP), spin (an endless loop), read (of a pipe that stays
 *     empty; a signal with a handler ends it), hold (this thread only, until the next
 *     cox_fault_arm)
 *   - RANK: the rank it is for, or 'coordinator', the default
 *   - COUNT: the passage at which it strikes, from 1
 * An invalid plan ends the process, so that no test passes because a fault is missing. With
 * COXSWAIN_FAULT_INCARNATION the plan, and its count, apply only to processes whose
 * COXSWAIN_INCARNATION has this value.
 *
 * Threads: any.
 * Blocks: nothing, except as the action says.
 * If the process dies: that is its purpose.
 */
#ifndef COX_CHANNEL_FAULT_H
#define COX_CHANNEL_FAULT_H

/* X(constant, name): in the order of a group's life. */
#define COX_FAULT_POINTS(X)                                                                        \
    /* The coordinator makes the group. */                                                         \
    X(CONTROL_FILLED, "control.filled") /* whole and locked, without a name */                     \
    X(CONTROL_SWEEP, "control.sweep")   /* leftovers are open, not locked */                       \
    X(CONTROL_LOCKED, "control.locked") /* their lock is won */                                    \
    X(CONTROL_LINKED, "control.linked")                                                            \
    X(REGION_NAMED, "region.named") /* of no size yet */                                           \
    X(REGION_CREATED, "region.created")                                                            \
    X(SEMAPHORE_FILLED, "semaphore.filled") /* without a name */                                   \
    X(SEMAPHORE_LINKED, "semaphore.linked")                                                        \
    X(CHANNEL_CREATED, "channel.created")                                                          \
    X(MEMORY_CREATED, "memory.created") /* mapped, not sealed */                                   \
    X(MEMORY_SEALED, "memory.sealed")   /* by the rank that alone writes it */                     \
    /* Processes are started. */                                                                   \
    X(LAUNCH, "launch")                   /* nothing is forked yet */                              \
    X(LAUNCH_CHILD, "launch.child")       /* the new process, before exec */                       \
    X(LAUNCH_FORKED, "launch.forked")     /* the coordinator, after that exec */                   \
    X(LAUNCH_ASKED, "launch.asked")       /* a fork server, which has not answered */              \
    X(LAUNCH_ADOPTED, "launch.adopted")   /* its process is this one's, and may not run yet */     \
    X(LAUNCH_UNDONE, "launch.undone")     /* it has ended, since something failed */               \
    X(ATTACH_ACCEPTED, "attach.accepted") /* by the control socket, with all its fds */            \
    X(ATTACH_CONTROL, "attach.control")                                                            \
    X(ATTACH_CLAIMED, "attach.claimed") /* the slot has a holder, or has none again */             \
    X(ATTACH_CHANNEL, "attach.channel")                                                            \
    X(ATTACH_IDENTITY, "attach.identity") /* written, not yet valid */                             \
    X(ATTACH_ANNOUNCED, "attach.announced")                                                        \
    X(ATTACHED, "attached")                                                                        \
    X(RANK_CHECKED, "rank.checked") /* the coordinator has seen it */                              \
    X(NAME_UNLINKED, "name.unlinked")                                                              \
    X(CONTROL_UNLINK, "control.unlink") /* only the control region has its name */                 \
    X(STARTED, "started")                                                                          \
    /* A request goes out. */                                                                      \
    X(REQUEST_CLAIMED, "request.claimed")                                                          \
    X(REQUEST_WRITTEN, "request.written")                                                          \
    X(RECORD_BEGUN, "record.begun") /* of its frame: sequence 0 */                                 \
    X(RECORD_WRITTEN, "record.written")                                                            \
    X(REQUEST_STAMPED, "request.stamped")                                                          \
    X(REQUEST_PUBLISHED, "request.published")                                                      \
    X(GATE_OPENED, "gate.opened")                                                                  \
    /* Bytes that do not fit their frame or slot (large_payload.h). */                             \
    X(LARGE_PAYLOAD_EXPORTED, "large_payload.exported") /* with nothing in it     */               \
    X(LARGE_PAYLOAD_WRITTEN, "large_payload.written")   /* not published yet */                    \
    X(LARGE_PAYLOAD_OPENED, "large_payload.opened")     /* by a reader */                          \
    X(LARGE_PAYLOAD_COPIED, "large_payload.copied")     /* a reply, by the coordinator */          \
    X(LARGE_PAYLOAD_DROPPED, "large_payload.dropped")   /* by its sender */                        \
    /* Tokens, of each wakeup in the order of enum cox_wakeup. */                                  \
    X(POSTED_REQUEST_PRODUCE, "posted.request_produce")                                            \
    X(POSTED_REQUEST_CONSUME, "posted.request_consume")                                            \
    X(POSTED_RESPONSE_PRODUCE, "posted.response_produce")                                          \
    X(POSTED_RESPONSE_CONSUME, "posted.response_consume")                                          \
    X(HINT_ARMED, "hint.armed")     /* how many replies a request lacks */                         \
    X(HINT_COUNTED, "hint.counted") /* one less; no waiter is woken yet */                         \
    X(GATE_WOKEN, "gate.woken")     /* the word has changed; no waiter is woken yet */             \
    X(WAIT, "wait")                 /* about to sleep */                                           \
    X(WAIT_TOOK, "wait.took")       /* a token in its hand */                                      \
    X(TOKEN_TAKEN, "token.taken")   /* the same, without sleep */                                  \
    /* A rank serves it. */                                                                        \
    X(RANK_INCARNATION, "rank.incarnation") /* whose replies these are */                          \
    X(RANK_TAKEN, "rank.taken")                                                                    \
    X(RANK_STATE, "rank.state")                                                                    \
    X(RANK_RETURNED, "rank.returned")                                                              \
    X(EXECUTE, "execute")                   /* the callback is next */                             \
    X(EXCHANGE_MADE, "exchange.made")       /* sealed memory for slices, still private */          \
    X(EXCHANGE_WRITTEN, "exchange.written") /* own slices, in a step */                            \
    X(EXCHANGE_READ, "exchange.read")       /* those of all ranks */                               \
    X(LORA_READ, "lora.read")               /* an adapter, not yet published to steps */           \
    X(LORA_LOADED, "lora.loaded")           /* and published; not replied to */                    \
    X(LORA_REMOVED, "lora.removed")         /* no step finds it any more */                        \
    X(EXECUTED, "executed")                 /* nothing is committed */                             \
    X(STEP_COMMITTED, "step.committed")                                                            \
    X(REPLY_WRITTEN, "reply.written")                                                              \
    X(REPLY_TAGGED, "reply.tagged")                                                                \
    X(RANK_DONE, "rank.done")                                                                      \
    X(REPORT_CLAIMED, "report.claimed") /* the slot of the error channel is its own */             \
    X(REPORT_WRITTEN, "report.written")                                                            \
    /* The model's weights: the coordinator's image, and what ranks do with it. */                 \
    X(WEIGHTS_FILLED, "weights.filled")       /* no other process knows of it */                   \
    X(WEIGHTS_PUBLISHED, "weights.published") /* no step is of this version yet */                 \
    X(WEIGHTS_RETIRED, "weights.retired")     /* the coordinator has let one that is no more go */ \
    X(WEIGHTS_TAKEN, "weights.taken")         /* a rank has both mapped */                         \
    X(WEIGHTS_SWITCHED, "weights.switched")   /* and computes with the new one alone */            \
    /* The coordinator gathers. */                                                                 \
    X(REPORT_FETCHED, "report.fetched")                                                            \
    X(REPLY_FETCHED, "reply.fetched")                                                              \
    X(COMPLETE, "complete") /* the completion is made and not handed out */                        \
    X(VOID_STORED, "void.stored")                                                                  \
    X(ENDED_STORED, "ended.stored")                                                                \
    X(HANDLED, "handled")                                                                          \
    X(DEATH_SEEN, "death.seen")                                                                    \
    X(DEATH_STORED, "death.stored")                                                                \
    X(DEATH_REPORTED, "death.reported")                                                            \
    /* A dead rank is started again. */                                                            \
    X(RANK_LEFT_OUT, "rank.left_out") /* requests do not ask it */                                 \
    X(SEMAPHORE_RENEWED, "semaphore.renewed")                                                      \
    X(MEMORY_RENEWED, "memory.renewed")                                                            \
    X(RANK_RESET, "rank.reset") /* its lines are as at the start */                                \
    X(RANK_ADMITTED, "rank.admitted")                                                              \
    X(WINDOW_RENEWED, "window.renewed") /* for the next incarnation of the rank group */           \
    X(WINDOWS_KEPT, "windows.kept")     /* other incarnations take no memory */                    \
    X(RANK_OFFERED, "rank.offered")     /* to the process that connects */                         \
    X(REGION_RENEWED, "region.renewed") /* of legacy ranks: another one has the name */            \
    /* Sockets. */                                                                                 \
    X(SOCKET_SENT, "socket.sent") /* some bytes, or all */                                         \
    /* A control socket is opened, connected to, closed. */                                        \
    X(RUNTIME_DIR_MADE, "runtime_dir.made")         /* or its mode is set */                       \
    X(RUNTIME_DIR_LOCKED, "runtime_dir.locked")     /* or let go of */                             \
    X(RUNTIME_DIR_SWEPT, "runtime_dir.swept")       /* one file of it */                           \
    X(CONTROL_SOCKET_BOUND, "control_socket.bound") /* under a temporary name */                   \
    X(CONTROL_SOCKET_LISTENS, "control_socket.listens")                                            \
    X(CONTROL_SOCKET_NAMED, "control_socket.named")                                                \
    X(CONTROL_SOCKET_CONNECTED, "control_socket.connected") /* the client */                       \
    X(CONTROL_SOCKET_ASKED, "control_socket.asked")         /* the hello is sent */                \
    X(CONTROL_SOCKET_ACCEPTED, "control_socket.accepted")                                          \
    X(CONTROL_SOCKET_UNNAMED, "control_socket.unnamed")                                            \
    /* By-value handles. */                                                                        \
    X(HANDLE_EXPORTED, "handle.exported")   /* its fd is in the store */                           \
    X(HANDLE_STORED, "handle.stored")       /* and at the control socket, or is not */             \
    X(HANDLE_TAKEN, "handle.taken")         /* by another process, not checked yet */              \
    X(HANDLE_WITHDRAWN, "handle.withdrawn") /* only the exporter has it */                         \
    X(HANDLE_PUT, "handle.put")                                                                    \
    /* KV blocks, of one's own and of other groups (channel/kv, engine/rank/pulls.h). */           \
    X(KV_MADE, "kv.made")                                                                          \
    X(KV_TAKEN, "kv.taken") /* a block has no user and may be written */                           \
    X(KV_GIVEN, "kv.given")                                                                        \
    X(KV_LOOKED, "kv.looked") /* a reader has the block's user, and has copied nothing */          \
    X(KV_COPIED, "kv.copied") /* and has copied it, and does not know whether it was taken */      \
    X(CACHE_EXPORTED, "cache.exported")                                                            \
    X(LINK_ATTACHED, "link.attached") /* to the blocks of another group */                         \
    X(LINK_DETACHED, "link.detached")                                                              \
    X(PULL_COPIED, "pull.copied") /* one block of it */                                            \
    /* The end. */                                                                                 \
    X(STOP, "stop")                                                                                \
    X(ABORT_STORED, "abort.stored") /* the time to leave in order is over */                       \
    X(GOODBYE_SAID, "goodbye.said")                                                                \
    X(GOODBYE_HEARD, "goodbye.heard")                                                              \
    X(GROUP_LEFT, "group.left") /* said; the process may live on */                                \
    X(LEFT, "left")                                                                                \
    X(STOPPED, "stopped")                                                                          \
    /* A queue of blocks (coxswain/memory/queue.h). */                                             \
    X(QUEUE_FILLED, "queue.filled")                                                                \
    X(QUEUE_LOCKED, "queue.locked") /* nothing is done, or repaired, yet */                        \
    X(QUEUE_UNLOCKED, "queue.unlocked")                                                            \
    X(QUEUE_DOMAIN_ENTERED, "queue.domain_entered")                                                \
    X(QUEUE_DOMAIN_CLEARED, "queue.domain_cleared")                                                \
    X(QUEUE_POOL_ENTERED, "queue.pool_entered")                                                    \
    X(QUEUE_POOL_CLEARED, "queue.pool_cleared")                                                    \
    X(QUEUE_POOL_CLOSED, "queue.pool_closed")                                                      \
    X(QUEUE_PUBLISHER_JOINED, "queue.publisher_joined")                                            \
    X(QUEUE_PUBLISHER_LEFT, "queue.publisher_left")                                                \
    X(QUEUE_SUBSCRIBER_JOINED, "queue.subscriber_joined")                                          \
    X(QUEUE_SUBSCRIBER_LEFT, "queue.subscriber_left") /* its messages are not let go yet */        \
    X(QUEUE_INTENDED, "queue.intended")               /* a block is about to be held */            \
    X(QUEUE_PINNED, "queue.pinned")                   /* not yet in a reference row */             \
    X(QUEUE_INTENT_CLEARED, "queue.intent_cleared")   /* a row does, or nothing is held */         \
    X(QUEUE_ANNOUNCED, "queue.announced")             /* before a wake */                          \
    X(QUEUE_WAKING, "queue.waking")           /* one of them counts as awake, and sleeps */        \
    X(QUEUE_WOKEN, "queue.woken")             /* one of them is */                                 \
    X(QUEUE_COPY_FILLED, "queue.copy_filled") /* where a copy is; it does not count yet */         \
    X(QUEUE_ROW_FILLED, "queue.row_filled")   /* the message is there, not published */            \
    X(QUEUE_PUBLISHED, "queue.published")                                                          \
    X(QUEUE_PUBLISH_DONE, "queue.publish_done")                                                    \
    X(QUEUE_SKIPPED, "queue.skipped")                                                              \
    X(QUEUE_TAKEN, "queue.taken")               /* it waits for the next message */                \
    X(QUEUE_TAKE_COUNTED, "queue.take_counted") /* one fewer waits for this one */                 \
    X(QUEUE_COPYING, "queue.copying")           /* this process makes the copy */                  \
    X(QUEUE_COPIED, "queue.copied")             /* its bytes are stored, no subscriber is woken */ \
    X(QUEUE_COPY_SHARED, "queue.copy_shared")                                                      \
    X(QUEUE_COPY_OVER, "queue.copy_over")         /* its waiters are woken */                      \
    X(QUEUE_COPY_UNPINNED, "queue.copy_unpinned") /* a copy; the row still has it */               \
    X(QUEUE_ROW_ENDING, "queue.row_ending")       /* no subscriber will take it */                 \
    X(QUEUE_ROW_ENDED, "queue.row_ended")                                                          \
    X(QUEUE_COUNTED, "queue.counted")                                                              \
    X(QUEUE_FREE_PENDING, "queue.free_pending")                                                    \
    X(QUEUE_DRAINED, "queue.drained")                                                              \
    X(QUEUE_REAPED, "queue.reaped") /* a dead endpoint is out */                                   \
    X(QUEUE_REPAIRING, "queue.repairing")                                                          \
    X(QUEUE_REPAIRED, "queue.repaired")                                                            \
    X(QUEUE_ARMED, "queue.armed") /* about to sleep */                                             \
    X(QUEUE_DISARMED, "queue.disarmed")                                                            \
    X(QUEUE_PUBLISHER_AWAITED, "queue.publisher_awaited")                                          \
    /* Ranks form a group of their own (coxswain/group.h). */                                      \
    X(GROUP_FILLED, "group.filled") /* whole and locked, without a name */                         \
    X(GROUP_LINKED, "group.linked")                                                                \
    X(GROUP_LOCKED, "group.locked") /* the name's file, shared, before a join */                   \
    X(GROUP_SWEPT, "group.swept")   /* or a leftover, and its name is gone */                      \
    X(GROUP_CLAIMED, "group.claimed")                                                              \
    X(GROUP_SAID, "group.said")                 /* the state of this rank in the group */          \
    X(GROUP_UNLINK_WAITS, "group.unlink_waits") /* another process removes the name */             \
    X(GROUP_UNLINKED, "group.unlinked")                                                            \
    X(GROUP_FORMED, "group.formed") /* a subgroup */                                               \
    X(GROUP_VALUE, "group.value")   /* written, not announced */                                   \
    X(GROUP_ARRIVED, "group.arrived")                                                              \
    X(GROUP_COUNTED, "group.counted")                                                              \
    X(GROUP_WAKES, "group.wakes")                                                                  \
    X(GROUP_WOKEN, "group.woken")                                                                  \
    X(GROUP_SLEEPS, "group.sleeps")                                                                \
    X(GROUP_DONE, "group.done") /* with one round of an operation */                               \
    X(GROUP_ABORTED, "group.aborted")                                                              \
    X(GROUP_ALIGNED, "group.aligned")                                                              \
    X(GROUP_BOUND, "group.bound")       /* a socket for fds */                                     \
    X(GROUP_OFFERED, "group.offered")   /* an fd, to one member */                                 \
    X(GROUP_ACCEPTED, "group.accepted") /* one of a member */                                      \
    /* Memory that is reserved on demand (memory/domain.h). */                                     \
    X(DOMAIN_COMMITTED, "domain.committed")                                                        \
    X(DOMAIN_RETURNED, "domain.returned")                                                          \
    /* Blocks that processes share (memory/pool.h). */                                             \
    X(POOL_MADE, "pool.made")       /* complete, no other process has it yet */                    \
    X(POOL_JOINED, "pool.joined")   /* a row is its own, or it says more of itself */              \
    X(POOL_CLAIMED, "pool.claimed") /* a block that is not published */                            \
    X(POOL_COUNTED, "pool.counted") /* one reference more, or its number */                        \
    X(POOL_USED, "pool.used")                                                                      \
    X(POOL_UNCOUNTED, "pool.uncounted") /* one reference less, or all of a dead owner */           \
    X(POOL_CLOSING, "pool.closing")     /* before the check for references */                      \
    X(POOL_CHECKED, "pool.checked")     /* once, or again */                                       \
    X(POOL_REOPENED, "pool.reopened")   /* a reference was found */                                \
    X(POOL_FREED, "pool.freed")                                                                    \
    X(POOL_HINTED, "pool.hinted") /* where a free one may be */                                    \
    X(POOL_PAGES, "pool.pages")   /* of a block or slab, about to be there or not, or so */        \
    X(POOL_RETAINED, "pool.retained")                                                              \
    X(POOL_SLAB, "pool.slab")   /* another phase of a slab */                                      \
    X(POOL_QUEUE, "pool.queue") /* one step of joining or leaving a queue */                       \
    X(POOL_PINNED, "pool.pinned")                                                                  \
    X(POOL_UNPINNED, "pool.unpinned")                                                              \
    X(POOL_SWEEPING, "pool.sweeping") /* a row, of the dead or its own */                          \
    X(POOL_SWEPT, "pool.swept")       /* all of it */                                              \
    X(POOL_LEFT, "pool.left")         /* the row is free */

enum cox_fault_point {
#define COX_FAULT_CONSTANT(constant, name) COX_FAULT_##constant,
    COX_FAULT_POINTS(COX_FAULT_CONSTANT)
#undef COX_FAULT_CONSTANT
        COX_FAULT_POINT_COUNT
};

#if COX_TESTING

#include <stdatomic.h>
#include <stdint.h>

/* The file that COXSWAIN_FAULT_COUNTS names, if set, counts how often each process has passed each
 * point (the coordinator first, then the ranks), and whether the plan has struck. */
#define COX_FAULT_PROCESS_COUNT 17
struct cox_fault_counts {
    _Atomic uint32_t struck;
    _Atomic uint32_t passed[COX_FAULT_POINT_COUNT][COX_FAULT_PROCESS_COUNT];
};

void cox_fault_point(enum cox_fault_point point);
/* As the process of `rank`, whose memory is this process's until it executes its program. */
void cox_fault_point_of(enum cox_fault_point point, int rank);
const char *cox_fault_name(enum cox_fault_point point);
/* Sets the rank of this process, for the RANK of the plan; -1, the initial value: the coordinator.
 */
void cox_fault_rank(int rank);
/* Replaces the plan of COXSWAIN_FAULT, which is read once; NULL: no plan. To be called before other
 * threads pass points. */
void cox_fault_arm(const char *plan);

#else

static inline void cox_fault_point(enum cox_fault_point point)
{
    (void)point;
}
static inline void cox_fault_point_of(enum cox_fault_point point, int rank)
{
    (void)point;
    (void)rank;
}
static inline void cox_fault_rank(int rank)
{
    (void)rank;
}
static inline void cox_fault_arm(const char *plan)
{
    (void)plan;
}

#endif

#endif
