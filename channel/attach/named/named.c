#include "named.h"

#include "channel/shm/geometry.h"

#include <inttypes.h>

static int named_check(const struct cox_geometry *geometry, int code, struct cox_error *err)
{
    return geometry->serial ? cox_fail(err, code, "serial %08" PRIx32 ": only with legacy workers",
                                       geometry->serial)
                            : 0;
}

void cox_named_account(const struct cox_geometry *geometry, struct cox_attach_account *ret_account)
{
    const uint64_t control = cox_geometry_control_object_size(geometry);
    const uint64_t group = cox_geometry_group_object_size(geometry);
    struct cox_attach_account account = {
        .region_bytes = control + cox_geometry_group_size(geometry),
        .region_size_max = group > control ? group : control,
        .semaphore_count =
            (uint64_t)COX_TWO_WAY_COUNT * COX_WAKEUP_COUNT * geometry->rank_count + 2,
        .name_count = group ? 2 : 1,
    };
    account.name_count += account.semaphore_count;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        const struct cox_layout_channel *sizes = &geometry->channels[c];
        const uint64_t larger =
            sizes->request_size > sizes->response_size ? sizes->request_size : sizes->response_size;
        account.region_bytes += sizes->request_size + sizes->response_size;
        if (larger > account.region_size_max)
            account.region_size_max = larger;
        account.name_count += sizes->request_size ? 2 : 1;
    }
    *ret_account = account;
}

const struct cox_attach_mode cox_attach_named = {
    .name = "named",
    .attach = COX_ATTACH_NAMED,
    .wakeup_name = "semaphore",
    .fd_count = 29,
    .limits =
        {
            .depth_max = COX_DEPTH_MAX,
            .depth_default = COX_DEPTH_DEFAULT,
            .rank_group = COX_ATTACH_WINDOWS,
            .coordinator_words = true,
            .rank_words = true,
            .extensions = true,
            .replaces_one = true,
        },
    .check = named_check,
    .account = cox_named_account,
};
