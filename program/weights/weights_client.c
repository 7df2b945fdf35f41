#include "weights_client.h"

#include "protocol.h"

#include "channel/base/idioms.h"
#include "channel/socket/runtime_dir.h"
#include "channel/socket/socket.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Whether the directory is another user's; one that is not there is nobody's. The directory that
 * the environment names is asked all the same: it may be meant. */
static bool is_foreign(const char *place)
{
    const char *chosen = getenv("COXSWAIN_RUNTIME_DIR");
    struct stat info;
    return !(chosen && chosen[0]) && lstat(place, &info) == 0 && info.st_uid != geteuid();
}

/* In the first directory in which a holder listens, as groups are found. Returns as
 * cox_weights_list. */
static int holder_connect(uint64_t deadline_ns, int *ret_fd, struct cox_error *err)
{
    char place[COX_SOCKET_PATH_SIZE], path[COX_SOCKET_PATH_SIZE + 16];
    for (uint32_t i = 0;; i++) {
        struct cox_error one = {0};
        int r = cox_runtime_dir_search(i, place, err);
        if (r == COX_EMPTY)
            return cox_fail(err, COX_NOT_FOUND,
                            "no holder of weights runs for this user: nothing is kept");
        if (r)
            return r;
        if (is_foreign(place))
            continue;
        snprintf(path, sizeof path, "%s/" COX_WEIGHTS_NAME ".sock", place);
        r = cox_socket_connect(path, deadline_ns, ret_fd, &one);
        if (r != COX_NOT_FOUND && r != COX_CLOSED)
            return r ? cox_fail(err, r, "%s", one.text) : 0;
    }
}

static int ask(enum cox_weights_op op, const char *key, uint64_t deadline_ns, uint64_t *ret_count,
               int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    uint8_t request[COX_WEIGHTS_REQUEST_SIZE] = {(uint8_t)op};
    uint8_t answer[COX_WEIGHTS_ANSWER_SIZE];
    uint32_t fd_count = 0;
    if (strlen(key) > COX_WEIGHTS_KEY_SIZE)
        return cox_fail(err, COX_INVALID, "the key has %zu bytes: at most %d are allowed",
                        strlen(key), COX_WEIGHTS_KEY_SIZE);
    memcpy(request + 32, key, strlen(key));
    int r = holder_connect(deadline_ns, &fd, err);
    if (r)
        return r;
    r = cox_socket_send(fd, request, sizeof request, NULL, 0, deadline_ns);
    if (r == 0)
        r = cox_socket_receive(fd, answer, sizeof answer, ret_fd, ret_fd ? 1 : 0, &fd_count,
                               deadline_ns);
    if (r)
        return cox_fail(err, r, "the holder of weights: %s", cox_status_text(r));
    r = answer[0] < COX_STATUS_COUNT ? answer[0] : COX_CORRUPT;
    if (r == 0 && ret_fd && fd_count == 0)
        r = COX_CORRUPT;
    *ret_count = 0;
    for (uint32_t i = 8; i-- > 0;)
        *ret_count = *ret_count << 8 | answer[8 + i];
    return r ? cox_fail(err, r, "the holder of weights answers: %s", cox_status_text(r)) : 0;
}

int cox_weights_list(uint64_t deadline_ns, json_t **ret_list, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    uint64_t count;
    json_error_t failure;
    int r = ask(COX_WEIGHTS_LIST, "", deadline_ns, &count, &fd, err);
    if (r)
        return r;
    if (lseek(fd, 0, SEEK_SET) < 0)
        return cox_fail(err, -errno, "the list of weights: %s", cox_status_text(-errno));
    *ret_list = json_loadfd(fd, 0, &failure);
    return *ret_list ? 0 : cox_fail(err, COX_CORRUPT, "the list of weights: %.200s", failure.text);
}

int cox_weights_drop(const char *key, uint64_t deadline_ns, uint64_t *ret_count,
                     struct cox_error *err)
{
    struct cox_error failure = {0};
    int r = ask(COX_WEIGHTS_DROP, key, deadline_ns, ret_count, NULL, &failure);
    *ret_count = r ? 0 : *ret_count;
    return r == 0 || r == COX_NOT_FOUND ? 0 : cox_fail(err, r, "%s", failure.text);
}
