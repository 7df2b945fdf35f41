#include "sealed.h"

#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/shm/region.h"
#include "channel/shm/state.h"
#include "futex_gate.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEALS_SIZE ((unsigned)(F_SEAL_SHRINK | F_SEAL_GROW))

static const char *const group_labels[COX_ATTACH_MEMBER_FD_COUNT] = {"cox_group",
                                                                     "cox_payload_group"};

static uint64_t group_size(int which)
{
    return which == 0 ? cox_geometry_group_words_size() : cox_geometry_group_payload_size();
}

void cox_sealed_init(struct cox_sealed *sealed)
{
    memset(sealed, 0, sizeof *sealed);
    sealed->request_fd = sealed->wake_fd = -1;
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++) {
        sealed->rank_fds[rank] = -1;
        for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
            sealed->group_fds[rank][i] = -1;
    }
}

static void group_close(int fds[COX_ATTACH_MEMBER_FD_COUNT])
{
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        cox_close_fd(&fds[i]);
}

void cox_sealed_close(struct cox_sealed *sealed)
{
    cox_region_detach(&sealed->wake);
    cox_region_detach(&sealed->group_hints);
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        cox_region_detach(&sealed->group[i]);
    cox_close_fd(&sealed->request_fd);
    cox_close_fd(&sealed->wake_fd);
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++) {
        group_close(sealed->group_fds[rank]);
        cox_region_detach(&sealed->ranks[rank]);
        cox_close_fd(&sealed->rank_fds[rank]);
    }
}

static int create_request(struct cox_sealed *sealed, struct cox_control *control,
                          const struct cox_geometry *geometry, bool huge_pages,
                          struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_region_create_unnamed(&control->region, "cox_request",
                                      cox_geometry_request_memory_size(geometry),
                                      SEALS_SIZE | F_SEAL_FUTURE_WRITE, huge_pages, &fd, err);
    if (r)
        return r;
    control->layout = control->region.base;
    control->geometry = *geometry;
    r = cox_control_fill(control->layout, geometry);
    if (r)
        return cox_fail(err, r, "own start time: %s", cox_status_text(r));
    cox_fault_point(COX_FAULT_CONTROL_FILLED);
    control->group_incarnation = control->layout->header.group_incarnation;
    return cox_region_open_reader(fd, "cox_request", &sealed->request_fd, err);
}

