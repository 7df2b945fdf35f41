#include "prompts.h"

#include "channel/base/idioms.h"
#include "program/cli/console.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEW_COUNT_DEFAULT 256
/* U+FEFF, which some editors put at the head of a file: no part of its text. */
#define MARK "\xef\xbb\xbf"

void cox_prompts_deinit(struct cox_prompts *prompts)
{
    for (size_t i = 0; i < prompts->count; i++) {
        struct cox_prompt *prompt = &prompts->items[i];
        free(prompt->text);
        free(prompt->tokens);
        free(prompt->new_tokens);
        free(prompt->new_text);
        free(prompt->error);
    }
    free(prompts->items);
    *prompts = (struct cox_prompts){0};
}

int cox_prompts_add(struct cox_prompts *prompts, const char *text, size_t size)
{
    int r = cox_reserve((void **)&prompts->items, &prompts->capacity, prompts->count + 1,
                        sizeof *prompts->items);
    if (r)
        return r;
    char *copy = strndup(text, size);
    if (!copy)
        return -ENOMEM;
    prompts->items[prompts->count++] = (struct cox_prompt){.text = copy};
    return 0;
}

/* ---- from a file ---- */

static void close_filep(FILE **file)
{
    if (*file && *file != stdin)
        fclose(*file);
}

int cox_prompts_load(struct cox_prompts *prompts, const char *path, struct cox_error *err)
{
    bool standard = !strcmp(path, "-");
    const char *name = standard ? "standard input" : path;
    _cox_cleanup_(close_filep) FILE *file = standard ? stdin : fopen(path, "re");
    if (!file && (errno == ENOENT || errno == ENOTDIR))
        return cox_fail(err, COX_NOT_FOUND, "%s does not exist", name);
    if (!file && errno == EACCES)
        return cox_fail(err, COX_INVALID, "%s: permission denied", name);
    if (!file) {
        int r = -errno;
        return cox_fail(err, r, "cannot open %s: %s", name, cox_status_text(r));
    }
    _cox_cleanup_(cox_free_ptr) char *line = NULL;
    size_t capacity = 0;
    ssize_t size;
    size_t number = 0;
    errno = 0;
    while ((size = getline(&line, &capacity, file)) > 0) {
        number++;
        size_t length = (size_t)size;
        if (number == 1 && length >= strlen(MARK) && memcmp(line, MARK, strlen(MARK)) == 0)
            memmove(line, line + strlen(MARK), length -= strlen(MARK));
        if (memchr(line, 0, length))
            return cox_fail(err, COX_INVALID, "line %zu of %s contains a 0 byte", number, name);
        if (length && line[length - 1] == '\n')
            length--;
        if (length && line[length - 1] == '\r')
            length--;
        if (length == 0)
            return cox_fail(err, COX_INVALID, "line %zu of %s is empty", number, name);
        int r = cox_prompts_add(prompts, line, length);
        if (r)
            return cox_fail(err, r, "no memory for %zu lines of %s", number, name);
        errno = 0;
    }
    if (!feof(file)) { /* a lack of memory for a line sets no error flag */
        int r = errno ? -errno : -EIO;
        if (r == -EISDIR)
            return cox_fail(err, COX_INVALID, "%s is a folder: expected a file of prompts", name);
        return cox_fail(err, r, "cannot read %s: %s", name, cox_status_text(r));
    }
    if (number == 0)
        return cox_fail(err, COX_INVALID, "%s is empty: expected one prompt a line", name);
    return 0;
}

/* ---- tokens ---- */

/* "1 5,10" */
static int ids_parse(const char *text, uint32_t vocab_size, int32_t **ret_tokens,
                     uint32_t *ret_count, struct cox_error *err)
{
    uint64_t max = vocab_size ? vocab_size - 1 : INT32_MAX;
    _cox_cleanup_(cox_free_ptr) int32_t *tokens = calloc(strlen(text) / 2 + 1, sizeof *tokens);
    if (!tokens)
        return cox_fail(err, -ENOMEM, "no memory");
    uint32_t count = 0;
    for (const char *at = text;;) {
        at += strspn(at, " \t,");
        if (!*at)
            break;
        size_t length = strcspn(at, " \t,");
        char word[32];
        uint64_t number;
        if (length >= sizeof word)
            return cox_fail(err, COX_INVALID,
                            "a token id is '%.20s...': expected a number from 0 to %" PRIu64, at,
                            max);
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        int r = cox_parse_number("a token id", word, 0, max, &number, err);
        if (r)
            return r;
        tokens[count++] = (int32_t)number;
        at += length;
    }
    if (count == 0)
        return cox_fail(err, COX_INVALID, "there is no token id");
    *ret_tokens = cox_steal_ptr(&tokens);
    *ret_count = count;
    return 0;
}

