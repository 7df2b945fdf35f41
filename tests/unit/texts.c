/*
 * What is read of texts and files: test_texts FUNCTION ARGUMENT... prints it for texts_test.py. A
 * refusal is exit status 1, and its code and words on standard error.
 */
#include "channel/base/cgroup.h"
#include "coordinator/stacks/incidents.h"
#include "coordinator/stacks/stacks.h"
#include "engine/compute/adapter.h"
#include "engine/model/config.h"
#include "engine/model/safetensors.h"
#include "engine/model/tokenizer.h"
#include "program/command/top_table.h"
#include "program/service/log_line.h"
#include "program/stacks/flight_recorder.h"
#include "proto/control.pb-c.h"
#include "tests/lib/test.h"

#include <coxswain/worker.h>

#define IDS_MAX 16

static int say_config(int argc, char **argv, struct cox_error *err)
{
    struct cox_model_config config;
    (void)argc;
    int r = cox_model_config_load(argv[0], &config, err);
    if (r)
        return r;
    printf("hidden_size %u\nintermediate_size %u\nlayer_count %u\n", config.hidden_size,
           config.intermediate_size, config.layer_count);
    printf("head_count %u\nkv_head_count %u\nhead_dim %u\nvocab_size %u\nposition_count_max %u\n",
           config.head_count, config.kv_head_count, config.head_dim, config.vocab_size,
           config.position_count_max);
    printf("rms_norm_eps %.9g\nrope_theta %.17g\nrope_type %s\n", config.rms_norm_eps,
           config.rope_theta, config.rope_type == COX_ROPE_LLAMA3 ? "llama3" : "default");
    if (config.rope_type == COX_ROPE_LLAMA3)
        printf("rope %.17g %.17g %.17g %u\n", config.rope_factor, config.rope_low_freq_factor,
               config.rope_high_freq_factor, config.rope_original_position_count);
    printf("tied_embeddings %d\nbos_token %d\neos_tokens", config.tied_embeddings,
           config.bos_token);
    for (uint32_t i = 0; i < config.eos_token_count; i++)
        printf(" %d", config.eos_tokens[i]);
    return 0;
}

static int say_eos(int argc, char **argv, struct cox_error *err)
{
    int32_t tokens[COX_EOS_COUNT_MAX];
    uint32_t count = 9;
    (void)argc;
    int r = cox_eos_load(argv[0], tokens, &count, err);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        printf("%d ", tokens[i]);
    return r;
}

static int say_encoded(int argc, char **argv, struct cox_error *err)
{
    struct cox_tokenizer *tokenizer = NULL;
    int32_t *tokens = NULL;
    uint32_t count = 0;
    (void)argc;
    int r = cox_tokenizer_load(argv[0], &tokenizer, err);
    COX_ASSERT(r == 0 || !tokenizer);
    if (r == 0)
        r = cox_tokenizer_encode(tokenizer, argv[1], &tokens, &count, err);
    COX_ASSERT(r == 0 || !tokens);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        printf("%d ", tokens[i]);
    free(tokens);
    cox_tokenizer_free(tokenizer);
    return r;
}

static int say_decoded(int argc, char **argv, struct cox_error *err)
{
    struct cox_tokenizer *tokenizer = NULL;
    int32_t tokens[IDS_MAX];
    char *text = NULL;
    int r = cox_tokenizer_load(argv[0], &tokenizer, err);
    for (int i = 1; i < argc; i++)
        tokens[i - 1] = atoi(argv[i]);
    if (r == 0)
        r = cox_tokenizer_decode(tokenizer, tokens, (uint32_t)argc - 1, &text);
    if (r == 0)
        fputs(text, stdout);
    free(text);
    cox_tokenizer_free(tokenizer);
    return r;
}

