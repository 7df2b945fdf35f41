/* Short-lived processes that the coordinator starts: how they end. */
#include "testing.h"

#include "coordinator/stacks/helper_process.h"

#include <poll.h>

/* Reads what it writes until it ends so; false: it writes no more. */
static bool hears(const struct cox_helper_process *helper, char text[64], const char *end)
{
    size_t size = strlen(text);
    struct pollfd output = {.fd = helper->output_fd, .events = POLLIN};
    while (!strstr(text, end)) {
        assert_int_equal(poll(&output, 1, 60000), 1);
        const ssize_t more = read(helper->output_fd, text + size, 63 - size);
        if (more <= 0)
            return false;
        text[size += (size_t)more] = '\0';
    }
    return true;
}

static struct cox_helper_process started(const char *script)
{
    struct cox_helper_process helper = COX_HELPER_PROCESS_NONE;
    char *const arguments[] = {(char[]){"sh"}, (char[]){"-c"}, (char *)(uintptr_t)script, NULL};
    char *const environment[] = {(char[]){"PATH=/usr/bin:/bin"}, NULL};
    assert_int_equal(cox_helper_process_start("/bin/sh", arguments, environment, -1, &helper), 0);
    return helper;
}

TEST(those_that_do_not_end_are_asked_together_and_once)
{
    static const char deaf[] = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.01; done";
    struct cox_helper_process helpers[] = {started(deaf), started(deaf)};
    char texts[2][64] = {"", ""};
    for (int i = 0; i < 2; i++)
        assert_true(hears(&helpers[i], texts[i], "ready\n"));
    for (int i = 0; i < 2; i++)
        cox_helper_process_ask(&helpers[i]);
    /* None has ended yet. */
    for (int i = 0; i < 2; i++)
        assert_true(hears(&helpers[i], texts[i], "asked\n"));
    for (int i = 0; i < 2; i++) {
        struct cox_helper_process kept = helpers[i];
        kept.output_fd = test_own_fd(dup(helpers[i].output_fd));
        cox_helper_process_ask(&helpers[i]);
        assert_int_equal(helpers[i].end_ns, kept.end_ns);
        cox_helper_process_end(&helpers[i]);
        assert_int_equal(helpers[i].pidfd, -1);
        assert_false(hears(&kept, texts[i], "asked\nasked\n"));
        cox_helper_process_end(&helpers[i]);
    }
}