int cox_prompts_encode(struct cox_prompts *prompts, const struct cox_tokenizer *tokenizer,
                       uint32_t vocab_size, struct cox_error *err)
{
    for (size_t i = 0; i < prompts->count; i++) {
        struct cox_prompt *prompt = &prompts->items[i];
        struct cox_error error = {0};
        int r = tokenizer ? cox_tokenizer_encode(tokenizer, prompt->text, &prompt->tokens,
                                                 &prompt->token_count, &error)
                          : ids_parse(prompt->text, vocab_size, &prompt->tokens,
                                      &prompt->token_count, &error);
        if (r)
            return cox_fail(err, r, "prompt %zu: %.900s", i + 1, error.text);
    }
    return 0;
}

/* ---- completion ---- */

uint32_t cox_complete_new_count(const struct cox_complete_options *options)
{
    return options->new_count_max ? options->new_count_max : NEW_COUNT_DEFAULT;
}

static int result_dup(struct cox_prompt *prompt, const struct cox_prompt_result *result,
                      const struct cox_tokenizer *tokenizer)
{
    prompt->finish = result->finish;
    if (result->finish == COX_FINISH_ERROR) {
        prompt->code = result->code;
        prompt->error = strdup(result->text);
        return prompt->error ? 0 : -ENOMEM;
    }
    prompt->new_count = result->token_count;
    prompt->new_tokens = calloc((size_t)prompt->new_count + 1, sizeof *prompt->new_tokens);
    if (!prompt->new_tokens)
        return -ENOMEM;
    if (prompt->new_count)
        memcpy(prompt->new_tokens, result->tokens, prompt->new_count * sizeof *prompt->new_tokens);
    return tokenizer ? cox_tokenizer_decode(tokenizer, prompt->new_tokens, prompt->new_count,
                                            &prompt->new_text)
                     : 0;
}

bool cox_prompts_run_ends(const struct cox_prompts_run *run)
{
    return run->cancelled || run->status;
}

void cox_prompts_run_progress(const struct cox_prompts_run *run)
{
    if (run->options->progress)
        cox_console_progress(&(struct cox_progress){.what = "prompts",
                                                    .done = run->done_count,
                                                    .total = run->prompts->count,
                                                    .unit = "tokens",
                                                    .amount = run->new_count});
}

/* Hands out what is done, in order. */
static void done_hand_out(struct cox_prompts_run *run)
{
    const struct cox_complete_options *options = run->options;
    struct cox_prompts *prompts = run->prompts;
    while (!run->cancelled && !run->failed && !run->status && run->ready_count < prompts->count &&
           prompts->items[run->ready_count].done) {
        size_t index = run->ready_count++;
        if (options->ready && options->ready(options->ready_context, index, &prompts->items[index]))
            run->cancelled = true;
    }
}

void cox_prompts_take(struct cox_prompts_run *run, struct cox_prompt *prompt,
                      const struct cox_prompt_result *result)
{
    int r = result_dup(prompt, result, run->options->tokenizer);
    if (r && !run->status)
        run->status = r;
    prompt->done = true;
    run->done_count++;
    run->new_count += prompt->new_count;
    cox_prompts_run_progress(run);
    /* Only these codes surely concern a single request; after others the group may have failed, of
     * which the end of the run tells. */
    if (result->finish == COX_FINISH_ERROR && result->code != COX_INVALID &&
        result->code != COX_TOO_LARGE && result->code != COX_NO_SPACE &&
        result->code != COX_UNSUPPORTED)
        run->failed = true;
    done_hand_out(run);
}

/* The group has failed or was stopped: finished prompts are passed on all the same, the others as
 * abandoned, with the failure as their error. */