/* Arguments: a file, and a name that a tensor may have. */
static int say_tensors(int argc, char **argv, struct cox_error *err)
{
    struct cox_safetensors *file = NULL;
    (void)argc;
    int r = cox_safetensors_new(argv[0], &file, err);
    if (r) {
        COX_ASSERT(!file && cox_safetensors_new(argv[0], &file, NULL) == r && !file);
        return r;
    }
    for (size_t i = 0; i < cox_safetensors_count(file); i++)
        printf("%s ", cox_safetensors_name(file, i));
    printf("%d", cox_safetensors_has(file, argv[1]));
    cox_safetensors_free(file);
    return 0;
}

/* Arguments: a file, the size that it is cut to once it is open (-1: it is not), a tensor, its
 * dimensions; and the part of a matrix, behind a slash. Prints the floats as memory has them. */
static int say_tensor(int argc, char **argv, struct cox_error *err)
{
    uint64_t numbers[IDS_MAX], count = 1;
    int dimensions = 0;
    struct cox_safetensors *file = NULL;
    int r = cox_safetensors_new(argv[0], &file, err);
    COX_ASSERT(r == 0 && (atoi(argv[1]) < 0 || truncate(argv[0], atoi(argv[1])) == 0));
    for (; 3 + dimensions < argc && argv[3 + dimensions][0] != '/'; dimensions++)
        count *= numbers[dimensions] = strtoull(argv[3 + dimensions], NULL, 10);
    float *buffer = malloc((count + 1) * sizeof *buffer);
    COX_ASSERT(buffer);
    if (3 + dimensions == argc) {
        r = cox_safetensors_read(file, argv[2], numbers, (size_t)dimensions, buffer, err);
    } else {
        char **at = argv + 4 + dimensions;
        const struct cox_tensor_part part = {strtoull(at[0], NULL, 10), strtoull(at[1], NULL, 10),
                                             strtoull(at[2], NULL, 10), strtoull(at[3], NULL, 10)};
        count = part.row_count * part.column_count;
        buffer[count] = -7;
        r = cox_safetensors_read_part(file, argv[2], numbers[0], numbers[1], &part, buffer, err);
        COX_ASSERT(buffer[count] < -6);
    }
    if (r == 0)
        fwrite(buffer, sizeof *buffer, count, stdout);
    free(buffer);
    cox_safetensors_free(file);
    return r;
}

/* Arguments: the config.json of the model, a folder. Prints its digest. */
static int say_adapter(int argc, char **argv, struct cox_error *err)
{
    const struct cox_share all = {0};
    struct cox_model_config config;
    struct cox_adapter *adapter = NULL;
    (void)argc;
    COX_ASSERT(cox_model_config_load(argv[0], &config, NULL) == 0);
    int r = cox_adapter_load(argv[1], &config, &all, &adapter, err);
    COX_ASSERT(r == 0 || !adapter);
    if (r == 0)
        printf("%" PRIx64, adapter->digest);
    cox_adapter_free(adapter);
    return r;
}

static int say_cgroup(int argc, char **argv, struct cox_error *err)
{
    static const char *const states[] = {"unknown", "none", "limited"};
    static struct cox_cgroup cgroup;
    const struct cox_cgroup_limit *limits[] = {&cgroup.cpu, &cgroup.memory, &cgroup.pids};
    (void)argc;
    (void)err;
    memset(&cgroup, 0xcc, sizeof cgroup);
    cox_cgroup_read(argv[0], &cgroup);
    for (int i = 0; i < 3; i++) {
        fputs(states[limits[i]->state], stdout);
        if (limits[i]->state == COX_CGROUP_LIMITED)
            printf(" %" PRIu64 " %" PRIu64 " %s", limits[i]->limit, limits[i]->used,
                   limits[i]->file);
        puts("");
    }
    return 0;
}

/* Arguments: what ranks 0, 1, ... have sent; "!": node b is silent; "-": it is not asked. Each
 * rank's summary and text, and then the paragraph, end with a zero. */
