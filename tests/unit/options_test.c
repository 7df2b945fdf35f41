#include <coxswain/worker.h>

#include "channel_fixture.h"

static const char *const variables[] = {
    "COXSWAIN_PREFIX",     "COXSWAIN_RANK",        "COXSWAIN_WORLD_SIZE", "COXSWAIN_DEVICE",
    "COXSWAIN_PARENT_PID", "COXSWAIN_INCARNATION", "COXSWAIN_FDS",        "COXSWAIN_SOCKET",
};

static int environment_setup(void **state)
{
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++)
        unsetenv(variables[i]);
    return leak_setup(state);
}

#define OPTIONS_TEST(name) TEST_WITH(name, environment_setup, leak_teardown)

/* argv as main gets it. */
struct arguments {
    char *argv[24];
    int argc;
};

#define ARGUMENTS(...) arguments_of((const char *const[]){"worker", __VA_ARGS__, NULL})

static struct arguments arguments_of(const char *const *list)
{
    struct arguments arguments = {.argc = 0};
    for (; list[arguments.argc]; arguments.argc++)
        arguments.argv[arguments.argc] = (char *)(uintptr_t)list[arguments.argc];
    return arguments;
}

static struct cox_worker_options parsed(struct arguments *arguments)
{
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    assert_ok(cox_worker_options_parse(&options, &arguments->argc, arguments->argv, test_err()));
    return options;
}

/* Refused with a text that holds a and b; options and arguments are as before. */
static void refused(struct arguments arguments, const char *a, const char *b)
{
    struct arguments before = arguments;
    struct cox_worker_options options, kept;
    struct cox_error err = {0};
    memset(&options, 0x5a, sizeof options);
    options.size = sizeof options;
    options.control_socket[0] = '\0'; /* with one, nothing else need be given */
    kept = options;
    assert_int_equal(cox_worker_options_parse(&options, &arguments.argc, arguments.argv, &err),
                     COX_INVALID);
    if (!strstr(err.text, a) || !strstr(err.text, b))
        fail_msg("expected '%s' and '%s' in '%s'", a, b, err.text);
    assert_memory_equal(&options, &kept, sizeof options);
    assert_int_equal(arguments.argc, before.argc);
    assert_memory_equal(arguments.argv, before.argv, sizeof arguments.argv);
    assert_int_equal(cox_worker_options_parse(&options, &arguments.argc, arguments.argv, NULL),
                     COX_INVALID);
}

static void set_environment(void)
{
    setenv("COXSWAIN_PREFIX", "/4242_7", 1);
    setenv("COXSWAIN_RANK", "3", 1);
    setenv("COXSWAIN_WORLD_SIZE", "8", 1);
}

OPTIONS_TEST(the_environment_alone_is_enough)
{
    struct arguments arguments = ARGUMENTS("--verbose");
    set_environment();
    setenv("COXSWAIN_DEVICE", "-1", 1);
    setenv("COXSWAIN_PARENT_PID", "4242", 1);
    setenv("COXSWAIN_INCARNATION", "4294967295", 1);
    struct cox_worker_options options = parsed(&arguments);
    assert_string_equal(options.prefix, "/4242_7");
    assert_int_equal(options.rank, 3);
    assert_int_equal(options.rank_count, 8);
    assert_int_equal(options.device, -1);
    assert_int_equal(options.parent_pid, 4242);
    assert_int_equal(options.incarnation, UINT32_MAX);
    assert_int_equal(arguments.argc, 2);
    assert_string_equal(arguments.argv[1], "--verbose");
}

OPTIONS_TEST(b8_fds_are_sent_to_one_process)
{
    struct arguments arguments = ARGUMENTS("--verbose");
    set_environment();
    setenv("COXSWAIN_FDS", "7:28", 1);
    unsetenv("COXSWAIN_RANK");
    refused(arguments, "which rank", "");
    assert_string_equal(getenv("COXSWAIN_FDS"), "7:28"); /* not taken */
    setenv("COXSWAIN_RANK", "3", 1);
    struct cox_worker_options options = parsed(&arguments);
    assert_int_equal(options.fd_first, 7);
    assert_int_equal(options.fd_count, 28);
    assert_null(getenv("COXSWAIN_FDS"));
}

