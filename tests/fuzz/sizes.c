/* Numbers, sizes, names and ranks on the command lines of both programs, of any bytes. */
#include "fuzz.h"

#include "channel/shm/geometry.h"
#include "program/cli/group_options.h"
#include <coxswain/worker.h>

#define TEXT_SIZE_MAX 512
#define ARGUMENT_COUNT_MAX 16

static void values(const char *text)
{
    struct cox_error err = {0};
    uint64_t number = 77;
    double real = 77;
    if (cox_parse_number("x", text, 3, 1000, &number, &err)) {
        fuzz_check_error(COX_INVALID, &err);
        FUZZ_CHECK(number == 77);
    } else {
        FUZZ_CHECK(number >= 3 && number <= 1000);
    }
    err = (struct cox_error){0};
    if (cox_parse_real("x", text, -1, 1, &real, &err))
        fuzz_check_error(COX_INVALID, &err);
    else
        FUZZ_CHECK(real >= -1 && real <= 1);
    err = (struct cox_error){0};
    number = 77;
    if (cox_parse_seconds("x", text, &number, &err))
        fuzz_check_error(COX_INVALID, &err);
    else
        FUZZ_CHECK(number >= 1 && number <= UINT64_C(1000000000));
    err = (struct cox_error){0};
    number = 77;
    if (cox_parse_size("x", text, &number, &err)) {
        fuzz_check_error(COX_INVALID, &err);
        FUZZ_CHECK(number == 77);
    } else {
        char again[32];
        uint64_t same = 0;
        FUZZ_CHECK(number >= 1 && number <= UINT64_C(1) << 40);
        snprintf(again, sizeof again, "%" PRIu64, number);
        FUZZ_CHECK(cox_parse_size("x", again, &same, NULL) == 0 && same == number);
    }
}

/* Of those of a group, counted round and round. */
static const struct cox_option *option_at(uint8_t number)
{
    static const struct cox_option_group *const groups[] = {
        &cox_layout_option_group, &cox_start_option_group, &cox_death_option_group};
    for (size_t g = 0;; g = (g + 1) % (sizeof groups / sizeof groups[0]))
        for (const struct cox_option *option = groups[g]->options; option->name; option++)
            if (number-- == 0)
                return option;
}

/* Lines of: an option (one byte), and its value. */
static void coordinator_options(char **arguments, int count)
{
    struct cox_group_choice options;
    cox_group_choice_init(&options);
    for (int a = 1; a < count; a++) {
        const struct cox_option *option = option_at((uint8_t)arguments[a][0]);
        struct cox_error err = {0};
        const char *value = arguments[a][0] ? arguments[a] + 1 : arguments[a];
        if (cox_option_take(option, &options, value, &err))
            fuzz_check_error(COX_INVALID, &err);
    }
    FUZZ_CHECK(options.rank_count >= 1 && options.rank_count <= COX_RANK_COUNT_MAX);
    FUZZ_CHECK(options.depth <= COX_DEPTH_MAX);
    struct cox_error err = {0};
    if (cox_group_choice_check(&options, &err))
        fuzz_check_error(COX_INVALID, &err);
}

static void worker_options(char **arguments, int count)
{
    char *before[ARGUMENT_COUNT_MAX + 1];
    int left = count;
    memcpy(before, arguments, ((size_t)count + 1) * sizeof before[0]);
    struct cox_worker_options options = {.size = sizeof(struct cox_worker_options),
                                         .device = 12345};
    struct cox_error err = {0};
    if (cox_worker_options_parse(&options, &left, arguments, &err)) {
        fuzz_check_error(COX_INVALID, &err);
        FUZZ_CHECK(left == count && options.device == 12345 && !options.prefix[0]);
        FUZZ_CHECK(memcmp(before, arguments, ((size_t)count + 1) * sizeof before[0]) == 0);
        return;
    }
    FUZZ_CHECK(left >= 1 && left <= count && !arguments[left]);
    /* A connecting process need not know more than the control socket. */
    if (options.control_socket[0]) {
        FUZZ_CHECK(options.rank < COX_RANK_COUNT_MAX || options.rank == COX_WORKER_RANK_ANY);
        FUZZ_CHECK(options.rank_count <= COX_RANK_COUNT_MAX);
        return;
    }
    FUZZ_CHECK(options.prefix[0] == '/' && cox_name_check(options.prefix + 1, NULL) == 0);
    FUZZ_CHECK(options.rank < COX_RANK_COUNT_MAX);
    FUZZ_CHECK(options.rank_count >= 1 && options.rank_count <= COX_RANK_COUNT_MAX);
    FUZZ_CHECK(options.incarnation >= 1 && options.parent_pid >= 0);
}

/* Text; its lines are arguments. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char program[] = "worker";
    char text[TEXT_SIZE_MAX + 1];
    char *arguments[ARGUMENT_COUNT_MAX + 1] = {program};
    int count = 1;
    size = size < TEXT_SIZE_MAX ? size : TEXT_SIZE_MAX;
    if (size)
        memcpy(text, data, size);
    text[size] = '\0';
    values(text);
    for (char *line = text; line && count < ARGUMENT_COUNT_MAX; count++) {
        arguments[count] = line;
        line = strchr(line, '\n');
        if (line)
            *line++ = '\0';
        values(arguments[count]);
    }
    coordinator_options(arguments, count);
    worker_options(arguments, count);
    return 0;
}
