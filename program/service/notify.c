#include "notify.h"

#include "channel/base/idioms.h"

#include <stddef.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define SEND_SECONDS 5
#define MESSAGE_SIZE 1024

/* The watchdog is this process's unless WATCHDOG_PID names another one. */
static uint64_t watchdog_of_environment(void)
{
    const char *usec = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    if (!usec || (pid && strtoll(pid, NULL, 10) != getpid()))
        return 0;
    char *end;
    errno = 0;
    unsigned long long number = strtoull(usec, &end, 10);
    return errno || end == usec || *end || number > UINT64_MAX / 1000 ? 0 : number * 1000;
}

static int address_of(const char *text, struct sockaddr_un *address, socklen_t *ret_size,
                      struct cox_error *err)
{
    const size_t length = strlen(text);
    if ((text[0] != '/' && text[0] != '@') || length < 2 || length >= sizeof address->sun_path)
        return cox_fail(err, COX_INVALID, "NOTIFY_SOCKET is '%.64s': no address of a socket", text);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path, text, length);
    if (text[0] == '@')
        address->sun_path[0] = '\0'; /* an abstract name has its exact length */
    *ret_size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length + (text[0] == '/'));
    return 0;
}

static int socket_open(const char *text, int *ret_fd, struct cox_error *err)
{
    const struct timeval patience = {.tv_sec = SEND_SECONDS};
    struct sockaddr_un address;
    socklen_t size = 0;
    int r = address_of(text, &address, &size, err);
    if (r)
        return r;
    _cox_cleanup_(cox_close_fd) int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) ||
        connect(fd, (const struct sockaddr *)&address, size)) {
        r = -errno;
        return cox_fail(err, r, "NOTIFY_SOCKET %.108s: %s", text, cox_status_text(r));
    }
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_notify_take(struct cox_notify *notify, struct cox_error *err)
{
    *notify = (struct cox_notify)COX_NOTIFY_NONE;
    const char *text = getenv("NOTIFY_SOCKET");
    int r = text && *text ? socket_open(text, &notify->fd, err) : 0;
    if (notify->fd >= 0)
        notify->watchdog_ns = watchdog_of_environment();
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
    return r;
}

void cox_notify_deinit(struct cox_notify *notify)
{
    cox_close_fd(&notify->fd);
}

void cox_notify_send(const struct cox_notify *notify, const char *format, ...)
{
    char text[MESSAGE_SIZE];
    if (notify->fd < 0)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cox_text_trim(text);
    while (send(notify->fd, text, strlen(text), MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
}
