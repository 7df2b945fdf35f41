/* mode: what sealed.h has, as a struct cox_attach_mode. */
#include "channel/attach/attach.h"
#include "channel/shm/geometry.h"

#include <inttypes.h>

static int sealed_check(const struct cox_geometry *geometry, int code, struct cox_error *err)
{
    return geometry->serial ? cox_fail(err, code, "serial %08" PRIx32 ": only with legacy workers",
                                       geometry->serial)
                            : 0;
}

static void sealed_account(const struct cox_geometry *geometry,
                           struct cox_attach_account *ret_account)
{
    const uint64_t request = cox_geometry_request_memory_size(geometry);
    const uint64_t rank = cox_geometry_rank_object_size(geometry);
    const uint64_t wake = cox_geometry_wake_memory_size(geometry);
    const uint64_t larger = request > rank ? request : rank;
    *ret_account = (struct cox_attach_account){
        .region_bytes = request +
                        geometry->rank_count * (rank + cox_geometry_group_words_size() +
                                                cox_geometry_group_payload_size()) +
                        wake,
        .region_size_max = wake > larger ? wake : larger,
    };
}

const struct cox_attach_mode cox_attach_sealed = {
    .name = "sealed",
    .attach = COX_ATTACH_SEALED,
    .wakeup_name = "futex",
    .layout_flags = COX_LAYOUT_SEALED,
    .fd_count = 5,
    .inherited_fd_count = 5,
    .limits =
        {
            .depth_max = COX_DEPTH_MAX,
            .depth_default = COX_DEPTH_DEFAULT,
            .rank_group = COX_ATTACH_MEMBER_OWNED,
            .coordinator_words = true,
            .rank_words = true,
            .extensions = true,
            .replaces_one = true,
            .memory_per_rank = true,
            .guards_commands = true,
        },
    .check = sealed_check,
    .account = sealed_account,
};
