/* pool: create, attach, free, handles. */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/handle/handle_internal.h"
#include "channel/memory/host_memory.h"
#include "channel/shm/region.h"
#include "memory/domain/domain_table.h"
#include "pool_internal.h"

#include <coxswain/memory/pool.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define LABEL "cox_pool"

/* ---- pieces of a pool ---- */

static struct cox_pool *pool_new(struct cox_error *err)
{
    struct cox_pool *pool = calloc(1, sizeof *pool);
    if (!pool) {
        cox_fail(err, -ENOMEM, "no memory for a pool");
        return NULL;
    }
    pool->owner = UINT32_MAX;
    pool->words_fd = -1;
    for (uint32_t i = 0; i < COX_POOL_LOCK_COUNT; i++)
        pthread_mutex_init(&pool->locks[i], NULL);
    pthread_mutex_init(&pool->joined_lock, NULL);
    return pool;
}

/* Frees private state and mappings; the row stays. */
static void pool_drop(struct cox_pool *pool)
{
    cox_pool_local_refs_free(pool->local_refs, pool->geometry.block_count);
    if (pool->memory)
        pool->memory->functions->destroy(pool->memory);
    cox_domains_free(pool->own_domains);
    cox_region_detach(&pool->words);
    cox_close_fd(&pool->words_fd);
    free(pool);
}

static void pool_dropp(struct cox_pool **pool)
{
    if (*pool)
        pool_drop(*pool);
}

/* This process's identity for its row. */
static int pool_identify(struct cox_pool *pool, uint64_t *ret_system, struct cox_error *err)
{
    struct cox_handle_self self;
    int r = cox_handle_self_load(&self, err);
    if (r)
        return cox_fail(err, r, "a pool's owner: %s", cox_status_text(r));
    pool->pid = self.pid;
    pool->start = self.start;
    *ret_system = self.system;
    return 0;
}

static int pool_find_domain(struct cox_pool *pool, const struct cox_domains *domains,
                            const struct cox_domain_functions **ret_functions, void **ret_context,
                            struct cox_error *err)
{
    if (!domains) {
        int r = cox_domains_new(&pool->own_domains);
        if (r)
            return cox_fail(err, r, "no memory for a pool's domains");
        domains = pool->own_domains;
        /* The new table has other domains, but the caller asked for host memory only. */
        if (pool->geometry.domain.kind != COX_DOMAIN_HOST)
            return cox_fail(err, COX_INVALID,
                            "domain %" PRIu32 ":%" PRIu32 ": no domains were given",
                            pool->geometry.domain.kind, pool->geometry.domain.device);
    }
    return cox_domains_find(domains, pool->geometry.domain, ret_functions, ret_context, err);
}

/* Sets the pointers into the words. */
static void pool_point(struct cox_pool *pool)
{
    uint8_t *base = pool->words.base;
    const struct cox_pool_geometry *geometry = &pool->geometry;
    pool->header = (struct cox_pool_layout_header *)base;
    pool->owners = (struct cox_pool_layout_owner *)(base + geometry->owners);
    pool->blocks = (struct cox_pool_layout_block *)(base + geometry->blocks);
    pool->pins = (struct cox_pool_layout_pins *)(base + geometry->pins);
    pool->hints = (struct cox_pool_layout_hints *)(base + geometry->hints);
    pool->slabs = (struct cox_pool_layout_slab *)(base + geometry->slabs);
    pool->pages = (struct cox_pool_layout_pages *)(base + geometry->pages);
}

/* Claims the row, and spreads where the processes start to search. */
static int pool_join(struct cox_pool *pool, uint32_t incarnation, struct cox_error *err)
{
    int r = cox_pool_local_refs_new(pool->geometry.block_count, &pool->local_refs, err);
    if (r == 0)
        r = cox_pool_owner_claim(pool, incarnation, err);
    if (r)
        return r;
    const uint64_t part = pool->geometry.block_count / 64;
    pool->cursors[0] = (uint32_t)(part * pool->owner / pool->geometry.owner_count);
    return 0;
}

/* The blocks' file, if they are in one: attach uses it to reject the blocks of another pool. */
static int blocks_file(int fd, uint64_t *ret_dev, uint64_t *ret_ino, struct cox_error *err)
{
    struct stat st = {0};
    if (fd >= 0 && fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "a pool's blocks: fstat: %s", cox_status_text(-errno));
    *ret_dev = S_ISREG(st.st_mode) ? st.st_dev : 0;
    *ret_ino = S_ISREG(st.st_mode) ? st.st_ino : 0;
    return 0;
}

/* ---- create ---- */

int cox_pool_make_id(const char *what, uint64_t *ret_id, struct cox_error *err)
{
    uint64_t id = 0;
    while (id == 0)
        if (getrandom(&id, sizeof id, 0) < 0 && errno != EINTR)
            return cox_fail(err, -errno, "%s: %s", what, cox_status_text(-errno));
    *ret_id = id;
    return 0;
}

