/* The three headers, as C and as C++. Prints nothing; ends with 0 if the library is of the release
 * that the headers and the build say. PACKS_MESSAGES: also packs and unpacks a request. */
#include <coxswain/coxswain.h>
#include <coxswain/ipc.h>
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

int main(void)
{
    struct cox_handle_info info;
    struct cox_handle handle;
    struct cox_domains *domains = NULL;
    memset(&handle, 0, sizeof handle);
    if (differ(cox_version(), EXPECTED_VERSION) || differ(COX_VERSION_TEXT, EXPECTED_VERSION) ||
        cox_version_number() != COX_VERSION_NUMBER)
        return 1;
    if (cox_handle_parse(&handle, &info, NULL) == 0)
        return 2;
    if (cox_domains_new(&domains) || cox_domains_free(domains))
        return 3;
    if (cox_executor_free(NULL) || cox_worker_free(NULL) || cox_group_leave(NULL))
        return 4;
#if PACKS_MESSAGES
    if (!packs())
        return 5;
#endif
    return EXIT_SUCCESS;
}
