#include "fd_store.h"

#include "channel/base/idioms.h"
#include "channel/socket/control_socket.h"
#include "channel/socket/fd_entries.h"
#include "channel/socket/socket.h"

#include <string.h>

int cox_fd_store_connect(struct cox_fd_store *fd_store, const char *socket_path,
                         uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_hello hello = {.role = COX_HELLO_FD_STORE};
    struct cox_control_connection session;
    int r = cox_control_socket_connect(socket_path, &hello, deadline_ns, &session, err);
    if (r == 0)
        fd_store->fd = session.fd; /* it contains nothing else */
    return r;
}

void cox_fd_store_close(struct cox_fd_store *fd_store)
{
    cox_close_fd(&fd_store->fd);
}

/* Skips replies to earlier requests that had timed out. */
static int fd_store_hear(int fd, uint64_t number, uint64_t deadline_ns, int *ret_fd)
{
    for (;;) {
        uint8_t bytes[COX_FD_STORE_REPLY_SIZE];
        _cox_cleanup_(cox_close_fd) int came = -1;
        uint32_t fd_count = 0;
        uint64_t replied;
        int status;
        int r = cox_socket_receive(fd, bytes, sizeof bytes, &came, 1, &fd_count, deadline_ns);
        if (r == 0)
            r = cox_fd_store_reply_parse(bytes, &status, &replied);
        if (r)
            return r;
        if (replied != number) {
            if (cox_now_ns() >=
                deadline_ns) /* a peer that never stops replying is not waited for longer */
                return COX_TIMEOUT;
            continue;
        }
        if ((status == 0 && ret_fd != NULL) != (fd_count == 1))
            return COX_CORRUPT;
        if (status == 0 && ret_fd)
            *ret_fd = cox_steal_fd(&came);
        return status;
    }
}

/* Returns the status of the reply. After an invalid reply the connection is closed. */
static int fd_store_ask(struct cox_fd_store *fd_store, enum cox_fd_store_op op,
                        const struct cox_handle *handle, const int *fd, uint64_t deadline_ns,
                        int *ret_fd, struct cox_error *err)
{
    uint8_t bytes[COX_FD_STORE_REQUEST_SIZE];
    /* Unique on this connection: each request has ended when the next one begins. */
    uint64_t number = cox_now_ns();
    if (fd_store->fd < 0)
        return cox_fail(err, COX_CLOSED,
                        "the fd store: there is no connection to a control socket");
    cox_fd_store_request_format(op, number, handle, bytes);
    int r = cox_socket_send(fd_store->fd, bytes, sizeof bytes, fd, fd != NULL, deadline_ns);
    if (r == 0)
        r = fd_store_hear(fd_store->fd, number, deadline_ns, ret_fd);
    if (r == COX_CORRUPT)
        cox_fd_store_close(fd_store);
    return r ? cox_fail(err, r, "the fd store at the control socket: %s", cox_status_text(r)) : 0;
}

int cox_fd_store_put(struct cox_fd_store *fd_store, const struct cox_handle *handle, int fd,
                     uint64_t deadline_ns, struct cox_error *err)
{
    return fd_store_ask(fd_store, COX_FD_STORE_PUT, handle, &fd, deadline_ns, NULL, err);
}

int cox_fd_store_remove(struct cox_fd_store *fd_store, const struct cox_handle *handle,
                        uint64_t deadline_ns, struct cox_error *err)
{
    return fd_store_ask(fd_store, COX_FD_STORE_REMOVE, handle, NULL, deadline_ns, NULL, err);
}

int cox_fd_store_get(struct cox_fd_store *fd_store, const struct cox_handle *handle,
                     uint64_t deadline_ns, int *ret_fd, struct cox_error *err)
{
    return fd_store_ask(fd_store, COX_FD_STORE_GET, handle, NULL, deadline_ns, ret_fd, err);
}
