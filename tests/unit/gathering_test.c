/* Replies in blocks, as they are taken. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cmocka.h>

#include <fcntl.h>

#include "coordinator/collector/gathering.h"

/* A block without a page costs the rank that claims it nothing; copying it would take all memory.
 */
static void m4_b33_an_reply_larger_than_what_is_free_is_refused(void **state)
{
    (void)state;
    struct sysinfo info;
    assert_int_equal(sysinfo(&info), 0);
    const uint64_t size = (((uint64_t)info.totalram + info.totalswap) * info.mem_unit | 0xffff) + 1;
    struct cox_exporter *exporter;
    struct cox_rank_result result = {.outcome = COX_OUTCOME_LATE, .pid = getpid()};
    char text[COX_RANK_TEXT_SIZE];
    struct cox_gathering_rank rank = {.ref = {.size = size}, .text = text};
    struct cox_gathering gathering = {.rank_count = 1, .results = &result, .ranks = &rank};
    const struct cox_reply_limits reply_limits = {.size_max = UINT64_MAX};
    int fd = memfd_create("answer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &rank.ref.handle, NULL), 0);
    assert_int_equal(cox_gathering_take_block(&gathering, &reply_limits, 0, COX_TYPE_OPAQUE), 0);
    assert_int_equal(result.outcome, COX_OUTCOME_ERROR);
    assert_int_equal(result.code, COX_NO_SPACE);
    assert_non_null(strstr(result.text, "available"));
    assert_null(rank.block);
    cox_exporter_free(exporter);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(m4_b33_an_reply_larger_than_what_is_free_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
