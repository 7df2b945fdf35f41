#include "channel/base/idioms.h"
#include "domain_table.h"

#include <coxswain/memory/domain.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Piece size of copies through the host: large enough to hide a device's latency, small enough for
 * a cache. */
#define PIECE ((size_t)256 << 10)

struct domain {
    uint32_t kind;
    uint32_t device_count;
    const struct cox_domain_functions *functions;
    void *context;
    void (*release)(void *context);
};

struct cox_domains {
    uint32_t kind_count;
    /* devices of all kinds */
    uint32_t domain_count;
    struct domain kinds[COX_DOMAIN_COUNT_MAX];
};

/* ---- the table ---- */

static const struct domain *domain_find(const struct cox_domains *domains, uint32_t kind)
{
    for (uint32_t i = 0; i < domains->kind_count; i++)
        if (domains->kinds[i].kind == kind)
            return &domains->kinds[i];
    return NULL;
}

static const char *missing_function(const struct cox_domain_functions *functions)
{
    return !functions->name                            ? "name"
           : !functions->create                        ? "create"
           : !functions->attach                        ? "attach"
           : !functions->destroy                       ? "destroy"
           : !functions->copy_to                       ? "copy_to"
           : !functions->copy_from                     ? "copy_from"
           : functions->commit && !functions->decommit ? "decommit"
           : !functions->commit && functions->decommit ? "commit"
                                                       : NULL;
}

int cox_domains_add_builtin(struct cox_domains *domains, uint32_t kind, uint32_t device_count,
                            const struct cox_domain_functions *functions, void *context,
                            void (*release)(void *context), struct cox_error *err)
{
    const struct domain *present = domain_find(domains, kind);
    if (present)
        return cox_fail(err, COX_BUSY, "domains of kind %" PRIu32 " are '%s' already", kind,
                        present->functions->name);
    if (device_count > COX_DOMAIN_COUNT_MAX - domains->domain_count)
        return cox_fail(err, COX_FULL,
                        "%" PRIu32 " domains '%s' beside %" PRIu32 " others: at most %d in all",
                        device_count, functions->name, domains->domain_count, COX_DOMAIN_COUNT_MAX);
    domains->kinds[domains->kind_count++] =
        (struct domain){kind, device_count, functions, context, release};
    domains->domain_count += device_count;
    return 0;
}

int cox_domains_new(struct cox_domains **ret_domains)
{
    struct cox_domains *domains = calloc(1, sizeof *domains);
    if (!domains)
        return -ENOMEM;
    cox_domains_add_builtin(domains, COX_DOMAIN_HOST, 1, &cox_domain_host_functions, NULL, NULL,
                            NULL);
    cox_domains_add_builtin(domains, COX_DOMAIN_BOUNCE, 1, &cox_domain_bounce_functions, NULL, NULL,
                            NULL);
    *ret_domains = domains;
    return 0;
}

struct cox_domains *cox_domains_free(struct cox_domains *domains)
{
    for (uint32_t i = 0; domains && i < domains->kind_count; i++)
        if (domains->kinds[i].release)
            domains->kinds[i].release(domains->kinds[i].context);
    free(domains);
    return NULL;
}

int cox_domains_add(struct cox_domains *domains, uint32_t kind, uint32_t device_count,
                    const struct cox_domain_functions *functions, void *context,
                    struct cox_error *err)
{
    if (kind < COX_DOMAIN_USER_FIRST || kind > COX_DOMAIN_USER_LAST)
        return cox_fail(err, COX_INVALID,
                        "domains of kind %" PRIu32 ": kinds of your own are %d to %d", kind,
                        COX_DOMAIN_USER_FIRST, COX_DOMAIN_USER_LAST);
    if (device_count == 0)
        return cox_fail(err, COX_INVALID, "domains of kind %" PRIu32 " without a device", kind);
    const char *missing = functions ? missing_function(functions) : "any function";
    if (missing)
        return cox_fail(err, COX_INVALID, "domains of kind %" PRIu32 " without %s", kind, missing);
    return cox_domains_add_builtin(domains, kind, device_count, functions, context, NULL, err);
}

