#include "runner.h"

#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "program/client/nearest.h"

#include <argp.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HELP_KEY 'h'
#define SECONDS_MAX 1e6
#define SIZE_MAX_BYTES (UINT64_C(1) << 40)

static const struct argp_option help_options[] = {
    {"help", HELP_KEY, NULL, 0, "print this text", -1},
    {0},
};

/* One run of the parser. */
struct parse {
    const struct cox_command *command;
    uint8_t *choice;
    /* words after "--" */
    int command_word_count;
    /* --name was given */
    bool named;
    bool help;
    int status;
    struct cox_error *err;
};

/* The parts of an argp parser, which must live as long as the parser. */
struct parser {
    struct argp_option options[COX_COMMAND_GROUP_COUNT_MAX][COX_OPTION_COUNT_MAX + 1];
    struct argp argps[COX_COMMAND_GROUP_COUNT_MAX];
    struct argp_child children[COX_COMMAND_GROUP_COUNT_MAX + 1];
    struct argp root;
};

static size_t group_count(const struct cox_command *command)
{
    size_t count = 0;
    while (count < COX_COMMAND_GROUP_COUNT_MAX && command->groups[count].group)
        count++;
    return count;
}

/* The letter, or a number that no letter has. */
static int option_key(const struct cox_command *command, size_t group, size_t index)
{
    const char letter = command->groups[group].group->options[index].letter;
    return letter ? letter : (int)(256 + group * COX_OPTION_COUNT_MAX + index);
}

/* ---- values ---- */

int cox_parse_number(const char *what, const char *text, uint64_t min, uint64_t max,
                     uint64_t *ret_number, struct cox_error *err)
{
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    /* strtoull skips blanks and accepts a minus sign. */
    if (!isdigit((unsigned char)text[0]) || *end || errno || number < min || number > max)
        return cox_fail(err, COX_INVALID, "%s is '%.64s': expected %" PRIu64 " to %" PRIu64, what,
                        text, min, max);
    *ret_number = number;
    return 0;
}

int cox_parse_real(const char *what, const char *text, double min, double max, double *ret_number,
                   struct cox_error *err)
{
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end || isspace((unsigned char)text[0]) || !(number >= min && number <= max))
        return cox_fail(err, COX_INVALID, "%s is '%.64s': expected a number from %g to %g", what,
                        text, min, max);
    *ret_number = number;
    return 0;
}

int cox_parse_seconds(const char *what, const char *text, uint64_t *ret_ms, struct cox_error *err)
{
    double seconds;
    int r = cox_parse_real(what, text, 0.001, SECONDS_MAX, &seconds, err);
    if (!r)
        *ret_ms = (uint64_t)llround(seconds * 1000);
    return r;
}

int cox_parse_size(const char *what, const char *text, uint64_t *ret_size, struct cox_error *err)
{
    static const char units[] = "KMG";
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    const char *unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    if (!isdigit((unsigned char)text[0]) || errno || (*end && (!unit || end[1])) || number == 0 ||
        number > SIZE_MAX_BYTES >> shift)
        return cox_fail(
            err, COX_INVALID,
            "%s is '%.64s': expected a number of bytes above 0, with K, M or G behind it or nothing",
            what, text);
    *ret_size = (uint64_t)number << shift;
    return 0;
}

int cox_option_take(const struct cox_option *option, void *choice, const char *value,
                    struct cox_error *err)
{
    uint8_t *into = choice;
    void *member = into + option->offset;
    char what[64];
    uint64_t number = 0;
    int r = 0;
    snprintf(what, sizeof what, option->letter ? "-%.1s" : "--%s",
             option->letter ? &option->letter : option->name);
    if (option->take)
        return option->take(member, value, err);
    switch (option->kind) {
    case COX_OPTION_FLAG:
        *(bool *)member = true;
        break;
    case COX_OPTION_TEXT:
    case COX_OPTION_NAME:
        *(const char **)member = value;
        r = option->kind == COX_OPTION_NAME ? cox_name_check(value, err) : 0;
        break;
    case COX_OPTION_COUNT:
        r = cox_parse_number(what, value, option->min, option->max, &number, err);
        if (r == 0)
            *(uint32_t *)member = (uint32_t)number;
        break;
    case COX_OPTION_NUMBER:
        r = cox_parse_number(what, value, option->min, option->max, member, err);
        break;
    case COX_OPTION_SECONDS:
        r = cox_parse_seconds(what, value, member, err);
    }
    if (option->given)
        *(bool *)(into + option->given) = true;
    return r;
}

