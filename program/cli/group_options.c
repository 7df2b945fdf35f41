#include "group_options.h"

#include "channel/base/spin.h"
#include "channel/shm/geometry.h"
#include "coordinator/recovery/recovery.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define RESTART_MAX_MAX 1000000

/* ---- values ---- */

/* "execute.request=16M", "execute.reply=1M", "large-payload=0" */
static int take_size(void *choice, const char *text, struct cox_error *err)
{
    struct cox_group_choice *options = choice;
    const char *equals = strchrnul(text, '=');
    char what[64], name[64];
    snprintf(what, sizeof what, "%.*s", (int)(equals - text), text);
    if (*equals && strcmp(what, "large-payload") == 0) {
        options->large_payload_size = 0;
        options->no_large_payloads = strcmp(equals + 1, "0") == 0;
        return options->no_large_payloads ? 0
                                          : cox_parse_size("--size large-payload", equals + 1,
                                                           &options->large_payload_size, err);
    }
    for (int c = 0; *equals && c < COX_CHANNEL_COUNT; c++) {
        snprintf(name, sizeof name, "%s.request", cox_channel_name((enum cox_channel_id)c));
        if (strcmp(what, name) == 0)
            return cox_parse_size("--size", equals + 1, &options->request_size[c], err);
        snprintf(name, sizeof name, "%s.reply", cox_channel_name((enum cox_channel_id)c));
        if (strcmp(what, name) == 0)
            return cox_parse_size("--size", equals + 1, &options->response_size[c], err);
    }
    return cox_fail(err, COX_INVALID,
                    "--size is '%.64s': expected CHANNEL.request=BYTES, CHANNEL.reply=BYTES or "
                    "large-payload=BYTES; CHANNEL is execute, shared_sync_link, transfer, "
                    "recover_command or execute_error",
                    text);
}

/* "DIR" or "DIR,contents" */
static int take_crash_dir(void *choice, const char *text, struct cox_error *err)
{
    struct cox_group_choice *options = choice;
    static const char contents[] = ",contents";
    size_t length = strlen(text);
    options->crash_contents = length >= sizeof contents - 1 &&
                              strcmp(text + length - (sizeof contents - 1), contents) == 0;
    if (options->crash_contents)
        length -= sizeof contents - 1;
    if (length == 0 || length >= sizeof options->crash_path)
        return cox_fail(err, COX_INVALID,
                        "--crash-dir is '%.64s': expected a directory of less than %zu bytes, as "
                        "in DIR or DIR,contents",
                        text, sizeof options->crash_path);
    memcpy(options->crash_path, text, length);
    options->crash_path[length] = '\0';
    options->crash_dir = options->crash_path;
    return 0;
}

/* "restart", or with the limit of deaths "restart,5/60" */
static int take_on_death(void *policy_member, const char *text, struct cox_error *err)
{
    struct cox_restart_policy *options = policy_member;
    const char *comma = strchrnul(text, ','), *slash = strchr(comma, '/');
    const size_t length = (size_t)(comma - text);
    uint32_t policy = 0;
    while (policy < COX_ON_DEATH_COUNT && (strlen(cox_on_death_name(policy)) != length ||
                                           strncmp(text, cox_on_death_name(policy), length) != 0))
        policy++;
    const bool restarts = policy == COX_ON_DEATH_RESTART || policy == COX_ON_DEATH_RESTART_ALL;
    if (policy == COX_ON_DEATH_COUNT || (*comma && !(restarts && slash)))
        return cox_fail(err, COX_INVALID,
                        "--on-death is '%.64s': expected fail, wait, restart or restart-all; the "
                        "last two may have a limit of N deaths in SEC seconds: restart,N/SEC",
                        text);
    options->on_death = (enum cox_on_death)policy;
    options->restart_max = 0;
    options->window_ms = 0;
    if (!*comma)
        return 0;
    char count[64];
    uint64_t number;
    snprintf(count, sizeof count, "%.*s", (int)(slash - comma - 1), comma + 1);
    int r = cox_parse_number("--on-death: the N of restart,N/SEC", count, 1, RESTART_MAX_MAX,
                             &number, err);
    if (!r)
        options->restart_max = (uint32_t)number;
    return r ? r
             : cox_parse_seconds("--on-death: the SEC of restart,N/SEC", slash + 1,
                                 &options->window_ms, err);
}

