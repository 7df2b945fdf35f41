#include "attach.h"

#include <inttypes.h>

static const struct cox_attach_mode *const modes[] = {&cox_attach_named, &cox_attach_sealed,
                                                      &cox_attach_legacy};
#define MODE_COUNT (sizeof modes / sizeof modes[0])
#define LEGACY_NEEDS_NAMES "legacy workers find their memory by its names: use named attach"

const struct cox_attach_mode *const cox_attach_default = &cox_attach_named;

int cox_attach_choose(const struct cox_attach_choice *choice,
                      const struct cox_attach_mode **ret_mode, struct cox_error *err)
{
    const bool sealed = choice->attach == COX_ATTACH_SEALED;
    if (choice->elsewhere && (choice->external || choice->legacy_workers || sealed))
        return cox_fail(err, COX_INVALID,
                        "ranks on other nodes are started there: leave out external and legacy "
                        "workers and sealed attach");
    if (choice->external && choice->legacy_workers)
        return cox_fail(err, COX_INVALID,
                        "legacy workers cannot connect by themselves: let this program start them");
    if (choice->legacy_workers && sealed)
        return cox_fail(err, COX_INVALID, LEGACY_NEEDS_NAMES);
    /* No rank of another machine attaches to this memory: names would serve nobody, and futexes
     * wake this process once, when the last reply is there. */
    *ret_mode = choice->legacy_workers        ? &cox_attach_legacy
                : sealed || choice->elsewhere ? &cox_attach_sealed
                                              : &cox_attach_named;
    return 0;
}

const char *cox_attach_name(enum cox_attach attach)
{
    return attach == COX_ATTACH_SEALED ? cox_attach_sealed.name : cox_attach_named.name;
}

int cox_attach_of_flags(uint32_t layout_flags, const struct cox_attach_mode **ret_mode,
                        struct cox_error *err)
{
    uint32_t known = 0;
    for (size_t i = 0; i < MODE_COUNT; i++)
        known |= modes[i]->layout_flags;
    for (size_t i = 0; i < MODE_COUNT; i++)
        if ((layout_flags & known) == modes[i]->layout_flags) {
            *ret_mode = modes[i];
            return 0;
        }
    return cox_fail(err, COX_CORRUPT, LEGACY_NEEDS_NAMES);
}

int cox_attach_of_fd_count(uint32_t fd_count, const struct cox_attach_mode **ret_mode,
                           struct cox_error *err)
{
    for (size_t i = 0; i < MODE_COUNT; i++)
        if (fd_count && fd_count == modes[i]->fd_count) {
            *ret_mode = modes[i];
            return 0;
        }
    return cox_fail(err, COX_INVALID,
                    "%" PRIu32 " fds are handed down, expected %" PRIu32 ", or %" PRIu32
                    " in a sealed group: coordinator and worker are of different versions",
                    fd_count, cox_attach_named.fd_count, cox_attach_sealed.fd_count);
}

int cox_attach_join(const struct cox_attach_place *place, struct cox_attached **ret_attached,
                    struct cox_error *err)
{
    const struct cox_attach_mode *mode;
    if (place->fd_count) {
        const int r = cox_attach_of_fd_count(place->fd_count, &mode, err);
        return r ? r : mode->join(place, ret_attached, err);
    }
    struct cox_error why = {0}, why_shim = {0};
    int r = cox_attach_named.join(place, ret_attached, &why);
    if (r != COX_NOT_FOUND || !place->parent_pid)
        return r ? cox_fail(err, r, "%s", why.text) : 0;
    r = cox_attach_shim.join(place, ret_attached, &why_shim);
    return r ? cox_fail(err, r, "%s", r == COX_NOT_FOUND ? why.text : why_shim.text) : 0;
}