/* Not mapped here, and without the seals that the rank adds. */
static int create_group(int ret_fds[COX_ATTACH_MEMBER_FD_COUNT], struct cox_error *err)
{
    int r = 0;
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        ret_fds[i] = -1;
    for (int i = 0; r == 0 && i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        r = cox_region_create_unnamed_unmapped(group_labels[i], group_size(i), SEALS_SIZE,
                                               &ret_fds[i], err);
    if (r)
        group_close(ret_fds);
    return r;
}

int cox_sealed_create(struct cox_sealed *sealed, struct cox_control *control,
                      const struct cox_geometry *geometry, bool huge_pages, struct cox_error *err)
{
    COX_ASSERT(geometry->mode == &cox_attach_sealed);
    cox_sealed_init(sealed);
    *control = (struct cox_control)COX_CONTROL_NONE;
    int r = create_request(sealed, control, geometry, huge_pages, err);
    if (r == 0)
        r = cox_region_create_unnamed(&sealed->wake, "cox_wake",
                                      cox_geometry_wake_memory_size(geometry), SEALS_SIZE, false,
                                      &sealed->wake_fd, err);
    for (uint32_t rank = 0; r == 0 && rank < geometry->rank_count; rank++) {
        /* Never on huge pages: a writer can punch holes, and a hole is filled again only while
         * pages of its kind are free. Without a free huge page the next access, also the
         * coordinator's, would raise SIGBUS. */
        r = cox_region_create_unnamed(&sealed->ranks[rank], "cox_rank",
                                      cox_geometry_rank_object_size(geometry), SEALS_SIZE, false,
                                      &sealed->rank_fds[rank], err);
        control->ranks[rank] = sealed->ranks[rank].base;
        if (r == 0)
            r = create_group(sealed->group_fds[rank], err);
    }
    if (r) {
        cox_sealed_close(sealed);
        cox_control_close(control);
    }
    return r;
}

int cox_sealed_renew_rank(struct cox_sealed *sealed, const struct cox_geometry *geometry,
                          uint32_t rank, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int group_fds[COX_ATTACH_MEMBER_FD_COUNT];
    int r = cox_region_create_unnamed_unmapped("cox_rank", cox_geometry_rank_object_size(geometry),
                                               SEALS_SIZE | F_SEAL_SEAL, &fd, err);
    if (r)
        return r;
    r = create_group(group_fds, err);
    if (r)
        return r;
    r = cox_region_replace(&sealed->ranks[rank], fd);
    if (r) {
        group_close(group_fds);
        return cox_fail(err, r, "memory of rank %" PRIu32 ": %s", rank, cox_status_text(r));
    }
    group_close(sealed->group_fds[rank]);
    memcpy(sealed->group_fds[rank], group_fds, sizeof group_fds);
    /* Reuses the fd number, if there is one. */
    if (sealed->rank_fds[rank] < 0)
        sealed->rank_fds[rank] = cox_steal_fd(&fd);
    else if (dup3(fd, sealed->rank_fds[rank], O_CLOEXEC) < 0)
        return cox_fail(err, -errno, "memory of rank %" PRIu32 ": dup3: %s", rank,
                        cox_status_text(-errno));
    cox_fault_point(COX_FAULT_MEMORY_RENEWED);
    return 0;
}

void cox_sealed_hand_out(const struct cox_sealed *sealed, uint32_t rank,
                         int ret_fds[COX_SEALED_FD_COUNT])
{
    ret_fds[COX_SEALED_REQUEST] = sealed->request_fd;
    ret_fds[COX_SEALED_RANK] = sealed->rank_fds[rank];
    ret_fds[COX_SEALED_WAKE] = sealed->wake_fd;
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        ret_fds[COX_SEALED_GROUP + i] = sealed->group_fds[rank][i];
}

/* Memory that can shrink could end this process with SIGBUS. */
static int check_seals(int fd, unsigned seals, const char *what, struct cox_error *err)
{
    int present = fcntl(fd, F_GET_SEALS);
    if (present < 0)
        return cox_fail(err, errno == EINVAL ? COX_DENIED : -errno,
                        "%s: no memory that can be sealed: %s", what, cox_status_text(-errno));
    if (((unsigned)present & seals) != seals)
        return cox_fail(err, COX_DENIED, "%s has the seals %#x, expected %#x among them", what,
                        (unsigned)present, seals);
    return 0;
}

int cox_sealed_check_group(int fd, uint64_t size, const char *label, struct cox_error *err)
{
    struct stat st;
    int r = check_seals(fd, COX_SEALED_OWNED, label, err);
    if (r)
        return r;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "%s: fstat: %s", label, cox_status_text(-errno));
    return (uint64_t)st.st_size == size
               ? 0
               : cox_fail(err, COX_CORRUPT, "%s has %jd bytes, expected %" PRIu64, label,
                          (intmax_t)st.st_size, size);
}