/* ---- options ---- */

void cox_group_choice_init(struct cox_group_choice *options)
{
    *options = (struct cox_group_choice){.rank_count = COX_GROUP_CHOICE_RANK_COUNT_DEFAULT};
#if COX_TESTING
    /* Tests in which ranks die again and again need no pause between the attempts. */
    const char *backoff = getenv("COXSWAIN_TEST_BACKOFF_MS");
    if (backoff)
        options->recovery.backoff_min_ms = options->recovery.backoff_max_ms =
            strtoull(backoff, NULL, 10);
#endif
}

static int take_spin(void *member, const char *value, struct cox_error *err)
{
    enum cox_spin *spin_member = member;
    uint32_t spin = 0;
    while (spin < COX_SPIN_COUNT && strcmp(value, cox_spin_name(spin)) != 0)
        spin++;
    if (spin == COX_SPIN_COUNT)
        return cox_fail(err, COX_INVALID, "--spin is '%.64s': expected off, auto or max", value);
    *spin_member = (enum cox_spin)spin;
    return 0;
}

static int take_attach(void *member, const char *value, struct cox_error *err)
{
    enum cox_attach *attach = member;
    if (strcmp(value, "named") != 0 && strcmp(value, "sealed") != 0)
        return cox_fail(err, COX_INVALID, "--attach is '%.64s': expected named or sealed", value);
    *attach = value[0] == 's' ? COX_ATTACH_SEALED : COX_ATTACH_NAMED;
    return 0;
}

const char *cox_group_choice_crash_dir(const struct cox_group_choice *options)
{
    const char *folder = options->crash_dir ? options->crash_dir : getenv("COXSWAIN_CRASH_DIR");
    return folder && folder[0] ? folder : NULL;
}

enum cox_stacks_use cox_group_choice_stacks(void)
{
    const char *value = getenv("COXSWAIN_STACKS");
    return value && strcmp(value, "off") == 0 ? COX_STACKS_ON_REQUEST : COX_STACKS_AT_FAILURES;
}

static int choice_mode(const struct cox_group_choice *options, enum cox_attach attach,
                       const struct cox_attach_mode **ret_mode, struct cox_error *err)
{
    const struct cox_attach_choice choice = {.attach = attach,
                                             .legacy_workers = options->legacy_workers};
    return cox_attach_choose(&choice, ret_mode, err);
}

const struct cox_attach_limits *cox_group_choice_limits(const struct cox_group_choice *options)
{
    /* Also before options that exclude each other are refused. */
    const struct cox_attach_mode *mode = NULL;
    const enum cox_attach attach = options->legacy_workers ? COX_ATTACH_NAMED : options->attach;
    return choice_mode(options, attach, &mode, NULL) ? NULL : &mode->limits;
}

int cox_group_choice_geometry(const struct cox_group_choice *options,
                              struct cox_geometry *ret_geometry, struct cox_error *err)
{
    struct cox_geometry_choice choice = {.depth = options->depth};
    memcpy(choice.request_size, options->request_size, sizeof choice.request_size);
    memcpy(choice.response_size, options->response_size, sizeof choice.response_size);
    const int r = choice_mode(options, options->attach, &choice.mode, err);
    return r ? r : cox_geometry_resolve(options->rank_count, &choice, ret_geometry, err);
}

int cox_group_choice_check(const struct cox_group_choice *options, struct cox_error *err)
{
    struct cox_geometry geometry;
    const char *stacks = getenv("COXSWAIN_STACKS");
    if (stacks && stacks[0] && strcmp(stacks, "on") != 0 && strcmp(stacks, "off") != 0)
        return cox_fail(err, COX_INVALID, "COXSWAIN_STACKS is '%.64s': expected on or off", stacks);
    return cox_group_choice_geometry(options, &geometry, err);
}

/* ---- tables ---- */

#define NUMBER_TEXT(number) NUMBER_TEXT_OF(number)
#define NUMBER_TEXT_OF(number) #number

