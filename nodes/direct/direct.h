/*
 * direct: connections between the processes of a cluster, past NATS: what is large, and the rounds
 * of the rank group. TCP with mutual TLS, by the certificates that NATS uses, too.
 *
 * A message has a kind, which is the caller's, and bytes. Messages from one process to another
 * arrive whole and in order, or the connection ends. Each direction has a connection of its own:
 * the sender opens it with the first message, and only sends on it. It is open once the receiver
 * has accepted the sender's certificate: a sender that is refused gets an error, not silence.
 *
 * Security: TLS 1.2 or later, both sides show a certificate of the same CA, in its time. The name
 *   of a process is the common name (CN) of its certificate: "node-b" is node b, "lead" the lead. A
 *   sender checks that the process it reaches has the name that it sends to; a receiver is told the
 *   name of the certificate, not one that the peer says. A certificate with an extended key usage
 *   needs both clientAuth and serverAuth. Without TLS (insecure_loopback) both addresses must be
 *   loopback, and each side says its name. Processes of several groups on one machine show the same
 *   name; which group a process is of, it says itself, and no certificate proves it: who has the key
 *   of node b may speak for node b of any group.
 * Limits: a process that has shown its certificate is known. Others have a share of the incoming
 *   connections of their own (COX_DIRECT_UNKNOWN_MAX), and a second to become known. When a share is
 *   full, the oldest connection of whoever has most of it ends: of the machine among the unknown, of
 *   the name among the known. So no machine keeps another one out. A message that is announced must
 *   come, at 10 MB/s at least, and the memory for messages under way has a budget.
 * Threads: any may send; messages to one address are sent one at a time. One thread accepts, and each
 *   incoming connection has a thread, which calls on_message.
 * Ownership: options are copied. The bytes of a message belong to on_message, which frees them.
 * Blocks: send until the message is handed to the kernel, or the deadline; close until the
 *   callbacks that run have returned; open shortly. A HOST that is not a number is looked up by the
 *   C library, which keeps no deadline and which close and drop do not end: numbers are better.
 * If the process dies: the kernel ends the connections; the peers' next call fails. If the machine
 *   dies, or the network, nothing ends them: the caller finds out, and calls drop.
 */
#ifndef COX_NODES_DIRECT_H
#define COX_NODES_DIRECT_H

#include <coxswain/executor.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The largest message that is accepted. */
#define COX_DIRECT_SIZE_MAX (UINT64_C(2) << 30)
/* Longest name of a process. */
#define COX_DIRECT_NAME_MAX 63
/* Incoming connections of known processes, and of others: the nodes of the largest cluster, which
 * may all connect at once and from one address, and some that knock. */
#define COX_DIRECT_KNOWN_MAX 224
#define COX_DIRECT_UNKNOWN_MAX (COX_NODE_COUNT_MAX + 32)
/* Messages under way have memory for so many of the largest size from all, and for one from each
 * process, of whichever groups. Those of up to COX_DIRECT_SMALL_SIZE are not counted. */
#define COX_DIRECT_BUDGET 4
#define COX_DIRECT_SMALL_SIZE (UINT64_C(1) << 20)
/* What on_announce sees of a message. */
#define COX_DIRECT_FRONT_SIZE 96

struct cox_direct;
struct cox_payload_memory;
struct cox_payload_memory_pool;

struct cox_direct_options {
    /* of this process: "node-b", "lead"; must be the certificate's. Letters, digits and ".-_" */
    const char *name;
    /* of this process: at most COX_DIRECT_NAME_MAX of the same characters; NULL or "": none */
    const char *group;
    /* PEM files; NULL, all three: insecure_loopback */
    const char *ca, *certificate, *key;
    bool insecure_loopback;
    /* "HOST:PORT" or "[IPV6]:PORT" to listen on; port 0: the kernel's choice; NULL: this process
     * does not listen */
    const char *listen;
    /* 0: COX_DIRECT_SIZE_MAX; a larger message is not sent, and if it arrives ends the
     * connection */
    uint64_t size_max;
    void *context;
    /* A message from the process `peer` of a group, "" of none, has arrived. Takes bytes, which
     * free() frees; NULL if size is 0. On the connection's thread: what it does delays the next
     * message of this process only. For one peer of one group it runs once at a time, however many
     * connections it has had. It may send and drop, not close. */
    void (*on_message)(void *context, const char *peer, const char *group, uint32_t kind,
                       uint8_t *bytes, size_t size);
    /* Whether a message that has begun to arrive is wanted: front has its first bytes, all of them
     * or COX_DIRECT_FRONT_SIZE. Returns 0, or why the connection ends. NULL: all are. On the
     * connection's thread. */
    int (*on_announce)(void *context, const char *peer, const char *group, uint32_t kind,
                       uint64_t size, const uint8_t *front, struct cox_error *err);
    /* Whether one that is wanted, and larger than its front, goes to on_memory: what follows the front
     * is written to memory of the pool as it arrives, and not to one buffer that is copied later. Asked
     * once, before the rest comes. NULL: none does. */
    bool (*to_memory)(void *context, uint32_t kind, uint64_t size, const uint8_t *front);
    /* As on_message, for those: the rest is memory_size bytes of memory, which is finished. Both it and
     * the front are lent. */
    void (*on_memory)(void *context, const char *peer, const char *group, uint32_t kind,
                      const uint8_t *front, struct cox_payload_memory *memory,
                      uint64_t memory_size);
    /* for to_memory; borrowed */
    struct cox_payload_memory_pool *memory;
    /* An incoming connection of `peer` has ended: once for each, after its last on_message. Or one
     * was refused (peer NULL: its name is not known). text has the reason, and code 0 if it is none
     * that anybody should know: the peer has closed, or was dropped or replaced. This is not the
     * death of the peer: a later connection of it may be open, and may be what has ended this one.
     * NULL: not called. On the connection's thread, or the one that accepts; as on_message, not
     * close. */
    void (*on_end)(void *context, const char *peer, int code, const char *text);
};

