#include "group_handles.h"

#include "channel/attach/sealed/sealed.h"
#include "channel/base/idioms.h"
#include "core.h"
#include "executor_internal.h"

#include <coxswain/handle.h>

#include <stdlib.h>

/* A rank's memory, as it was exported last. */
struct exported {
    bool given;
    struct cox_exporter *exporters[COX_ATTACH_MEMBER_FD_COUNT];
    struct cox_handle handles[COX_ATTACH_MEMBER_FD_COUNT];
};

struct cox_group_handles {
    /* Exports that the control socket accepts are stored there as well, for ranks that may not take
     * fds out of this process. */
    struct cox_exporter *with_socket, *without;
    struct exported ranks[COX_RANK_COUNT_MAX];
    Coxswain__RankGroupMemory messages[COX_RANK_COUNT_MAX];
    Coxswain__RankGroupMemory *pointers[COX_RANK_COUNT_MAX];
};

struct cox_group_handles *cox_group_handles_free(struct cox_group_handles *handles)
{
    if (!handles)
        return NULL;
    cox_exporter_free(handles->with_socket);
    cox_exporter_free(handles->without);
    free(handles);
    return NULL;
}

static int handles_new(const char *control_socket, struct cox_group_handles **ret_handles,
                       struct cox_error *err)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = control_socket};
    struct cox_group_handles *handles = calloc(1, sizeof *handles);
    if (!handles)
        return cox_fail(err, -ENOMEM, "no memory for the handles of the rank group");
    if (!control_socket || cox_exporter_new(&options, &handles->with_socket, NULL))
        handles->with_socket = NULL;
    int r = cox_exporter_new(NULL, &handles->without, err);
    if (r) {
        cox_group_handles_free(handles);
        return r;
    }
    *ret_handles = handles;
    return 0;
}

static void exported_put(struct exported *exported)
{
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        if (exported->exporters[i])
            cox_exporter_put(exported->exporters[i], &exported->handles[i]);
    *exported = (struct exported){.given = false};
}

static int export_one(struct cox_group_handles *handles, int fd, struct exported *exported, int i,
                      struct cox_error *err)
{
    /* The control socket stores only a limited number of fds. */
    struct cox_exporter *exporter = handles->with_socket;
    int r = exporter ? cox_exporter_export(exporter, fd, 0, 0, &exported->handles[i], NULL)
                     : COX_CLOSED;
    if (r) {
        exporter = handles->without;
        r = cox_exporter_export(exporter, fd, 0, 0, &exported->handles[i], err);
    }
    if (r == 0)
        exported->exporters[i] = exporter;
    return r;
}

static bool is_owned(const int fds[COX_ATTACH_MEMBER_FD_COUNT])
{
    return fds[0] >= 0 &&
           cox_sealed_check_group(fds[0], cox_geometry_group_words_size(), "", NULL) == 0 &&
           cox_sealed_check_group(fds[1], cox_geometry_group_payload_size(), "", NULL) == 0;
}

/* Takes memory that was created since the last init. Returns whether there is any. */
static bool memory_take(struct cox_executor *executor, uint32_t rank,
                        int ret_fds[COX_ATTACH_MEMBER_FD_COUNT])
{
    bool renewed;
    pthread_mutex_lock(&executor->memory_lock);
    int *fds = cox_attach_member_fds(executor->memory, rank);
    renewed = fds[0] >= 0;
    bool owned = renewed && is_owned(fds);
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        ret_fds[i] = owned ? cox_steal_fd(&fds[i]) : -1;
    pthread_mutex_unlock(&executor->memory_lock);
    return renewed;
}

/* After a failure: keeps it for the next init. */
static void memory_put_back(struct cox_executor *executor, uint32_t rank,
                            int fds[COX_ATTACH_MEMBER_FD_COUNT])
{
    pthread_mutex_lock(&executor->memory_lock);
    int *places = cox_attach_member_fds(executor->memory, rank);
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT && places[i] < 0; i++)
        places[i] = cox_steal_fd(&fds[i]);
    pthread_mutex_unlock(&executor->memory_lock);
}

/* Without memory_lock: the control socket's thread, which has to reply, may wait for it. */
static int rank_export(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    struct cox_group_handles *handles = executor->group_handles;
    struct exported *exported = &handles->ranks[rank];
    int fds[COX_ATTACH_MEMBER_FD_COUNT], r = 0;
    if (!memory_take(executor, rank, fds))
        return 0;
    /* The previous one belongs to another process. */
    exported_put(exported);
    for (int i = 0; r == 0 && fds[0] >= 0 && i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        r = export_one(handles, fds[i], exported, i, err);
    exported->given = r == 0 && fds[0] >= 0;
    if (r) {
        exported_put(exported);
        memory_put_back(executor, rank, fds);
    }
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        cox_close_fd(&fds[i]);
    return r;
}

static ProtobufCBinaryData bytes_of(struct cox_handle *handle)
{
    return (ProtobufCBinaryData){.data = handle->bytes, .len = sizeof *handle};
}

int cox_group_handles_fill(struct cox_executor *executor, Coxswain__ExecuteRequest *request,
                           struct cox_error *err)
{
    struct cox_error why = {0};
    int r = 0;
    if (executor->geometry.mode->limits.rank_group != COX_ATTACH_MEMBER_OWNED ||
        executor->remote.transport)
        return 0;
    if (!executor->group_handles)
        r = handles_new(cox_executor_socket(executor), &executor->group_handles, &why);
    struct cox_group_handles *handles = executor->group_handles;
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++) {
        r = rank_export(executor, rank, &why);
        struct exported *exported = &handles->ranks[rank];
        Coxswain__RankGroupMemory *message = &handles->messages[rank];
        coxswain__rank_group_memory__init(message);
        handles->pointers[rank] = message;
        message->has_words = message->has_values = exported->given;
        message->words = bytes_of(&exported->handles[0]);
        message->values = bytes_of(&exported->handles[1]);
        COX_SET(message, pid, (uint32_t)cox_rank_serving_pid(&executor->ranks[rank]));
    }
    if (r)
        return cox_fail(err, r, "the memory of the rank group: %s", why.text);
    request->group_memory = handles->pointers;
    request->n_group_memory = executor->geometry.rank_count;
    return 0;
}