static const struct cox_option layout_options[] = {
    {"ranks", "N",
     "worker processes, 1 to " NUMBER_TEXT(COX_RANK_COUNT_MAX) " (default " NUMBER_TEXT(
         COX_GROUP_CHOICE_RANK_COUNT_DEFAULT) "); the reference worker divides a model among 1, 2, 4 or 8",
     .letter = 'n', COX_COUNT(struct cox_group_choice, rank_count, 1, COX_RANK_COUNT_MAX),
     COX_GIVEN(struct cox_group_choice, rank_count_given)},
    {"name", "NAME", "name of the group, at most 128 bytes (default: made of the process id)",
     COX_NAME(struct cox_group_choice, name)},
    {"depth", "D",
     "requests in flight per channel, 1 to " NUMBER_TEXT(COX_DEPTH_MAX) " (default " NUMBER_TEXT(
         COX_DEPTH_DEFAULT) "); from 2 on the next step is planned and sent while the workers compute one",
     COX_COUNT(struct cox_group_choice, depth, 1, COX_DEPTH_MAX)},
    {"spin", "off|auto|max",
     "how long a wait spins before it blocks: not at all, 100 us (auto, the default), or 2 ms; it "
     "yields its processor meanwhile; never with --legacy-workers",
     COX_TAKE(struct cox_group_choice, spin, take_spin)},
    {"attach", "named|sealed",
     "how workers reach the group's memory: by names in /dev/shm (default), or by fds at the "
     "group's control socket, where nothing has a name and no worker can write what is not its own",
     COX_TAKE(struct cox_group_choice, attach, take_attach)},
    {"legacy-workers", NULL, "the names, sizes and rules of MindIE-LLM workers; depth 1",
     COX_FLAG(struct cox_group_choice, legacy_workers)},
    {"size", "WHAT=BYTES[K|M|G]",
     "CHANNEL.request, CHANNEL.reply: the request or reply region of a channel: execute, "
     "shared_sync_link, transfer, recover_command or execute_error. large-payload: maximum size of "
     "a request or reply that does not fit its frame or slot and is sent out of line, up to 1024G "
     "(default 2G, a reply 1G and a little); 0: refuse what does not fit. May be repeated",
     .take = take_size},
    {0},
};

static const struct cox_option start_options[] = {
    {"model", "DIR",
     "folder of a Llama-architecture model: config.json, model.safetensors and, for prompts that are "
     "text, tokenizer.json (default: the model that came with the program)",
     COX_TEXT(struct cox_group_choice, model)},
    {"worker", "PATH",
     "worker program, or \"PROGRAM ARGUMENT...\" (default: $COXSWAIN_WORKER, coxswain-worker beside "
     "this program, or in PATH); none: wait for workers that are started by hand, as "
     "long as that takes (coxswain-worker --socket NAME)",
     COX_TEXT(struct cox_group_choice, worker)},
    {"crash-dir", "DIR",
     "after a death, a timeout, a divergence or a failed start, write what the group did to a file "
     "in DIR, at most 16 for a name (coxswain postmortem); the recorders are files there, too "
     "(default: $COXSWAIN_CRASH_DIR, or none). DIR,contents: with the bytes of the requests that "
     "were under way",
     .take = take_crash_dir},
    {"start-timeout", "SEC", "time that workers have to attach, up to 1000000 s (default 60)",
     COX_SECONDS(struct cox_group_choice, start_timeout_ms)},
    {"timeout", "SEC", "time that a request may take, up to 1000000 s (default 30)",
     COX_SECONDS(struct cox_group_choice, step_ms)},
    {0},
};

static const struct cox_option death_options[] = {
    {"on-death", "fail|wait|restart|restart-all",
     "when a worker dies: fail, the default, ends the group; wait waits for `coxswain recover "
     "restart`; restart replaces the dead worker; restart-all replaces all of them. Prompts "
     "continue where they were. restart,N/SEC, restart-all,N/SEC: more than N deaths within SEC "
     "seconds end the group, N from 1 to 1000000 (default 5/60)",
     COX_TAKE(struct cox_group_choice, recovery, take_on_death)},
    {0},
};

const struct cox_option_group cox_layout_option_group = {.title = "The group:",
                                                         .options = layout_options};
const struct cox_option_group cox_start_option_group = {.title = "The workers:",
                                                        .options = start_options};