/* Initializes the words, before other processes can attach. */
static int pool_fill(struct cox_pool *pool, uint64_t system, struct cox_error *err)
{
    struct cox_pool_layout_header *header = pool->header;
    const uint32_t count = pool->geometry.block_count;
    for (uint32_t block = 0; block < count; block++) {
        atomic_store_explicit(&pool->blocks[block].block_word, cox_pool_word(1, COX_POOL_FREE, 0),
                              memory_order_relaxed);
        if (pool->geometry.slab_count == 0 && block % 64 == 0)
            atomic_store_explicit(&pool->hints[block / 64].hint_bits,
                                  count - block < 64 ? (UINT64_C(1) << (count - block)) - 1
                                                     : UINT64_MAX,
                                  memory_order_relaxed);
    }
    cox_pool_geometry_store(&pool->geometry, header);
    header->id = pool->id;
    header->system = system;
    int r = blocks_file(pool->memory->fd, &header->blocks_dev, &header->blocks_ino, err);
    if (r)
        return r;
    header->constants_crc = cox_pool_geometry_crc(header);
    atomic_store_explicit(&header->pool_magic, COX_POOL_MAGIC, memory_order_release);
    cox_fault_point(COX_FAULT_POOL_MADE);
    return 0;
}

static int pool_make_memory(struct cox_pool *pool, const struct cox_domains *domains,
                            struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    int r = pool_find_domain(pool, domains, &functions, &context, err);
    if (r)
        return r;
    r = functions->create(context, pool->geometry.domain.device, pool->geometry.memory_size,
                          pool->geometry.on_demand, &pool->memory, err);
    return r ? cox_fail(err, r, "%s memory of %" PRIu64 " bytes: %s", functions->name,
                        pool->geometry.memory_size, cox_status_text(r))
             : 0;
}

int cox_pool_create(const struct cox_pool_options *options, struct cox_pool **ret_pool,
                    struct cox_error *err)
{
    struct cox_pool_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_pool_options", err);
    if (r)
        return r;
    options = &known;
    _cox_cleanup_(pool_dropp) struct cox_pool *pool = pool_new(err);
    uint64_t system = 0;
    if (!pool)
        return -ENOMEM;
    r = cox_pool_geometry_resolve(options, &pool->geometry, err);
    if (r == 0)
        r = pool_identify(pool, &system, err);
    if (r == 0)
        r = cox_pool_make_id("a pool's id", &pool->id, err);
    if (r == 0)
        r = pool_make_memory(pool, options->domains, err);
    if (r == 0)
        r = cox_region_create_unnamed(&pool->words, LABEL, pool->geometry.words_size,
                                      F_SEAL_SHRINK | F_SEAL_GROW, false, &pool->words_fd, err);
    if (r)
        return r;
    pool_point(pool);
    r = pool_fill(pool, system, err);
    if (r == 0)
        r = pool_join(pool, options->incarnation, err);
    if (r)
        return r;
    *ret_pool = cox_steal_ptr(&pool);
    return 0;
}

/* ---- attach ---- */

static int pool_map_words(struct cox_pool *pool, int fd, struct cox_error *err)
{
    struct stat st;
    int r = cox_host_memory_check_fd(fd, COX_POOL_PAGE_SIZE, true, err);
    if (r)
        return r;
    pool->words_fd = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (pool->words_fd < 0)
        return cox_fail(err, -errno, "a pool's words: dup: %s", cox_status_text(-errno));
    if (fstat(pool->words_fd, &st) < 0)
        return cox_fail(err, -errno, "a pool's words: fstat: %s", cox_status_text(-errno));
    return cox_region_map(&pool->words, pool->words_fd, (uint64_t)st.st_size, COX_REGION_WRITE,
                          LABEL, err);
}

/* Copies the header once and checks the copy; the shared one is not read again. */
static int pool_load(struct cox_pool *pool, struct cox_pool_layout_header *header,
                     struct cox_error *err)
{
    uint64_t system = 0;
    pool->header = pool->words.base;
    if (atomic_load_explicit(&pool->header->pool_magic, memory_order_acquire) != COX_POOL_MAGIC)
        return cox_fail(err, COX_CORRUPT, "no pool is in this memory");
    memcpy(header, pool->header, COX_POOL_LINE_SIZE);
    int r = cox_pool_geometry_load(header, pool->words.size, &pool->geometry, err);
    if (r == 0 && header->id == 0)
        r = cox_fail(err, COX_CORRUPT, "the pool's words make no sense");
    if (r == 0)
        r = pool_identify(pool, &system, err);
    if (r == 0 && system != header->system)
        r = cox_fail(
            err, COX_DENIED,
            "the pool was created in another pid or time namespace, whose processes are unknown here: attach in the same namespaces");
    pool->id = header->id;
    return r;
}

static int pool_attach_memory(struct cox_pool *pool, const struct cox_pool_layout_header *header,
                              int fd, const struct cox_domains *domains, struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    uint64_t dev, ino;
    int r = pool_find_domain(pool, domains, &functions, &context, err);
    if (r)
        return r;
    r = blocks_file(fd, &dev, &ino, err);
    if (r)
        return r;
    if (dev != header->blocks_dev || ino != header->blocks_ino)
        return cox_fail(err, COX_CORRUPT, "these are not the blocks of this pool");
    r = functions->attach(context, pool->geometry.domain.device, fd, pool->geometry.memory_size,
                          !pool->read_only, &pool->memory, err);
    return r ? cox_fail(err, r, "%s memory of %" PRIu64 " bytes: %s", functions->name,
                        pool->geometry.memory_size, cox_status_text(r))
             : 0;
}

