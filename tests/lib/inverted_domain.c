#include "inverted_domain.h"
#include "tests/lib/posix.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

struct inverted_memory {
    struct cox_domain_memory memory;
    struct inverted_context *context;
    /* stored inverted; through memory.address that would not be noticed */
    uint8_t *bytes;
    bool created;
};

static void inverted_destroy(struct cox_domain_memory *memory)
{
    struct inverted_memory *inverted = (struct inverted_memory *)memory;
    if (inverted->created)
        inverted->context->size -= memory->size;
    if (inverted->bytes)
        munmap(inverted->bytes, memory->size);
    close(memory->fd);
    free(inverted);
}

/* Takes fd, also on failure. */
static int inverted_new(struct inverted_context *context, uint32_t device, int fd, uint64_t size,
                        bool writable, bool created, struct cox_domain_memory **ret_memory,
                        struct cox_error *err)
{
    struct inverted_memory *inverted = calloc(1, sizeof *inverted);
    void *bytes = mmap(NULL, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    if (!inverted || bytes == MAP_FAILED) {
        free(inverted);
        close(fd);
        return cox_fail(err, -ENOMEM, "inverted memory %" PRIu32, device);
    }
    inverted->memory = (struct cox_domain_memory){
        .functions = &inverted_domain_functions, .size = size, .fd = fd, .writable = writable};
    inverted->context = context;
    inverted->bytes = bytes;
    inverted->created = created;
    *ret_memory = &inverted->memory;
    return 0;
}

static int inverted_create(void *context, uint32_t device, uint64_t size, bool on_demand,
                           struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    struct inverted_context *own = context;
    (void)on_demand;
    if (own->size_max && size > own->size_max - own->size)
        return cox_fail(err, COX_NO_SPACE, "%" PRIu64 " bytes of inverted memory, %" PRIu64 " left",
                        size, own->size_max - own->size);
    int fd = memfd_create("inverted", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || posix_fallocate(fd, 0, (off_t)size) || fcntl(fd, F_ADD_SEALS, SEALS) < 0) {
        close(fd);
        return cox_fail(err, COX_NO_SPACE, "%" PRIu64 " bytes of inverted memory", size);
    }
    int r = inverted_new(own, device, fd, size, true, true, ret_memory, err);
    if (r)
        return r;
    memset(((struct inverted_memory *)*ret_memory)->bytes, 0xff, size); /* zeros, that is */
    own->size += size;
    own->created++;
    return 0;
}

static int inverted_attach(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                           struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    struct inverted_context *own = context;
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &st) < 0 || (uint64_t)st.st_size < size)
        return cox_fail(err, COX_CORRUPT, "no inverted memory of %" PRIu64 " bytes", size);
    int dup = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (dup < 0)
        return cox_fail(err, -errno, "inverted memory: %s", cox_status_text(-errno));
    int r = inverted_new(own, device, dup, size, writable, false, ret_memory, err);
    own->attached += r == 0;
    return r;
}

static void turn(uint8_t *to, const uint8_t *from, size_t size)
{
    for (size_t i = 0; i < size; i++)
        to[i] = (uint8_t)~from[i];
}

static int inverted_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                            size_t size, struct cox_error *err)
{
    struct inverted_memory *inverted = (struct inverted_memory *)memory;
    (void)err;
    turn(inverted->bytes + offset, host, size);
    inverted->context->copied_to++;
    return 0;
}

static int inverted_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                              size_t size, struct cox_error *err)
{
    struct inverted_memory *inverted = (struct inverted_memory *)memory;
    (void)err;
    turn(host, inverted->bytes + offset, size);
    inverted->context->copied_from++;
    return 0;
}

const struct cox_domain_functions inverted_domain_functions = {
    .name = "inverted",
    .create = inverted_create,
    .attach = inverted_attach,
    .destroy = inverted_destroy,
    .copy_to = inverted_copy_to,
    .copy_from = inverted_copy_from,
};