OPTIONS_TEST(m14_the_legacy_command_line_alone_is_enough)
{
    struct arguments arguments =
        ARGUMENTS("--local_rank", "2", "--local_world_size", "4", "--npu_num_per_dp", "4",
                  "--npu_device_id", "6", "--parent_pid", "77", "--shm_name_prefix", "/77_1");
    struct cox_worker_options options = parsed(&arguments);
    assert_string_equal(options.prefix, "/77_1");
    assert_int_equal(options.rank, 2);
    assert_int_equal(options.rank_count, 4);
    assert_int_equal(options.device, 6);
    assert_int_equal(options.parent_pid, 77);
    assert_int_equal(options.incarnation, 1); /* the first incarnation */
    assert_int_equal(arguments.argc, 1);
    assert_null(arguments.argv[1]);
}

OPTIONS_TEST(the_flags_of_several_groups_on_a_node_give_the_rank_in_its_own)
{
    for (int rank = 0; rank < 8; rank++) {
        char number[16];
        snprintf(number, sizeof number, "%d", rank);
        struct arguments arguments =
            ARGUMENTS("--local_rank", number, "--local_world_size=8", "--npu_num_per_dp=2",
                      "--shm_name_prefix=/g", "--global_rank", "9", "--global_world_size=16");
        struct cox_worker_options options = parsed(&arguments);
        assert_int_equal(options.rank, rank % 2);
        assert_int_equal(options.rank_count, 2);
        assert_int_equal(arguments.argc, 1);
    }
    struct arguments whole = ARGUMENTS("--local_rank=5", "--local_world_size=8",
                                       "--npu_num_per_dp=8", "--shm_name_prefix=/g");
    struct cox_worker_options options = parsed(&whole);
    assert_int_equal(options.rank, 5);
    assert_int_equal(options.rank_count, 8);
}

OPTIONS_TEST(flags_win_over_the_environment_and_the_last_flag_over_the_first)
{
    struct arguments arguments =
        ARGUMENTS("--local_rank=5", "--shm_name_prefix=/other", "--local_rank", "1");
    set_environment();
    struct cox_worker_options options = parsed(&arguments);
    assert_string_equal(options.prefix, "/other");
    assert_int_equal(options.rank, 1);
    assert_int_equal(options.rank_count, 8);
    assert_int_equal(arguments.argc, 1);
}

OPTIONS_TEST(what_is_not_known_stays_in_order)
{
    struct arguments arguments =
        ARGUMENTS("first", "--local_rankx", "9", "--local_rank", "0", "-v", "--local_ran=1",
                  "--npu_num_per_dp=8", "x=--local_rank", "--global_rankx", "7", "");
    static const char *const left[] = {
        "worker",        "first",          "--local_rankx",  "9", "-v",
        "--local_ran=1", "x=--local_rank", "--global_rankx", "7", ""};
    set_environment();
    struct cox_worker_options options = parsed(&arguments);
    assert_int_equal(options.rank, 0);
    assert_int_equal(arguments.argc, 10);
    for (int i = 0; i < 10; i++)
        assert_string_equal(arguments.argv[i], left[i]);
    assert_null(arguments.argv[10]);
}

OPTIONS_TEST(a_program_named_like_a_flag_is_no_flag)
{
    struct arguments arguments = {.argv = {(char *)(uintptr_t) "--local_rank"}, .argc = 1};
    struct arguments nothing = {.argc = 0};
    set_environment();
    assert_int_equal(parsed(&arguments).rank, 3);
    assert_int_equal(arguments.argc, 1);
    assert_int_equal(parsed(&nothing).rank, 3);
    assert_int_equal(nothing.argc, 0);
}

OPTIONS_TEST(what_the_caller_set_stays)
{
    struct cox_worker_options options = {.size = sizeof(struct cox_worker_options),
                                         .incarnation = 7,
                                         .device = 3,
                                         .on_orphan = COX_ORPHAN_RETURN,
                                         .token_count_max = 5};
    struct arguments arguments = ARGUMENTS("--local_rank=0");
    set_environment();
    assert_int_equal(cox_worker_options_parse(&options, &arguments.argc, arguments.argv, NULL), 0);
    assert_int_equal(options.incarnation, 7);
    assert_int_equal(options.device, 3);
    assert_int_equal(options.on_orphan, COX_ORPHAN_RETURN);
    assert_int_equal(options.token_count_max, 5);
}