int cox_pool_attach(const int fds[2], const struct cox_pool_attach_options *options,
                    struct cox_pool **ret_pool, struct cox_error *err)
{
    struct cox_pool_attach_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_pool_attach_options", err);
    if (r)
        return r;
    options = &known;
    _cox_cleanup_(pool_dropp) struct cox_pool *pool = pool_new(err);
    struct cox_pool_layout_header header;
    if (!pool)
        return -ENOMEM;
    pool->read_only = options->read_only;
    r = pool_map_words(pool, fds[0], err);
    if (r == 0)
        r = pool_load(pool, &header, err);
    if (r == 0)
        r = pool_attach_memory(pool, &header, fds[1], options->domains, err);
    if (r)
        return r;
    pool_point(pool);
    r = pool_join(pool, options->incarnation, err);
    if (r)
        return r;
    *ret_pool = cox_steal_ptr(&pool);
    return 0;
}

struct cox_pool *cox_pool_free(struct cox_pool *pool)
{
    if (!pool)
        return NULL;
    if (cox_pool_local_refs_is_here(pool->local_refs)) {
        cox_pool_owner_leave(pool);
        for (uint32_t i = 0; i < COX_POOL_LOCK_COUNT; i++)
            pthread_mutex_destroy(&pool->locks[i]);
        pthread_mutex_destroy(&pool->joined_lock);
    }
    pool_drop(pool);
    return NULL;
}

/* ---- fds and handles ---- */

void cox_pool_fds(const struct cox_pool *pool, int ret_fds[2])
{
    ret_fds[0] = pool->words_fd;
    ret_fds[1] = pool->memory->fd;
}

/* Reopens the blocks for reading only; the caller owns *ret_fd. */
static int blocks_reopen(const struct cox_pool *pool, int *ret_fd, struct cox_error *err)
{
    char path[64];
    struct stat st;
    if (fstat(pool->memory->fd, &st) < 0)
        return cox_fail(err, -errno, "the pool's blocks: fstat: %s", cox_status_text(-errno));
    /* Reopening a device file would not give the same memory. */
    if (!S_ISREG(st.st_mode))
        return cox_fail(err, COX_UNSUPPORTED, "%s memory cannot be shared for reading only",
                        pool->memory->functions->name);
    snprintf(path, sizeof path, "/proc/self/fd/%d", pool->memory->fd);
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
    int r = fd < 0 ? -errno : cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "the pool's blocks cannot be opened for reading only: %s",
                        cox_status_text(r));
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_pool_export(struct cox_pool *pool, struct cox_exporter *exporter, bool read_only,
                    struct cox_pool_handle *ret_handle, struct cox_error *err)
{
    struct cox_pool_handle handle;
    _cox_cleanup_(cox_close_fd) int read_fd = -1;
    int r = cox_pool_check_here(pool, err);
    if (r)
        return r;
    if (pool->memory->fd < 0)
        return cox_fail(err, COX_UNSUPPORTED, "%s memory cannot be shared",
                        pool->memory->functions->name);
    if (read_only && (r = blocks_reopen(pool, &read_fd, err)))
        return r;
    r = cox_exporter_export(exporter, pool->words_fd, 0, 0, &handle.words, err);
    if (r)
        return r;
    r = cox_exporter_export(exporter, read_only ? read_fd : pool->memory->fd, 0, 0, &handle.blocks,
                            err);
    if (r) {
        cox_exporter_put(exporter, &handle.words);
        return r;
    }
    *ret_handle = handle;
    return 0;
}

void cox_pool_unexport(struct cox_exporter *exporter, const struct cox_pool_handle *handle)
{
    cox_exporter_put(exporter, &handle->words);
    cox_exporter_put(exporter, &handle->blocks);
}

int cox_pool_open(const struct cox_pool_handle *handle, const char *socket_path,
                  uint64_t deadline_ns, const struct cox_pool_attach_options *options,
                  struct cox_pool **ret_pool, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int words_fd = -1;
    _cox_cleanup_(cox_close_fd) int blocks_fd = -1;
    int r = cox_handle_open(&handle->words, socket_path, deadline_ns, &words_fd, err);
    if (r == 0)
        r = cox_handle_open(&handle->blocks, socket_path, deadline_ns, &blocks_fd, err);
    if (r)
        return r;
    const int fds[2] = {words_fd, blocks_fd};
    return cox_pool_attach(fds, options, ret_pool, err);
}

/* ---- getters ---- */

uint64_t cox_pool_id(const struct cox_pool *pool)
{
    return pool->id;
}

struct cox_domain_id cox_pool_domain(const struct cox_pool *pool)
{
    return pool->geometry.domain;
}

struct cox_domain_memory *cox_pool_memory(const struct cox_pool *pool)
{
    return pool->memory;
}