/* ---- parsers: argp's codes only say that parsing ends; parse->status says why ---- */

static error_t group_parse(int key, char *value, struct argp_state *state)
{
    struct parse *parse = state->input;
    for (size_t i = 0; i < group_count(parse->command); i++) {
        const struct cox_option *option = parse->command->groups[i].group->options;
        for (size_t k = 0; option[k].name; k++) {
            if (option_key(parse->command, i, k) != key)
                continue;
            parse->named |= !strcmp(option[k].name, "name");
            parse->status = cox_option_take(
                &option[k], parse->choice + parse->command->groups[i].offset, value, parse->err);
            return parse->status ? EINVAL : 0;
        }
    }
    return ARGP_ERR_UNKNOWN;
}

/* The option that getopt refused: unknown, ambiguous, without its value, or with one too many. */
static int option_refuse(const struct parse *parse, const char *word)
{
    size_t length = strcspn(word, "=");
    char typed[64];
    snprintf(typed, sizeof typed, "%.*s", length > 2 ? (int)(length - 2) : 0,
             length > 2 ? word + 2 : "");
    struct cox_nearest nearest = {.typed = typed};
    for (size_t i = 0; i < group_count(parse->command); i++) {
        const struct cox_option *option = parse->command->groups[i].group->options;
        for (; option->name; option++) {
            cox_nearest_try(&nearest, option->name);
            bool is_long = word[0] == '-' && word[1] == '-' && strlen(option->name) == length - 2 &&
                           !strncmp(word + 2, option->name, length - 2);
            bool is_short =
                word[0] == '-' && option->letter && word[1] == option->letter && word[2] == '\0';
            if (is_long || is_short)
                return option->value ? cox_fail(parse->err, COX_INVALID, "%s needs a value", word)
                                     : cox_fail(parse->err, COX_INVALID, "%.*s takes no value",
                                                (int)length, word);
        }
    }
    return nearest.best
               ? cox_fail(parse->err, COX_INVALID,
                          "%.64s is no option of this command, or is ambiguous: did you mean --%s?",
                          word, nearest.best)
               : cox_fail(parse->err, COX_INVALID,
                          "%.64s is no option of this command, or is ambiguous", word);
}

/* As --name WORD. */
static int name_take(const struct parse *parse, const char *word)
{
    for (size_t i = 0; i < group_count(parse->command); i++) {
        const struct cox_option *option = parse->command->groups[i].group->options;
        for (; option->name; option++)
            if (!strcmp(option->name, "name"))
                return cox_option_take(option, parse->choice + parse->command->groups[i].offset,
                                       word, parse->err);
    }
    return 0;
}

static int words_take(const struct parse *parse, int count, char *const *words)
{
    const struct cox_command *command = parse->command;
    if (!command->words)
        return count ? cox_fail(parse->err, COX_INVALID, "'%.64s' is not expected here", words[0])
                     : 0;
    int in_front = command->name_in_front ? count - parse->command_word_count : 0;
    if (in_front > 1 || (in_front == 1 && (parse->named || strchr(words[0], '/'))))
        return cox_fail(parse->err, COX_INVALID,
                        "'%.64s' is not expected here: a group has one name, and a command comes "
                        "after --",
                        words[in_front - 1]);
    int r = in_front == 1 ? name_take(parse, words[0]) : 0;
    return r ? r : command->words(parse->choice, count - in_front, words + in_front, parse->err);
}

