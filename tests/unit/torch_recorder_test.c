/* The dump of PyTorch's flight recorder, as a rank takes it, with a fake PyTorch. */
#include "fake_torch.h"
#include "tests/lib/test.h"
#include "worker/loop/torch_recorder.h"

#include <dlfcn.h>

static void (*set)(size_t all, size_t active);
static void (*hold)(bool hold);
static int (*freed)(void);

static void fake_open(void)
{
    void *fake = dlopen(COX_FAKE_TORCH, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(fake);
    *(void **)(void *)&set = dlsym(fake, "fake_torch_set");
    *(void **)(void *)&hold = dlsym(fake, "fake_torch_hold");
    *(void **)(void *)&freed = dlsym(fake, "fake_torch_freed");
    assert_true(set && hold && freed);
}

static enum cox_stack_torch dump(struct cox_torch_recorder *recorder, uint64_t ms,
                                 const char **ret_text, uint32_t *ret_size)
{
    return cox_torch_recorder_dump(recorder, cox_deadline_after_ms(ms), ret_text, ret_size);
}

/* First, as long as the process has no such library. */
PLAIN_TEST(without_torch_there_is_nothing)
{
    const char *text = NULL;
    uint32_t size;
    setenv("TORCH_FR_BUFFER_SIZE", "100", 1);
    struct cox_torch_recorder *recorder = cox_torch_recorder_new();
    assert_non_null(recorder);
    assert_int_equal(dump(recorder, 60000, &text, &size), COX_STACK_TORCH_NONE);
    assert_null(text);
    assert_null(cox_torch_recorder_free(recorder));
}

PLAIN_TEST(without_the_variables_there_is_no_thread)
{
    const char *text = NULL;
    uint32_t size;
    static const char *const values[] = {NULL, "0", "", "-5", "no"};
    unsetenv("TORCH_NCCL_TRACE_BUFFER_SIZE");
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        unsetenv("TORCH_FR_BUFFER_SIZE");
        if (values[i])
            setenv("TORCH_FR_BUFFER_SIZE", values[i], 1);
        assert_null(cox_torch_recorder_new());
    }
    assert_int_equal(dump(NULL, 0, &text, &size), COX_STACK_TORCH_NONE);
    assert_null(cox_torch_recorder_free(NULL));
}

PLAIN_TEST(the_dump_is_taken_and_given_back)
{
    const char *text = NULL;
    uint32_t size;
    fake_open();
    unsetenv("TORCH_FR_BUFFER_SIZE");
    setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", 1);
    struct cox_torch_recorder *recorder = cox_torch_recorder_new();
    assert_non_null(recorder);
    for (size_t all = 100; all < 100000; all *= 10) {
        const int before = freed();
        set(all, 20);
        assert_int_equal(dump(recorder, 60000, &text, &size), COX_STACK_TORCH_THERE);
        assert_int_equal(size, all + 1);
        assert_true(text[0] == 'a' && text[all - 1] == 'a' && text[all] == '\n');
        assert_int_equal(freed(), before + 1);
    }
    /* So short a string is in itself. */
    set(3, 3);
    assert_int_equal(dump(recorder, 60000, &text, &size), COX_STACK_TORCH_NONE);
    cox_torch_recorder_free(recorder);
}

PLAIN_TEST(where_it_is_too_much_there_are_those_that_have_not_completed)
{
    const char *text = NULL;
    uint32_t size;
    struct cox_torch_recorder *recorder = cox_torch_recorder_new();
    assert_non_null(recorder);
    set(COX_STACK_TORCH_MAX, 50);
    assert_int_equal(dump(recorder, 60000, &text, &size), COX_STACK_TORCH_THERE);
    assert_true(size == 51 && text[0] == 'b');
    set(COX_STACK_TORCH_MAX, COX_STACK_TORCH_MAX);
    assert_int_equal(dump(recorder, 60000, &text, &size), COX_STACK_TORCH_TOO_LARGE);
    cox_torch_recorder_free(recorder);
}

PLAIN_TEST(one_that_does_not_return_is_left_alone)
{
    const char *text = NULL;
    uint32_t size = 0;
    enum cox_stack_torch found;
    struct cox_torch_recorder *recorder = cox_torch_recorder_new();
    assert_non_null(recorder);
    set(40, 40);
    hold(true);
    assert_int_equal(dump(recorder, 20, &text, &size), COX_STACK_TORCH_SILENT);
    /* At once. */
    assert_int_equal(dump(recorder, 60000, &text, &size), COX_STACK_TORCH_SILENT);
    hold(false);
    do
        found = dump(recorder, 60000, &text, &size);
    while (found == COX_STACK_TORCH_SILENT);
    assert_int_equal(found, COX_STACK_TORCH_THERE);
    assert_int_equal(size, 41);
    hold(true);
    assert_int_equal(dump(recorder, 20, &text, &size), COX_STACK_TORCH_SILENT);
    assert_null(cox_torch_recorder_free(recorder));
    hold(false);
}