/* Listens, and starts the thread that accepts. Reads the certificates: a file that is missing, has
 * expired, does not belong to the key or has another name is told with its path, and with what is
 * wrong.
 * Returns
 *   0
 *   COX_INVALID: the options, or a certificate
 *   COX_DENIED: without TLS the address must be loopback
 *   -errno: the address
 */
int cox_direct_open(const struct cox_direct_options *options, struct cox_direct **ret_direct,
                    struct cox_error *err);
/* Whether a process of that name could show this certificate: what cox_direct_open checks.
 * Returns 0 or COX_INVALID. */
int cox_direct_check_certificate(const char *ca, const char *certificate, const char *key,
                                 const char *name, struct cox_error *err);
/* Ends all connections: sends that are under way, and later ones, fail with COX_CLOSED. For what else
 * must end before close. */
void cox_direct_end(struct cox_direct *direct);
/* Ends all connections and threads, makes the sends under way fail, and frees. Waits for callbacks
 * that run. Not on a thread of this object; after it has begun, no other call may begin, except
 * from those callbacks. NULL-safe, returns NULL. */
struct cox_direct *cox_direct_close(struct cox_direct *direct);

/* The port on which it listens; 0: it does not. */
uint16_t cox_direct_port(const struct cox_direct *direct);
/* Incoming connections that ended before their process was known, so far. */
uint64_t cox_direct_refused(struct cox_direct *direct);

struct cox_direct_message {
    uint32_t kind;
    /* at most 8 */
    const struct iovec *parts;
    int count;
    /* The last part is still being written: returns how many of its bytes are there, more than `done`,
     * and blocks until they are; it waits for no peer. NULL: all are there. */
    size_t (*await)(void *await_context, size_t done);
    void *await_context;
};

/* Sends one message to the process `peer` at "HOST:PORT", of whichever
 * group. Connects if there is no connection to that address. A connection that has ended since its last
 * message, or ends in this one, is opened again once; the peer never gets the message twice. Large
 * parts are handed over in calls of 1 MiB. Never raises SIGPIPE.
 * Returns
 *   0: the kernel has all of it; whether it arrives shows in what the peer replies
 *   COX_DENIED: the process there has another name, no valid certificate, or does not accept this
 *     one's; or, without TLS, the address is not loopback
 *   COX_TIMEOUT: not connected, or not sent, until deadline_ns (CLOCK_MONOTONIC); the connection is
 *     ended, unless it was another message that took the time
 *   COX_TOO_LARGE
 *   COX_CLOSED: the peer was dropped meanwhile, or all is being closed
 *   COX_INVALID: the name or the address, or the host is unknown
 *   -errno: -ECONNREFUSED, -ECONNRESET: the peer has ended the connection, and others
 */
int cox_direct_send_message(struct cox_direct *direct, const char *peer, const char *address,
                            const struct cox_direct_message *message, uint64_t deadline_ns,
                            struct cox_error *err);
/* The same, of parts that are there. */
int cox_direct_send(struct cox_direct *direct, const char *peer, const char *address, uint32_t kind,
                    const struct iovec *parts, int count, uint64_t deadline_ns,
                    struct cox_error *err);
/* Ends the connections to a peer of this process's group and those from it, and makes sends to it
 * that are under way fail: the peer is dead. A send that has not got as far as to know the group of
 * its peer fails, too. Does not block: an on_message that runs, or just begins, is not waited for;
 * other messages that have arrived are discarded. Not a ban: a later send connects again, and so
 * may the peer. */
void cox_direct_drop(struct cox_direct *direct, const char *peer);
/* Makes sends to this address that are under way fail, of whichever group the process there is. */
void cox_direct_drop_address(struct cox_direct *direct, const char *address);

/* Begins to connect to "HOST:PORT", HOST a number, only to see whether a process listens there. Does
 * not block. Returns the fd, which the caller closes; -ECONNREFUSED: none does, as below; another
 * -errno: it cannot be tried. */
int cox_direct_probe(const char *address);
/* Of that fd. Returns 0: a process listens; -EINPROGRESS: not known yet; -ECONNREFUSED: the machine
 * is there and the process is not; another -errno, which says nothing of the process. */
int cox_direct_probe_result(int fd);

#endif
