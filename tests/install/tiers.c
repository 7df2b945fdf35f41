/* The three headers, as C and as C++. Prints nothing; ends with 0 if the library is of the release
 * that the headers and the build say. PACKS_MESSAGES: also packs and unpacks a request. */
#include <coxswain/coxswain.h>
#include <coxswain/handle.h>
#include <coxswain/memory.h>

#include <stdlib.h>
#include <string.h>

#if !COX_VERSION_AT_LEAST(COX_VERSION_MAJOR, COX_VERSION_MINOR, COX_VERSION_PATCH) ||              \
    COX_VERSION_AT_LEAST(COX_VERSION_MAJOR, COX_VERSION_MINOR, COX_VERSION_PATCH + 1) ||           \
    !COX_VERSION_AT_LEAST(0, 0, 999)
#error "COX_VERSION_AT_LEAST compares wrongly"
#endif

static int differ(const char *a, const char *b)
{
    return strcmp(a, b) != 0;
}

#if PACKS_MESSAGES
static int packs(void)
{
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT, *unpacked;
    uint8_t bytes[64];
    size_t size;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    size = coxswain__execute_request__pack(&request, bytes);
    unpacked = coxswain__execute_request__unpack(NULL, size, bytes);
    if (!unpacked || unpacked->execute_type != request.execute_type)
        return 0;
    coxswain__execute_request__free_unpacked(unpacked, NULL);
    return 1;
}
#endif

/* Of every struct that begins with its size; C++ has other initializers than C. */
static int initializers_set_the_size(void)
{
    struct cox_executor_options executor = COX_EXECUTOR_OPTIONS_INIT;
    struct cox_submit_options submit = COX_SUBMIT_OPTIONS_INIT;
    struct cox_worker_options worker = COX_WORKER_OPTIONS_INIT;
    struct cox_worker_callbacks callbacks = COX_WORKER_CALLBACKS_INIT;
    struct cox_group_options group = COX_GROUP_OPTIONS_INIT;
    struct cox_pool_options pool = COX_POOL_OPTIONS_INIT;
    struct cox_pool_attach_options attach = COX_POOL_ATTACH_OPTIONS_INIT;
    struct cox_queue_options queue = COX_QUEUE_OPTIONS_INIT;
    struct cox_publisher_options publisher = COX_PUBLISHER_OPTIONS_INIT;
    struct cox_subscriber_options subscriber = COX_SUBSCRIBER_OPTIONS_INIT;
    struct cox_exporter_options exporter = COX_EXPORTER_OPTIONS_INIT;
    struct cox_importer_options importer = COX_IMPORTER_OPTIONS_INIT;
    return executor.size == sizeof executor && !executor.workers.command &&
           submit.size == sizeof submit && worker.size == sizeof worker &&
           callbacks.size == sizeof callbacks && !callbacks.finalize &&
           group.size == sizeof group && pool.size == sizeof pool && attach.size == sizeof attach &&
           queue.size == sizeof queue && publisher.size == sizeof publisher &&
           subscriber.size == sizeof subscriber && exporter.size == sizeof exporter &&
           importer.size == sizeof importer;
}

/* Options as the library that is linked takes them. */
static int takes_options(void)
{
    struct cox_pool_options options = COX_POOL_OPTIONS_INIT;
    struct cox_pool *pool = NULL;
    int r;
    options.block_size = 64;
    options.block_count = 1;
    r = cox_pool_create(&options, &pool, NULL);
    cox_pool_free(pool);
    options.size = 0;
    return r == 0 && cox_pool_create(&options, &pool, NULL) == COX_INVALID;
}

int main(void)
{
    struct cox_handle_info info;
    struct cox_handle handle;
    struct cox_domains *domains = NULL;
    memset(&handle, 0, sizeof handle);
    if (differ(cox_version(), EXPECTED_VERSION) || differ(COX_VERSION_TEXT, EXPECTED_VERSION))
        return 1;
    if (cox_handle_parse(&handle, &info, NULL) == 0)
        return 2;
    if (cox_domains_new(&domains) || cox_domains_free(domains))
        return 3;
    if (cox_executor_free(NULL) || cox_worker_free(NULL) || cox_group_leave(NULL))
        return 4;
    if (!initializers_set_the_size())
        return 5;
    if (!takes_options())
        return 6;
#if PACKS_MESSAGES
    if (!packs())
        return 7;
#endif
    return EXIT_SUCCESS;
}