const struct cox_option_group cox_death_option_group = {.title = "When a worker dies:",
                                                        .options = death_options};

/* ---- look-ups ---- */

/* The folder of this program, without a slash at the end. */
static int own_folder(char *folder, struct cox_error *err)
{
    ssize_t size = readlink("/proc/self/exe", folder, PATH_MAX - 1);
    if (size < 0) {
        int r = -errno;
        return cox_fail(err, r, "cannot read /proc/self/exe: %s", cox_status_text(r));
    }
    folder[size] = 0;
    *strrchr(folder, '/') = 0;
    return 0;
}

bool cox_worker_is_reference(const char *worker)
{
    const char *slash = strrchr(worker, '/');
    return strcmp(slash ? slash + 1 : worker, COX_REFERENCE_WORKER) == 0;
}

int cox_worker_find(struct cox_group_choice *options, const char **ret_path, struct cox_error *err)
{
    const char *environment = getenv("COXSWAIN_WORKER");
    const char *chosen = options->worker ? options->worker : environment;
    if (chosen && *chosen) {
        *ret_path = chosen;
        return 0;
    }
    char folder[PATH_MAX];
    int r = own_folder(folder, err);
    if (r)
        return r;
    int size = snprintf(options->worker_path, PATH_MAX, "%s/" COX_REFERENCE_WORKER, folder);
    if (size < PATH_MAX && access(options->worker_path, X_OK) == 0)
        *ret_path = options->worker_path;
    else
        *ret_path =
            COX_REFERENCE_WORKER; /* the start searches PATH, and reports if it is missing */
    return 0;
}

int cox_worker_command(struct cox_group_choice *options, const char *worker, const char *model,
                       const char *const **ret_command, struct cox_error *err)
{
    const char **command = options->worker_command;
    uint32_t count = 0;
    if (!strchr(worker, ' ') || access(worker, F_OK) == 0) {
        command[count++] = worker;
    } else {
        int size = snprintf(options->worker_text, PATH_MAX, "%s", worker);
        char *rest = NULL, *word = strtok_r(options->worker_text, " ", &rest);
        for (; word && count < COX_WORKER_WORD_COUNT_MAX; word = strtok_r(NULL, " ", &rest))
            command[count++] = word;
        if (size >= PATH_MAX || word || count == 0)
            return cox_fail(err, COX_INVALID,
                            "--worker is '%.64s': expected a program and at most %d arguments, in "
                            "fewer than %d bytes",
                            worker, COX_WORKER_WORD_COUNT_MAX - 1, PATH_MAX);
    }
    if (cox_group_choice_limits(options)
            ->extensions) { /* theirs take it from the init, and end at other flags */
        command[count++] = "--model";
        command[count++] = model;
    }
    command[count] = NULL;
    *ret_command = command;
    return 0;
}

static bool is_folder(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

int cox_model_find(struct cox_group_choice *options, const char **ret_path, struct cox_error *err)
{
    if (options->model) {
        errno = 0;
        if (!is_folder(options->model)) {
            int r = errno == 0 || errno == ENOENT || errno == ENOTDIR ? COX_NOT_FOUND : -errno;
            return r < 0 ? cox_fail(err, r, "the model folder %s: %s", options->model,
                                    cox_status_text(r))
                         : cox_fail(err, r, "the model folder %s does not exist", options->model);
        }
        *ret_path = options->model;
        return 0;
    }
    char folder[PATH_MAX];
    int r = own_folder(folder, err);
    if (r)
        return r;
    const char *below = "/../share/coxswain/models/sums";
    for (;;) {
        int size = snprintf(options->model_path, PATH_MAX, "%s%s", folder, below);
        if (size < PATH_MAX && is_folder(options->model_path)) {
            *ret_path = options->model_path;
            return 0;
        }
        /* Then in each parent folder, which finds it from a build tree inside the source tree.
         */
        if (strcmp(below, "/models/sums")) {
            below = "/models/sums";
            continue;
        }
        char *slash = strrchr(folder, '/');
        if (!slash)
            break;
        *slash = 0;
    }
    return cox_fail(err, COX_NOT_FOUND,
                    "no model folder was found near the program: name one with --model DIR");
}