int cox_domains_find(const struct cox_domains *domains, struct cox_domain_id id,
                     const struct cox_domain_functions **ret_functions, void **ret_context,
                     struct cox_error *err)
{
    const struct domain *found = domain_find(domains, id.kind);
    if (!found)
        return cox_fail(err, COX_INVALID, "this process has no domains of kind %" PRIu32, id.kind);
    if (id.device >= found->device_count)
        return cox_fail(err, COX_INVALID,
                        "domain '%s' %" PRIu32 ": this process has %" PRIu32 " of them",
                        found->functions->name, id.device, found->device_count);
    *ret_functions = found->functions;
    *ret_context = found->context;
    return 0;
}

/* ---- copies ---- */

static int check_range(const struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                       struct cox_error *err)
{
    /* offset + size may overflow 64 bits. */
    return offset <= memory->size && size <= memory->size - offset
               ? 0
               : cox_fail(err, COX_INVALID,
                          "%" PRIu64 " bytes from offset %" PRIu64 " of %s memory of %" PRIu64,
                          size, offset, memory->functions->name, memory->size);
}

static int check_target(const struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                        struct cox_error *err)
{
    if (!memory->writable)
        return cox_fail(err, COX_DENIED, "%s memory that is attached for reading only",
                        memory->functions->name);
    return check_range(memory, offset, size, err);
}

int cox_domain_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                       uint64_t size, struct cox_error *err)
{
    int r = check_target(memory, offset, size, err);
    return r || size == 0 ? r : memory->functions->copy_to(memory, offset, host, size, err);
}

int cox_domain_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                         uint64_t size, struct cox_error *err)
{
    int r = check_range(memory, offset, size, err);
    return r || size == 0 ? r : memory->functions->copy_from(memory, offset, host, size, err);
}

/* For two memories without an address. */
static int copy_in_pieces(struct cox_domain_memory *to, uint64_t to_offset,
                          struct cox_domain_memory *from, uint64_t from_offset, uint64_t size,
                          struct cox_error *err)
{
    const uint64_t piece_size = size < PIECE ? size : PIECE;
    _cox_cleanup_(cox_free_ptr) uint8_t *piece = malloc(piece_size);
    if (!piece)
        return cox_fail(err, -ENOMEM, "%" PRIu64 " bytes to copy through: %s", piece_size,
                        cox_status_text(-ENOMEM));
    int r = 0;
    for (uint64_t done = 0; r == 0 && done < size; done += piece_size) {
        uint64_t n = size - done < piece_size ? size - done : piece_size;
        r = from->functions->copy_from(from, from_offset + done, piece, n, err);
        if (r == 0)
            r = to->functions->copy_to(to, to_offset + done, piece, n, err);
    }
    return r;
}

int cox_domain_copy(struct cox_domain_memory *to, uint64_t to_offset,
                    struct cox_domain_memory *from, uint64_t from_offset, uint64_t size,
                    struct cox_error *err)
{
    int r = check_target(to, to_offset, size, err);
    if (r == 0)
        r = check_range(from, from_offset, size, err);
    if (r || size == 0)
        return r;
    if (to == from && to_offset < from_offset + size && from_offset < to_offset + size)
        return to_offset == from_offset
                   ? 0
                   : cox_fail(err, COX_INVALID,
                              "%" PRIu64 " bytes from offset %" PRIu64 " to %" PRIu64
                              " of the same %s memory overlap",
                              size, from_offset, to_offset, to->functions->name);
    if (to->functions == from->functions && to->functions->copy) {
        r = to->functions->copy(to, to_offset, from, from_offset, size, err);
        if (r != COX_UNSUPPORTED)
            return r;
    }
    /* A memory with an address needs no bounce buffer. */
    if (from->address)
        return to->functions->copy_to(to, to_offset, (const uint8_t *)from->address + from_offset,
                                      size, err);
    if (to->address)
        return from->functions->copy_from(from, from_offset, (uint8_t *)to->address + to_offset,
                                          size, err);
    return copy_in_pieces(to, to_offset, from, from_offset, size, err);
}