OPTIONS_TEST(what_is_missing_is_named)
{
    refused(ARGUMENTS("x"), "not given, which group, which rank, how many ranks;", "coordinator");
    refused(ARGUMENTS("--local_rank=0", "--local_world_size=1"), "not given, which group;",
            "--shm_name_prefix");
    refused(ARGUMENTS("--shm_name_prefix=/g", "--local_world_size=1"), "not given, which rank;",
            "--local_rank");
    refused(ARGUMENTS("--shm_name_prefix=/g", "--local_rank=1"), "not given, how many ranks;",
            "--local_world_size");
    set_environment();
    unsetenv("COXSWAIN_RANK");
    refused(ARGUMENTS("x"), "which rank", "");
}

OPTIONS_TEST(a_flag_without_its_value_is_named)
{
    set_environment();
    refused(ARGUMENTS("a", "--local_rank=1", "b", "--parent_pid"), "--parent_pid", "needs a value");
    refused(ARGUMENTS("--npu_num_per_dp"), "--npu_num_per_dp", "needs a value");
    refused(ARGUMENTS("--local_rank="), "--local_rank is ''", "0 to 127");
}

OPTIONS_TEST(numbers_out_of_range_are_named_with_their_range)
{
    static const struct {
        const char *argument, *a, *b;
    } bad[] = {
        {"--local_rank=-1", "--local_rank is '-1'", "0 to 127"},
        {"--local_rank=128", "'128'", "0 to 127"},
        {"--local_rank=1x", "'1x'", "0 to 127"},
        {"--local_rank=x", "'x'", "0 to 127"},
        {"--local_rank=0x1", "'0x1'", "0 to 127"},
        {"--local_rank=4294967296", "'4294967296'", "0 to 127"},
        {"--local_rank=99999999999999999999999", "'9999", "0 to 127"},
        {"--local_rank=1.5", "'1.5'", "0 to 127"},
        {"--local_world_size=0", "--local_world_size is '0'", "1 to 128"},
        {"--local_world_size=129", "'129'", "1 to 128"},
        {"--npu_device_id=2147483648", "--npu_device_id is", "2147483647"},
        {"--npu_device_id=-2147483649", "--npu_device_id is", "-2147483648"},
        {"--npu_num_per_dp=0", "--npu_num_per_dp is '0'", "1 to 128"},
        {"--npu_num_per_dp=129", "'129'", "1 to 128"},
        {"--parent_pid=0", "--parent_pid is '0'", "1 to"},
        {"--parent_pid=-5", "--parent_pid is '-5'", "1 to"},
        {"--shm_name_prefix=g", "--shm_name_prefix is 'g'", "slash"},
        {"--shm_name_prefix=", "--shm_name_prefix is ''", "slash"},
        {"--shm_name_prefix=/", "empty", ""},
        {"--shm_name_prefix=/a/b", "'/' at position 2", ""},
        {"--shm_name_prefix=/..", "dot", ""},
    };
    set_environment();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refused(ARGUMENTS("kept", "--npu_device_id=1", "kept too", bad[i].argument), bad[i].a,
                bad[i].b);
    setenv("COXSWAIN_INCARNATION", "0", 1);
    refused(ARGUMENTS("x"), "COXSWAIN_INCARNATION is '0'", "1 to 4294967295");
    setenv("COXSWAIN_INCARNATION", "4294967296", 1);
    refused(ARGUMENTS("x"), "COXSWAIN_INCARNATION", "1 to 4294967295");
    unsetenv("COXSWAIN_INCARNATION");
    setenv("COXSWAIN_RANK", "", 1);
    refused(ARGUMENTS("x"), "COXSWAIN_RANK is ''", "0 to 127");
}

OPTIONS_TEST(names_may_be_as_long_as_a_group_s)
{
    char prefix[COX_RANK_COUNT_MAX + 4] = "--";
    struct arguments arguments = ARGUMENTS("--shm_name_prefix", prefix);
    set_environment();
    memset(prefix, 'n', sizeof prefix);
    prefix[0] = '/';
    prefix[1 + 128] = '\0';
    assert_string_equal(parsed(&arguments).prefix, prefix);
    prefix[1 + 128] = 'n';
    prefix[1 + 129] = '\0';
    refused(ARGUMENTS("--shm_name_prefix", prefix), "129 characters", "128");
}
