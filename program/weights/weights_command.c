/* coxswain weights: the weights that are kept on this machine for processes to come. */
#include "program/cli/command.h"
#include "program/cli/console.h"
#include "program/cli/runner.h"

#include "holder.h"
#include "weights_client.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TIMEOUT_MS 5000

enum action { LIST, DROP, HOLD };

struct weights_choice {
    enum action action;
    bool all, stay, json;
    int count;
    char *const *keys;
};

/* ---- list ---- */

static void print_row(const json_t *row)
{
    const char *key = json_string_value(json_object_get(row, "key"));
    const json_t *left = json_object_get(row, "left_s");
    char state[64];
    const int users = (int)json_integer_value(json_object_get(row, "users"));
    if (json_is_true(json_object_get(row, "loading")))
        snprintf(state, sizeof state, "being loaded");
    else if (users > 0)
        snprintf(state, sizeof state, "%d user%s", users, users == 1 ? "" : "s");
    else if (json_is_null(left))
        snprintf(state, sizeof state, "kept until dropped");
    else
        snprintf(state, sizeof state, "dropped in %.0f s", json_number_value(left));
    printf("%10.1f MiB  %-20s %s\n",
           (double)json_integer_value(json_object_get(row, "bytes")) / (1 << 20), state,
           key ? key : "");
}

static int list(bool as_json)
{
    struct cox_error err = {0};
    json_t *rows = NULL;
    size_t i;
    const json_t *row;
    int r = cox_weights_list(cox_deadline_after_ms(TIMEOUT_MS), &rows, &err);
    if (r == COX_NOT_FOUND) /* nothing is kept, which is no failure */
        rows = json_array();
    else if (r)
        return cox_exit_with(&err);
    if (as_json) {
        json_dumpf(rows, stdout, JSON_INDENT(2));
        putchar('\n');
    }
    json_array_foreach(rows, i, row) if (!as_json) print_row(row);
    if (!as_json && json_array_size(rows) == 0)
        cox_console_say("no weights are kept for this user on this machine");
    json_decref(rows);
    return COX_EXIT_OK;
}

/* ---- drop, hold ---- */

static int drop_all(void)
{
    struct cox_error err = {0};
    uint64_t count = 0;
    if (cox_weights_drop("", cox_deadline_after_ms(TIMEOUT_MS), &count, &err))
        return cox_exit_with(&err);
    printf("dropped %" PRIu64 "\n", count);
    return COX_EXIT_OK;
}

static int drop(const struct weights_choice *choice)
{
    struct cox_error err = {0};
    uint64_t count = 0;
    int status = COX_EXIT_OK;
    for (int i = 0; i < choice->count; i++) {
        const char *key = choice->keys[i];
        if (cox_weights_drop(key, cox_deadline_after_ms(TIMEOUT_MS), &count, &err))
            return cox_exit_with(&err);
        if (count > 0) {
            printf("dropped %s\n", key);
            continue;
        }
        cox_console_say("no weights have the key '%.512s' (coxswain weights lists them)", key);
        status = COX_EXIT_USAGE;
    }
    return status;
}

static int hold(bool stay)
{
    struct cox_error err = {0};
    struct cox_notify notify = COX_NOTIFY_NONE;
    int r = cox_notify_take(&notify, &err);
    if (r == 0)
        r = cox_holder_run(stay, &notify, &err);
    cox_notify_deinit(&notify);
    return r ? cox_exit_with(&err) : COX_EXIT_OK;
}

/* ---- the command ---- */

static int take_words(void *context, int count, char *const *words, struct cox_error *err)
{
    struct weights_choice *choice = context;
    static const char *const actions[] = {"list", "drop", "hold"};
    size_t i = 0;
    while (count > 0 && i < 3 && strcmp(words[0], actions[i]) != 0)
        i++;
    if (i == 3)
        return cox_fail(err, COX_INVALID,
                        "'%.64s' is no operation on weights: expected list, drop or hold "
                        "(coxswain reload gives a running group other weights)",
                        words[0]);
    choice->action = (enum action)i;
    choice->count = count > 0 ? count - 1 : 0;
    choice->keys = words + 1;
    if (choice->action != DROP && choice->count > 0)
        return cox_fail(err, COX_INVALID, "%s takes no argument: '%.64s'", actions[i], words[1]);
    if (choice->action == DROP && (choice->count > 0) == choice->all)
        return cox_fail(err, COX_INVALID, "drop takes keys, or --all");
    return 0;
}

static int run(void *context)
{
    const struct weights_choice *choice = context;
    switch (choice->action) {
    case DROP:
        return choice->all ? drop_all() : drop(choice);
    case HOLD:
        return hold(choice->stay);
    case LIST:
        break;
    }
    return list(choice->json);
}

static const struct cox_option options[] = {
    {"json", NULL, "of list: one JSON array", COX_FLAG(struct weights_choice, json)},
    {"all", NULL, "of drop: all weights", COX_FLAG(struct weights_choice, all)},
    {"stay", NULL, "of hold: stay when nothing is held", COX_FLAG(struct weights_choice, stay)},
    {0},
};
static const struct cox_option_group weights_options = {.options = options};

const struct cox_command cox_command_weights = {
    .name = "weights",
    .summary = "list and drop the weights that outlive their ranks",
    .arguments = "[list]\ndrop KEY...\nhold",
    .text = "Weights that a process has put into coxswain.WeightStore, or that coxswain.vllm "
            "shares, are held by a small process of this user, so that other processes map them "
            "and load nothing.\n"
            "\n"
            "  list    a line `SIZE STATE KEY` for each part of a model\n"
            "  drop    forgets them; who has mapped them keeps them\n"
            "  hold    holds weights, until a signal ends it, or it has had nothing to\n"
            "          hold for 10 s. The first put starts it by itself; as a service\n"
            "          with --stay it outlives the one that puts",
    .examples = "  coxswain weights\n"
                "  coxswain weights drop --all\n",
    .choice_size = sizeof(struct weights_choice),
    .groups = {{&weights_options, 0}},
    .words = take_words,
    .run = run,
};
