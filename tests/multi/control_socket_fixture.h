/*
 * socket_fixture: a control socket in the test's process, what its hooks saw, and clients: real
 * processes, and raw connections that send what no proper client would.
 *
 * Threads: everything on the test's thread; hooks record on the control socket's and never assert.
 * Ownership: everything belongs to the fixture until socket_teardown.
 * Blocks: awaits, until it happened or a minute has passed, which fails the test.
 * If the test dies: its folder stays in the temporary folder; children are killed.
 */
#ifndef COX_TESTS_MULTI_CONTROL_SOCKET_FIXTURE_H
#define COX_TESTS_MULTI_CONTROL_SOCKET_FIXTURE_H

#include "tests/unit/channel_fixture.h"
#include "channel/socket/control_socket.h"
#include "channel/socket/socket.h"

#define SOCKET_TEST(name) TEST_WITH(name, socket_setup, socket_teardown)
/* With an open control socket. */
#define OPEN_SOCKET_TEST(name) TEST_WITH(name, open_setup, socket_teardown)
#define PATIENCE cox_deadline_after_ms(60000)
#define NOBODY 65534

/* What the hooks do and saw. Under lock where the control socket runs. */
struct host {
    /* what admit returns, with reason */
    int refuse;
    char reason[700];
    /* in a worker's reply: that many of host_fds */
    uint32_t fd_count;
    uint32_t rank_count;
    uint32_t workers, gone, admitted;
    /* streams handed over; of these, whose other side is closed, and so is ours */
    uint32_t echoes, commands;
    uint64_t gone_id[COX_RANK_COUNT_MAX];
    struct cox_control_client last;
    int refuse_command;
    /* lines */
    char log[16384];
};
extern struct host host;
extern int host_fds[COX_HELLO_FD_COUNT_MAX]; /* memfds, each holds its own number as text */
extern struct cox_control_socket *control_socket;
extern char runtime_dir[64]; /* of this test */

int socket_setup(void **state);
int open_setup(void **state);
int socket_teardown(void **state);
extern const struct cox_control_socket_hooks host_hooks;
struct cox_control_socket_options host_options(const char *name);
/* Opens the one control socket; the rest of the options are lent. Fails the test if it does not. */
void socket_start(const struct cox_control_socket_options *options);
void socket_stop(void);
/* Between the control socket's hooks. */
void host_lock(void);
void host_unlock(void);
#define HOST(statement)                                                                            \
    do {                                                                                           \
        host_lock();                                                                               \
        statement;                                                                                 \
        host_unlock();                                                                             \
    } while (0)
/* Waits until the counter (a field of host) is at least count. */
void await_count(const uint32_t *counter, uint32_t count);
struct cox_control_client last_client(void); /* admitted, or gone */
uint32_t read_count(const uint32_t *counter);
/* Waits until the log has the text. */
bool in_log(const char *text);
void await_log(const char *text);
/* Waits until this process has as many fds: the control socket closes its end when it has said why.
 */
void await_fds(int count);
/* Files in the folder. */
int runtime_dir_count(void);

/* A client process; it has no socket of the test's. */
pid_t client_start(void (*fn)(void *context), void *context);
void client_run(void (*fn)(void *context), void *context);

struct cox_hello worker_hello(void);
/* As a client of this process, a worker of any rank or another; what is said is in test_error. */
int connect_as(enum cox_hello_role role, struct cox_control_connection *ret_session);
/* A connection without a word; to the control socket of the test. */
int raw_connect(const char *path);
int raw_client(void);
/* What the coordinator says: the code of a refusal (its text in text[256]), 0: a hello reply, -1:
 * closed without a word. */
int raw_reply(int fd, char *text);
/* It is a refusal of this code, with this in its text; fd is closed. */
void raw_refused(int fd, int code, const char *text);
/* The file that fd means has this text. */
bool fd_says(int fd, uint32_t number);

#endif