static error_t root_parse(int key, char *value, struct argp_state *state)
{
    struct parse *parse = state->input;
    (void)value;
    switch (key) {
    case ARGP_KEY_INIT:
        for (size_t i = 0; i < group_count(parse->command); i++)
            state->child_inputs[i] = parse;
        return 0;
    case HELP_KEY:
        parse->help = true;
        return EINVAL;
    case ARGP_KEY_ERROR:
        if (!parse->help && !parse->status)
            parse->status = option_refuse(parse, state->argv[state->next - 1]);
        return 0;
    case ARGP_KEY_ARGS:
        parse->status = words_take(parse, state->argc - state->next, state->argv + state->next);
        state->next = state->argc;
        return parse->status ? EINVAL : 0;
    case ARGP_KEY_NO_ARGS:
        parse->status = words_take(parse, 0, NULL);
        return parse->status ? EINVAL : 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- the command ---- */

/* argp adds a sentence about the values of long and short options, which no option here needs. */
static char *help_filter(int key, const char *text, void *input)
{
    (void)input;
    return key == ARGP_KEY_HELP_DUP_ARGS_NOTE ? NULL : (char *)(uintptr_t)text;
}

static void parser_init(struct parser *parser, const struct cox_command *command)
{
    memset(parser, 0, sizeof *parser);
    for (size_t i = 0; i < group_count(command); i++) {
        const struct cox_option_group *group = command->groups[i].group;
        for (size_t k = 0; group->options[k].name; k++) {
            COX_ASSERT(k < COX_OPTION_COUNT_MAX);
            parser->options[i][k] = (struct argp_option){.name = group->options[k].name,
                                                         .key = option_key(command, i, k),
                                                         .arg = group->options[k].value,
                                                         .doc = group->options[k].text};
        }
        /* argp leaks a table without options. */
        parser->argps[i].options = group->options->name ? parser->options[i] : NULL;
        parser->argps[i].parser = group_parse;
        parser->argps[i].help_filter = help_filter;
        parser->children[i] = (struct argp_child){
            .argp = &parser->argps[i], .header = group->title, .group = (int)i + 1};
    }
    parser->root = (struct argp){
        .options = help_options,
        .parser = root_parse,
        .args_doc = command->arguments,
        .doc = command->text,
        .children = parser->children,
        .help_filter = help_filter,
    };
}

static int help(const struct parser *parser, const struct cox_command *command)
{
    char name[64];
    snprintf(name, sizeof name, "coxswain %s", command->name);
    argp_help(&parser->root, stdout, ARGP_HELP_USAGE | ARGP_HELP_LONG | ARGP_HELP_DOC, name);
    if (command->examples)
        printf("\nExamples:\n%s", command->examples);
    cox_exit_help(stdout);
    return COX_EXIT_OK;
}

static int checks(const struct parse *parse)
{
    const struct cox_command *command = parse->command;
    int r = 0;
    for (size_t i = 0; r == 0 && i < group_count(command); i++)
        if (command->groups[i].group->check)
            r = command->groups[i].group->check(parse->choice + command->groups[i].offset,
                                                parse->err);
    return r;
}

int cox_command_main(const struct cox_command *command, int argc, char **argv)
{
    struct cox_error error = {0};
    struct parser parser;
    struct parse parse = {.command = command, .err = &error};
    parse.choice = calloc(1, command->choice_size ? command->choice_size : 1);
    if (!parse.choice) {
        cox_fail(&error, -ENOMEM, "no memory");
        return cox_exit_with(&error);
    }
    if (command->init)
        command->init(parse.choice);
    parser_init(&parser, command);
    /* Before getopt moves it to the front of the words. */
    for (int i = 1; i < argc && !parse.command_word_count; i++)
        if (!strcmp(argv[i], "--"))
            parse.command_word_count = argc - i - 1;
    int r = argp_parse(&parser.root, argc, argv, ARGP_NO_ERRS | ARGP_NO_HELP | ARGP_NO_EXIT, NULL,
                       &parse);
    if (!parse.status && r && !parse.help)
        parse.status = cox_fail(&error, -r, "the command line: %s", cox_status_text(-r));
    if (!parse.status && !parse.help)
        parse.status = checks(&parse);
    int exit_status = parse.help         ? help(&parser, command)
                      : parse.status > 0 ? cox_exit_usage(command->name, &error)
                      : parse.status     ? cox_exit_with(&error)
                                         : command->run(parse.choice);
    if (command->deinit)
        command->deinit(parse.choice);
    free(parse.choice);
    return cox_exit_flushed(exit_status);
}