/* From here on this is the only writable mapping, and no other can be made. */
static int attach_group(struct cox_sealed *sealed, const int fds[COX_SEALED_FD_COUNT],
                        struct cox_error *err)
{
    int r = 0;
    for (int i = 0; r == 0 && i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        r = check_seals(fds[COX_SEALED_GROUP + i], SEALS_SIZE, "group memory", err);
    for (int i = 0; r == 0 && i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        r = cox_region_attach_fd(&sealed->group[i], fds[COX_SEALED_GROUP + i], group_labels[i],
                                 group_size(i), COX_REGION_WRITE, err);
    for (int i = 0; r == 0 && i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        if (fcntl(fds[COX_SEALED_GROUP + i], F_ADD_SEALS, (int)COX_SEALED_OWNED) < 0)
            r = cox_fail(err, -errno, "memory '%s': seals: %s", group_labels[i],
                         cox_status_text(-errno));
    cox_fault_point(COX_FAULT_MEMORY_SEALED);
    return r;
}

int cox_sealed_attach(struct cox_sealed *sealed, struct cox_control *control, uint32_t rank,
                      const int fds[COX_SEALED_FD_COUNT], struct cox_error *err)
{
    cox_sealed_init(sealed);
    *control = (struct cox_control)COX_CONTROL_NONE;
    int r = check_seals(fds[COX_SEALED_REQUEST], SEALS_SIZE | F_SEAL_FUTURE_WRITE, "request memory",
                        err);
    if (r == 0)
        r = cox_control_attach_fd(control, fds[COX_SEALED_REQUEST], COX_REGION_READ, err);
    if (r)
        return r;
    const struct cox_geometry *geometry = &control->geometry;
    if (geometry->mode != &cox_attach_sealed)
        r = cox_fail(err, COX_CORRUPT, "request memory: its header is of a group with names");
    else if (rank >= geometry->rank_count)
        r = cox_fail(err, COX_INVALID, "rank %" PRIu32 " of a group of %" PRIu32, rank,
                     geometry->rank_count);
    if (r == 0)
        r = check_seals(fds[COX_SEALED_RANK], SEALS_SIZE, "memory of the rank", err);
    if (r == 0)
        r = cox_region_attach_fd(&sealed->ranks[rank], fds[COX_SEALED_RANK], "rank",
                                 cox_geometry_rank_object_size(geometry), COX_REGION_WRITE, err);
    if (r == 0)
        r = check_seals(fds[COX_SEALED_WAKE], SEALS_SIZE, "wake memory", err);
    if (r == 0)
        r = cox_region_attach_fd(&sealed->wake, fds[COX_SEALED_WAKE], "wake",
                                 cox_geometry_wake_memory_size(geometry), COX_REGION_WRITE, err);
    if (r == 0)
        r = cox_region_map_part(
            &sealed->group_hints, fds[COX_SEALED_WAKE], cox_geometry_group_hints_offset(),
            cox_geometry_wake_memory_size(geometry) - cox_geometry_group_hints_offset(),
            COX_REGION_WRITE, "wake", err);
    if (r == 0)
        r = attach_group(sealed, fds, err);
    if (r) {
        cox_sealed_close(sealed);
        cox_control_close(control);
        return r;
    }
    control->ranks[rank] = sealed->ranks[rank].base;
    return 0;
}

int cox_sealed_await_heard(const struct cox_control *control, uint32_t rank, uint64_t number,
                           uint64_t deadline_ns)
{
    struct cox_layout_reports *reports = cox_sealed_reports(control);
    for (;;) {
        /* Numbers are compared as distances, because 32 bits wrap around. */
        uint32_t seen = cox_state_fetched(reports, rank);
        if ((int32_t)(seen - (uint32_t)(number - 1)) >= 0)
            return 0;
        int r = cox_futex_wait(&reports->fetched[rank], seen, deadline_ns);
        if (r)
            return r;
    }
}

void cox_sealed_set_heard(const struct cox_control *control, uint32_t rank, uint64_t number)
{
    cox_state_set_fetched(cox_sealed_reports(control), rank, number);
}

void cox_channel_bind(struct cox_channel *channel, const struct cox_sealed *sealed,
                      const struct cox_control *control, enum cox_channel_id id, bool coordinator)
{
    const struct cox_geometry *geometry = &control->geometry;
    *channel = (struct cox_channel){.id = id, .control = control, .lent = true};
    if (geometry->channels[id].request_size)
        channel->request = (struct cox_region){
            .base = (uint8_t *)control->region.base + cox_geometry_request_offset(geometry, id),
            .size = geometry->channels[id].request_size,
        };
    cox_gate_bind(&channel->gate,
                  id == COX_CHANNEL_ERROR ? NULL : &cox_sealed_wake(sealed, id)->ranks_wakeup,
                  cox_sealed_wake(sealed, id), geometry->depth, coordinator);
}
