#include "runner.h"

#include "program/client/nearest.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define HELP_KEY 'h'

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

static const struct argp_option *option_find(const struct cox_option_group *group, int key)
{
    for (const struct argp_option *option = group->options; option->name || option->key; option++)
        if (option->key == key)
            return option;
    return NULL;
}

/* ---- parsers: argp's codes only say that parsing ends; parse->status says why ---- */

static error_t group_parse(int key, char *value, struct argp_state *state)
{
    struct parse *parse = state->input;
    for (size_t i = 0; i < group_count(parse->command); i++) {
        const struct cox_option_group *group = parse->command->groups[i].group;
        const struct argp_option *option = option_find(group, key);
        if (!option)
            continue;
        parse->named |= option->name && !strcmp(option->name, "name");
        parse->status =
            group->take(parse->choice + parse->command->groups[i].offset, key, value, parse->err);
        return parse->status ? EINVAL : 0;
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
        const struct argp_option *option = parse->command->groups[i].group->options;
        for (; option->name || option->key; option++) {
            if (option->name)
                cox_nearest_try(&nearest, option->name);
            bool is_long = word[0] == '-' && word[1] == '-' && option->name &&
                           strlen(option->name) == length - 2 &&
                           !strncmp(word + 2, option->name, length - 2);
            bool is_short = word[0] == '-' && word[1] == option->key && word[2] == '\0';
            if (is_long || is_short)
                return option->arg ? cox_fail(parse->err, COX_INVALID, "%s needs a value", word)
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
        const struct cox_option_group *group = parse->command->groups[i].group;
        for (const struct argp_option *option = group->options; option->name || option->key;
             option++)
            if (option->name && !strcmp(option->name, "name"))
                return group->take(parse->choice + parse->command->groups[i].offset, option->key,
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
        /* argp leaks a table without options. */
        if (group->options->name || group->options->key)
            parser->argps[i].options = group->options;
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