static int say_stacks(int argc, char **argv, struct cox_error *err)
{
    static struct cox_stacks_target targets[COX_RANK_COUNT_MAX];
    struct cox_stacks *stacks = NULL;
    uint32_t count = 0;
    (void)err;
    for (int rank = 0; rank < argc; rank++) {
        if (strcmp(argv[rank], "-") == 0)
            continue;
        struct cox_stacks_target *target = &targets[count++];
        *target = (struct cox_stacks_target){.rank = (uint32_t)rank, .pid = 1};
        if (strcmp(argv[rank], "!") == 0)
            strcpy(target->why, "node b is silent");
        else
            target->text = strdup(argv[rank]);
    }
    int r = cox_stacks_gather(targets, count, -1, cox_deadline_after_ms(1000), &stacks);
    COX_ASSERT(r == 0 && stacks->count == count);
    for (uint32_t i = 0; i < count; i++)
        printf("%s%c%s%c", stacks->ranks[i].summary, 0, stacks->ranks[i].text, 0);
    printf("%s%c", stacks->paragraph, 0);
    cox_stacks_free(stacks);
    return 0;
}

/* Seconds; "never": without a deadline. */
static int say_due(int argc, char **argv, struct cox_error *err)
{
    const uint64_t s = COX_NSEC_PER_SEC, published_ns = (uint64_t)atoi(argv[0]) * s;
    const bool never = strcmp(argv[1], "never") == 0;
    (void)argc;
    (void)err;
    const uint64_t due_ns =
        cox_incidents_due(published_ns, never ? COX_DEADLINE_NEVER : (uint64_t)atoi(argv[1]) * s);
    if (due_ns == COX_DEADLINE_NEVER)
        printf("never");
    else
        printf("%" PRIu64, due_ns);
    return 0;
}

/* Of the dump on standard input. */
static int say_flight_recorder(int argc, char **argv, struct cox_error *err)
{
    char *dump = NULL;
    size_t size = 0;
    (void)argc;
    (void)argv;
    (void)err;
    COX_ASSERT(getdelim(&dump, &size, '\0', stdin) > 0);
    cox_flight_recorder_print(dump, UINT64_C(100500000000), stdout);
    free(dump);
    return 0;
}

/* Arguments: a format, 1: with the priority, the level, the rank and the text of an event. */
static int say_log(int argc, char **argv, struct cox_error *err)
{
    enum cox_log_format format = COX_LOG_PLAIN;
    (void)argc;
    int r = strcmp(argv[0], "plain") == 0 ? 0 : cox_log_format_parse(argv[0], &format, err);
    if (r)
        return r;
    const struct cox_log_event event = {.time = {1764082707, 123456789},
                                        .level = atoi(argv[2]),
                                        .rank = atoi(argv[3]),
                                        .text = argv[4]};
    char *line = cox_log_line(format, argv[1][0] == '1', &event);
    COX_ASSERT(line);
    fputs(line, stdout);
    free(line);
    return 0;
}

static void put_status(struct cox_top_table *table, const char *group, const char *path,
                       uint64_t now_ns)
{
    static uint8_t bytes[65536];
    FILE *file = fopen(path, "re");
    COX_ASSERT(file);
    CoxswainControl__StatusReply *status =
        coxswain_control__status_reply__unpack(NULL, fread(bytes, 1, sizeof bytes, file), bytes);
    COX_ASSERT(status && cox_top_table_put(table, group, status, now_ns) == 0);
    coxswain_control__status_reply__free_unpacked(status, NULL);
    fclose(file);
}

/* Arguments: the column to sort by, 1: in reverse; and of each sample the group, the file of its
 * status and the time, or the words why there is none, and "-". */
static int say_top(int argc, char **argv, struct cox_error *err)
{
    struct cox_top_table *table;
    (void)err;
    COX_ASSERT(cox_top_table_new(&table) == 0);
    for (int i = 2; i < argc; i += 3)
        if (strcmp(argv[i + 2], "-") == 0)
            COX_ASSERT(cox_top_table_fail(table, argv[i], argv[i + 1]) == 0);
        else
            put_status(table, argv[i], argv[i + 1], strtoull(argv[i + 2], NULL, 10));
    cox_top_table_format(table, (enum cox_top_column)atoi(argv[0]), argv[1][0] == '1');
    for (uint32_t i = 0; i < cox_top_table_group_count(table); i++)
        puts(cox_top_table_group_line(table, i));
    puts(cox_top_table_heading(table));
    for (uint32_t i = 0; i < cox_top_table_rank_count(table); i++)
        puts(cox_top_table_rank_line(table, i));
    COX_ASSERT(!cox_top_table_free(table) && !cox_top_table_free(NULL));
    return 0;
}

