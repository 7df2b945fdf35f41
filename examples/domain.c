/* A user-defined domain: memory that the library accesses only through these functions. Here it is
 * an unnamed file that is never mapped, like a device that the host cannot address. Its bytes are
 * stored inverted, so that an access that bypasses the functions is noticed. A message from host
 * memory is copied into it once, by the first subscriber that takes the message there.
 * Build: cc domain.c $(pkg-config --cflags --libs coxswain-memory); run: ./domain */
#define _GNU_SOURCE
#include <coxswain/memory.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define KIND COX_DOMAIN_USER_FIRST /* a number that all processes agree on */
#define TEXT "from host memory"

struct counters {
    int copied_in, copied_out;
};

/* One memory as this process has attached it, followed by the domain's own fields. */
struct turned {
    struct cox_domain_memory memory;
    struct counters *counters;
};

static const struct cox_domain_functions turned_functions;

static int turned_new(struct counters *counters, int fd, uint64_t size, bool writable,
                      struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    struct turned *turned = calloc(1, sizeof *turned);
    if (!turned || fd < 0) {
        free(turned);
        return cox_fail(err, COX_NO_SPACE, "no turned memory of %llu bytes",
                        (unsigned long long)size);
    }
    /* No address: it is accessed only by copies. Other processes attach with fd. */
    turned->memory = (struct cox_domain_memory){
        .functions = &turned_functions, .size = size, .fd = fd, .writable = writable};
    turned->counters = counters;
    *ret_memory = &turned->memory;
    return 0;
}

static int turned_create(void *context, uint32_t device, uint64_t size, bool on_demand,
                         struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    (void)device;
    (void)on_demand; /* a domain that reserves everything may ignore it */
    int fd = memfd_create("turned", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (posix_fallocate(fd, 0, (off_t)size) ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)) {
        close(fd);
        fd = -1;
    }
    return turned_new(context, fd, size, true, ret_memory, err);
}

/* fd is from another process: its size is checked first. */
static int turned_attach(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                         struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    struct stat st;
    (void)device;
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < size)
        return cox_fail(err, COX_CORRUPT, "no turned memory of %llu bytes",
                        (unsigned long long)size);
    return turned_new(context, fcntl(fd, F_DUPFD_CLOEXEC, 3), size, writable, ret_memory, err);
}

static void turned_destroy(struct cox_domain_memory *memory)
{
    close(memory->fd);
    free(memory); /* the first member of struct turned */
}

static int turned_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                          size_t size, struct cox_error *err)
{
    ((struct turned *)memory)->counters->copied_in++;
    for (size_t i = 0; i < size; i++) {
        const unsigned char byte = (unsigned char)~((const unsigned char *)host)[i];
        if (pwrite(memory->fd, &byte, 1, (off_t)(offset + i)) != 1)
            return cox_fail(err, COX_NO_SPACE, "writing turned memory");
    }
    return 0;
}

static int turned_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                            size_t size, struct cox_error *err)
{
    ((struct turned *)memory)->counters->copied_out++;
    if (pread(memory->fd, host, size, (off_t)offset) != (ssize_t)size)
        return cox_fail(err, COX_CORRUPT, "reading turned memory");
    for (size_t i = 0; i < size; i++)
        ((unsigned char *)host)[i] = (unsigned char)~((unsigned char *)host)[i];
    return 0;
}

/* All other functions are optional (coxswain/memory/domain.h). */
static const struct cox_domain_functions turned_functions = {
    .name = "turned",
    .create = turned_create,
    .attach = turned_attach,
    .destroy = turned_destroy,
    .copy_to = turned_copy_to,
    .copy_from = turned_copy_from,
};

static int take(struct cox_subscriber *subscriber, struct cox_error *err)
{
    struct cox_message message;
    char text[sizeof TEXT] = "";
    int r = cox_subscriber_take(subscriber, &message, err);
    if (r)
        return r;
    r = cox_pool_copy_from(message.pool, &message.ref, 0, text, message.length, err);
    printf("%s: '%s'\n", message.copied ? "copied" : "shared", text);
    cox_pool_unref(message.pool, &message.ref, NULL);
    return r;
}

static int run(const struct cox_domains *domains, struct cox_error *err)
{
    const struct cox_pool_options in_host = {
        .size = sizeof(struct cox_pool_options), .block_size = 64, .block_count = 4};
    const struct cox_pool_options in_own = {.size = sizeof(struct cox_pool_options),
                                            .domains = domains,
                                            .domain = {KIND, 0},
                                            .block_size = 64,
                                            .block_count = 4};
    const struct cox_pool_attach_options attach = {.size = sizeof(struct cox_pool_attach_options),
                                                   .domains = domains};
    struct cox_pool *host = NULL, *own = NULL, *view = NULL;
    struct cox_queue *queue = NULL;
    struct cox_publisher *publisher = NULL;
    struct cox_subscriber *first = NULL, *second = NULL;
    struct cox_block_ref ref;
    uint64_t number;
    int fds[2];
    int r = cox_pool_create(&in_host, &host, err);
    if (r == 0)
        r = cox_pool_create(&in_own, &own, err);
    if (r == 0) { /* attach as another process would */
        cox_pool_fds(own, fds);
        r = cox_pool_attach(fds, &attach, &view, err);
    }
    if (r == 0)
        r = cox_queue_create(NULL, &queue, err);
    const struct cox_publisher_options publishing = {
        .size = sizeof(struct cox_publisher_options), .pool = host, .domains = domains};
    if (r == 0)
        r = cox_publisher_new(queue, &publishing, &publisher, err);
    const struct cox_subscriber_options taking = {.size = sizeof(struct cox_subscriber_options),
                                                  .pool = own,
                                                  .pools = &host,
                                                  .pool_count = 1,
                                                  .domains = domains};
    if (r == 0)
        r = cox_subscriber_new(queue, &taking, &first, err);
    const struct cox_subscriber_options taking_too = {.size = sizeof(struct cox_subscriber_options),
                                                      .pool = view,
                                                      .pools = &host,
                                                      .pool_count = 1,
                                                      .domains = domains};
    if (r == 0)
        r = cox_subscriber_new(queue, &taking_too, &second, err);
    if (r == 0)
        r = cox_pool_allocate(host, sizeof TEXT, &ref, err);
    if (r == 0) {
        memcpy(cox_pool_pointer(host, &ref), TEXT, sizeof TEXT);
        r = cox_publisher_publish(publisher, &ref, sizeof TEXT, 0, &number, err);
        cox_pool_unref(host, &ref, NULL);
    }
    if (r == 0)
        r = take(first, err);
    if (r == 0)
        r = take(second, err);
    cox_subscriber_free(first);
    cox_subscriber_free(second);
    cox_publisher_free(publisher);
    cox_queue_free(queue);
    cox_pool_free(view);
    cox_pool_free(own);
    cox_pool_free(host);
    return r;
}

int main(void)
{
    struct counters counters = {0};
    struct cox_domains *domains = NULL;
    struct cox_error err = {0};
    int r = cox_domains_new(&domains);
    if (r == 0)
        r = cox_domains_add(domains, KIND, 1, &turned_functions, &counters, &err);
    if (r == 0)
        r = run(domains, &err);
    cox_domains_free(domains);
    if (r)
        fprintf(stderr, "%s %s\n", cox_status_text(r), err.text);
    else
        printf("bytes went in %d times, and out %d times\n", counters.copied_in,
               counters.copied_out);
    return r != 0;
}