static void rest_hand_out(struct cox_prompts_run *run, const struct cox_error *error)
{
    const struct cox_complete_options *options = run->options;
    struct cox_prompts *prompts = run->prompts;
    while (options->ready && !cox_prompts_run_ends(run) && run->ready_count < prompts->count) {
        size_t index = run->ready_count++;
        struct cox_prompt *prompt = &prompts->items[index];
        prompt->abandoned = prompt->finish == COX_FINISH_ERROR || !prompt->done;
        if (!prompt->done) {
            prompt->finish = COX_FINISH_ERROR;
            prompt->error = strdup(error->text);
        }
        if (options->ready(options->ready_context, index, prompt))
            run->cancelled = true;
    }
}

int cox_prompts_run_end(struct cox_prompts_run *run, int r, const struct cox_error *error,
                        struct cox_error *err)
{
    if (run->options->progress)
        cox_console_progress_end();
    run->failed = r != 0;
    if (r)
        rest_hand_out(run, error);
    else
        done_hand_out(run);
    if (run->status)
        return cox_fail(err, run->status, "no memory for the replies");
    return r ? cox_fail(err, r, "%s", error->text) : 0;
}

/* ---- on an engine loop of this process ---- */

struct completion {
    struct cox_prompts_run run;
    struct cox_engine_loop *engine_loop;
};

static void on_done(void *context, const struct cox_sequence *sequence)
{
    struct completion *completion = context;
    const struct cox_prompt_result result = {
        .finish = sequence->finish,
        .tokens = sequence->tokens + sequence->prompt_count,
        .token_count = sequence->token_count - sequence->prompt_count,
        .code = sequence->error.code,
        .text = sequence->error.text,
    };
    cox_prompts_take(&completion->run, sequence->request.context, &result);
    if (cox_prompts_run_ends(&completion->run))
        cox_engine_loop_stop(completion->engine_loop);
}

static void on_stop(void *context)
{
    cox_engine_loop_stop(context);
}

static int requests_add(struct completion *completion)
{
    const struct cox_complete_options *options = completion->run.options;
    struct cox_prompts *prompts = completion->run.prompts;
    for (size_t i = 0; i < prompts->count; i++) {
        struct cox_prompt *prompt = &prompts->items[i];
        struct cox_prompt_request request = {
            .tokens = prompt->tokens,
            .token_count = prompt->token_count,
            .new_count_max = cox_complete_new_count(options),
            .shorten = options->new_count_max == 0,
            .sampling = options->sampling,
            .stop_count = options->stop_count,
            .context = prompt,
        };
        memcpy(request.stop_tokens, options->stop_tokens,
               options->stop_count * sizeof *options->stop_tokens);
        int r = cox_engine_loop_add(completion->engine_loop, &request);
        if (r)
            return r;
    }
    return 0;
}

int cox_prompts_complete(struct cox_prompts *prompts, struct cox_engine_group *group,
                         const struct cox_complete_options *options,
                         struct cox_engine_loop_stats *ret_stats, struct cox_error *err)
{
    struct completion completion = {.run = {.prompts = prompts, .options = options}};
    struct cox_engine_loop_options engine_loop_options = options->engine_loop;
    int r = cox_engine_group_fit(group, &engine_loop_options, err);
    if (r)
        return r;
    engine_loop_options.log = cox_foreground_log();
    engine_loop_options.done = on_done;
    engine_loop_options.done_context = &completion;
    r = cox_engine_loop_new(cox_engine_group_executor(group), &engine_loop_options,
                            &completion.engine_loop, err);
    if (r)
        return r;
    cox_foreground_on_stop(cox_engine_group_foreground(group), on_stop, completion.engine_loop);
    struct cox_error error = {0};
    cox_prompts_run_progress(&completion.run);
    r = requests_add(&completion);
    if (r)
        cox_fail(&error, r, "no memory for %zu prompts", prompts->count);
    else
        r = cox_engine_loop_run(completion.engine_loop, &error);
    cox_foreground_on_stop(cox_engine_group_foreground(group), NULL, NULL);
    r = cox_prompts_run_end(&completion.run, r, &error, err);
    cox_engine_loop_stats(completion.engine_loop, ret_stats);
    cox_engine_loop_free(completion.engine_loop);
    return r;
}
