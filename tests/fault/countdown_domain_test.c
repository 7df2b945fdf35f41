/* Domains: the table, memory of host and bounce, and CUDA memory with a fake driver, with each of
 * their calls failing in turn. */
#include "memory/domain/domain_table.h"
#include "countdown.h"
#include "testing.h"

#include <coxswain/memory/domain.h>
#include <coxswain/memory/domain_cuda.h>

#define SIZE 20000

static const struct cox_domain_id host_id = {COX_DOMAIN_HOST, 0};
static const struct cox_domain_id bounce_id = {COX_DOMAIN_BOUNCE, 0};
static const struct cox_domain_id cuda_id = {COX_DOMAIN_CUDA, 0};

static const char *library; /* the fake driver */
static struct cox_domains *domains, *without;
static struct cox_domain_memory *host, *bounce, *cuda, *sparse_host, *sparse_bounce;
static uint8_t bytes[SIZE];

static int create(struct cox_domain_id id, bool on_demand, void *object, struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    COX_ASSERT(cox_domains_find(domains, id, &functions, &context, NULL) == 0);
    return functions->create(context, 0, SIZE, on_demand, object, err);
}

static int attach(struct cox_domain_id id, int fd, bool writable, void *object,
                  struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    COX_ASSERT(cox_domains_find(domains, id, &functions, &context, NULL) == 0);
    return functions->attach(context, 0, fd, SIZE, writable, object, err);
}

static void destroy(void *object)
{
    struct cox_domain_memory *memory = *(struct cox_domain_memory **)object;
    memory->functions->destroy(memory);
}

/* ---- constructors ---- */

CONSTRUCT(table_new, cox_domains_new(object))
DESTROY(table_free, cox_domains_free(*(struct cox_domains **)object))
CONSTRUCT(add_cuda, cox_domains_add_cuda_library(without, library, err))

static void without_prepare(void)
{
    COX_ASSERT(cox_domains_new(&without) == 0);
}

static void without_restore(void)
{
    without = cox_domains_free(without);
}

CONSTRUCT(create_host, create(host_id, false, object, err))
CONSTRUCT(create_host_on_demand, create(host_id, true, object, err))
CONSTRUCT(attach_host, attach(host_id, host->fd, true, object, err))
CONSTRUCT(attach_host_to_read, attach(host_id, host->fd, false, object, err))
CONSTRUCT(commit_host, sparse_host->functions->commit(sparse_host, 0, SIZE, err))
CONSTRUCT(create_bounce, create(bounce_id, false, object, err))
CONSTRUCT(create_bounce_on_demand, create(bounce_id, true, object, err))
CONSTRUCT(attach_bounce, attach(bounce_id, bounce->fd, true, object, err))
CONSTRUCT(commit_bounce, sparse_bounce->functions->commit(sparse_bounce, 0, SIZE, err))
CONSTRUCT(copy_to_bounce, cox_domain_copy_to(bounce, 0, bytes, SIZE, err))
CONSTRUCT(copy_from_bounce, cox_domain_copy_from(bounce, 0, bytes, SIZE, err))
CONSTRUCT(copy_in_bounce, cox_domain_copy(bounce, 0, sparse_bounce, 0, SIZE, err))
CONSTRUCT(create_cuda, create(cuda_id, false, object, err))
CONSTRUCT(attach_cuda, attach(cuda_id, cuda->fd, true, object, err))

#define MEMORY(function) SUBJECT(function, MAKES(struct cox_domain_memory *, destroy))
/* Reading the free space of /dev/shm is optional. */
#define HOST_MEMORY(function)                                                                      \
    SUBJECT(function, MAKES(struct cox_domain_memory *, destroy), .lenient = true)
#define ACT(function) SUBJECT(function, .size = 0)

PLAIN_TEST(b15_b19_b29_b47_any_call_may_fail)
{
    COUNTDOWN(EACH_MODE,
              SUBJECT(table_new, MAKES(struct cox_domains *, table_free), .wordless = true),
              SUBJECT(add_cuda, AROUND(without_prepare, without_restore)), HOST_MEMORY(create_host),
              HOST_MEMORY(create_host_on_demand), MEMORY(attach_host), MEMORY(attach_host_to_read),
              ACT(commit_host), MEMORY(create_bounce), MEMORY(create_bounce_on_demand),
              MEMORY(attach_bounce), ACT(commit_bounce), ACT(copy_to_bounce), ACT(copy_from_bounce),
              ACT(copy_in_bounce), MEMORY(create_cuda), MEMORY(attach_cuda));
}

int main(int argc, char **argv)
{
    COX_ASSERT(argc == 2);
    library = argv[1];
    COX_ASSERT(cox_domains_new(&domains) == 0);
    COX_ASSERT(cox_domains_add_cuda_library(domains, library, NULL) == 0);
    COX_ASSERT(create(host_id, false, &host, NULL) == 0);
    COX_ASSERT(create(host_id, true, &sparse_host, NULL) == 0);
    COX_ASSERT(create(bounce_id, false, &bounce, NULL) == 0);
    COX_ASSERT(create(bounce_id, true, &sparse_bounce, NULL) == 0);
    COX_ASSERT(create(cuda_id, false, &cuda, NULL) == 0);
    int failed = test_run(NULL, NULL);
    destroy(&host);
    destroy(&sparse_host);
    destroy(&bounce);
    destroy(&sparse_bounce);
    destroy(&cuda);
    cox_domains_free(domains);
    return failed;
}