static int parse_options(struct cox_worker_options *options, int argc, char **argv,
                         struct cox_error *err)
{
    char *before[IDS_MAX + 8];
    const int count = argc;
    const struct cox_worker_options kept = *options;
    const char *fds = getenv("COXSWAIN_FDS");
    memcpy(before, argv, (size_t)(count + 1) * sizeof *argv);
    int r = cox_worker_options_parse(options, &argc, argv, err);
    if (r) { /* they are as before */
        COX_ASSERT(argc == count && memcmp(argv, before, (size_t)count * sizeof *argv) == 0);
        COX_ASSERT(memcmp(options, &kept, sizeof kept) == 0 && getenv("COXSWAIN_FDS") == fds);
        return r;
    }
    printf("prefix %s\nrank %u\nrank_count %u\ndevice %d\nincarnation %u\nparent_pid %d\n",
           options->prefix, options->rank, options->rank_count, options->device,
           options->incarnation, options->parent_pid);
    printf("fds %d %u\non_orphan %d\ntoken_count_max %u\nkept %s\n", options->fd_first,
           options->fd_count, options->on_orphan, options->token_count_max,
           getenv("COXSWAIN_FDS") ? getenv("COXSWAIN_FDS") : "");
    COX_ASSERT(!argv[argc]);
    for (int i = 0; i < argc; i++)
        printf("%s|", argv[i]);
    return 0;
}

/* Arguments: as main gets them. */
static int say_options(int argc, char **argv, struct cox_error *err)
{
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    int r = parse_options(&options, argc, argv, err);
    if (r == 0)
        return r;
    memset(&options, 0x5a, sizeof options);
    options.size = sizeof options;
    options.control_socket[0] = '\0'; /* with one, nothing else need be given */
    COX_ASSERT(parse_options(&options, argc, argv, NULL) == r);
    return r;
}

static int say_options_kept(int argc, char **argv, struct cox_error *err)
{
    struct cox_worker_options options = {.size = sizeof(struct cox_worker_options),
                                         .incarnation = 7,
                                         .device = 3,
                                         .on_orphan = COX_ORPHAN_RETURN,
                                         .token_count_max = 5};
    return parse_options(&options, argc, argv, err);
}

static const struct {
    const char *name;
    int (*say)(int argc, char **argv, struct cox_error *err);
} functions[] = {
    {"config", say_config},
    {"eos", say_eos},
    {"encode", say_encoded},
    {"decode", say_decoded},
    {"cgroup", say_cgroup},
    {"stacks", say_stacks},
    {"options", say_options},
    {"options_kept", say_options_kept},
    {"tensors", say_tensors},
    {"tensor", say_tensor},
    {"flight", say_flight_recorder},
    {"due", say_due},
    {"adapter", say_adapter},
    {"log", say_log},
    {"top", say_top},
};

int main(int argc, char **argv)
{
    struct cox_error err = {0};
    const int fds = test_entry_count("/proc/self/fd", "", "");
    int r = -1;
    errno = ENOENT; /* of no call below */
    for (size_t i = 0; argc > 1 && i < sizeof functions / sizeof functions[0]; i++)
        if (strcmp(argv[1], functions[i].name) == 0)
            r = functions[i].say(argc - 2, argv + 2, &err);
    COX_ASSERT(test_entry_count("/proc/self/fd", "", "") == fds);
    COX_ASSERT(r == err.code);
    if (r)
        fprintf(stderr, "%d %s\n", r, err.text);
    return r != 0;
}
