#include "tables.h"

#include "program/client/client.h"

#include <ctype.h>
#include <jansson.h>
#include <string.h>

#define NAMES_MS 300
/* Of a command's arguments. */
#define TEXT_SIZE 256

/* ---- candidates ---- */

struct completion {
    const char *prefix;
    size_t prefix_size;
};

static void offer(const struct completion *completion, const char *candidate, const char *text)
{
    if (strncmp(candidate, completion->prefix, completion->prefix_size) == 0)
        printf("%s\t%.*s\n", candidate, text ? (int)strcspn(text, "\n;") : 0, text ? text : "");
}

static int offer_group(void *context, struct cox_client *client, const struct cox_error *failure,
                       struct cox_error *err)
{
    (void)err;
    if (!failure && !strchr(client->group, '/'))
        offer(context, client->group, "a group that runs");
    return 0;
}

/* Literals are written in small letters: "off|auto|max"; what a user chooses is in capitals. */
static bool is_literal(const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (isupper((unsigned char)text[i]) || text[i] == '=' || text[i] == '.')
            return false;
    return size > 0;
}

/* What may stand for a placeholder, as tables of options and of arguments write it. */
static void offer_value(const struct completion *completion, const char *placeholder)
{
    const size_t size = strlen(placeholder);
    if (is_literal(placeholder, size)) {
        char text[TEXT_SIZE], *rest = NULL;
        snprintf(text, sizeof text, "%s", placeholder);
        for (char *word = strtok_r(text, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
            offer(completion, word, NULL);
    } else if (strcmp(placeholder, "NAME") == 0 || strcmp(placeholder, "OWNER") == 0) {
        struct completion copy = *completion;
        cox_client_find(offer_group, &copy, cox_deadline_after_ms(NAMES_MS), NULL);
    } else if (strcmp(placeholder, "DIR") == 0) {
        puts(":dirs");
    } else if (strstr(placeholder, "FILE") || strstr(placeholder, "PATH") ||
               strstr(placeholder, "DIR") || strcmp(placeholder, "COMMAND") == 0) {
        puts(":files");
    }
}

/* ---- options ---- */

typedef bool (*visit_fn)(void *context, const struct cox_option *option);

/* Until visit returns true; returns that option. */
static const struct cox_option *options_visit(const struct cox_command *command, visit_fn visit,
                                              void *context)
{
    for (size_t i = 0; i < COX_COMMAND_GROUP_COUNT_MAX && command->groups[i].group; i++) {
        const struct cox_option *option = command->groups[i].group->options;
        for (; option->name; option++)
            if (visit(context, option))
                return option;
    }
    return NULL;
}

static bool option_is(void *context, const struct cox_option *option)
{
    const char *word = context;
    if (word[0] == '-' && word[1] == '-')
        return strcmp(word + 2, option->name) == 0;
    return word[0] == '-' && option->letter && word[1] == option->letter && word[2] == '\0';
}

static bool option_offer(void *context, const struct cox_option *option)
{
    char text[TEXT_SIZE];
    snprintf(text, sizeof text, "--%s", option->name);
    offer(context, text, option->text);
    return false;
}

static const struct cox_option *option_with_value(const struct cox_command *command, char *word)
{
    const struct cox_option *option =
        word[0] == '-' ? options_visit(command, option_is, word) : NULL;
    return option && option->value ? option : NULL;
}

/* ---- arguments ---- */

/* Of one form, as in "load ADAPTER DIR": offers what stands at `index`, if the words before fit. */
static void form_offer(const struct completion *completion, char *form, int index,
                       char *const *before)
{
    char *rest = NULL, *token = strtok_r(form, " ", &rest);
    bool repeats = false;
    for (int i = 0; token; i++) {
        repeats = strstr(token, "...") != NULL;
        token += strspn(token, "[");
        token[strcspn(token, "].")] = '\0';
        if (i == index || (repeats && i < index)) {
            offer_value(completion, token);
            return;
        }
        if (is_literal(token, strlen(token)) && !strchr(token, '|') && strcmp(token, before[i]))
            return;
        token = strtok_r(NULL, " ", &rest);
    }
}

static void arguments_offer(const struct completion *completion, const struct cox_command *command,
                            int index, char *const *before)
{
    char text[TEXT_SIZE], *rest = NULL;
    snprintf(text, sizeof text, "%s", command->arguments ? command->arguments : "");
    for (char *form = strtok_r(text, "\n", &rest); form; form = strtok_r(NULL, "\n", &rest))
        form_offer(completion, form, index, before);
}

/* ---- a command line ---- */

static void command_complete(const struct cox_command *command, int count, char *const *words)
{
    struct completion completion = {words[count - 1], strlen(words[count - 1])};
    char *before[count];
    int index = 0;
    for (int i = 0; i < count - 1; i++) {
        if (strcmp(words[i], "--") == 0) {
            puts(":files"); /* a command of its own, whose arguments are not known here */
            return;
        }
        const struct cox_option *option = option_with_value(command, words[i]);
        if (option && i == count - 2) {
            offer_value(&completion, option->value);
            return;
        }
        if (option)
            i++;
        else if (words[i][0] != '-')
            before[index++] = words[i];
    }
    if (completion.prefix[0] == '-') {
        options_visit(command, option_offer, &completion);
        offer(&completion, "--help", "print this text");
    } else {
        arguments_offer(&completion, command, index, before);
    }
}

void cox_tables_complete(const struct cox_commands *commands, int count, char *const *words)
{
    if (count < 1)
        return;
    struct completion completion = {words[count - 1], strlen(words[count - 1])};
    for (size_t i = 0; i < commands->count; i++) {
        const struct cox_command *command = commands->list[i];
        if (count == 1)
            offer(&completion, command->name, command->summary);
        else if (strcmp(command->name, words[0]) == 0)
            command_complete(command, count - 1, words + 1);
    }
    if (count == 1 && completion.prefix[0] == '-') {
        offer(&completion, "--help", "list the commands");
        offer(&completion, "--version", "print the version");
    }
}

/* ---- JSON ---- */

static json_t *text_or_null(const char *text)
{
    return text ? json_string(text) : json_null();
}

static json_t *option_json(const struct cox_option *option)
{
    const char letter[2] = {option->letter, '\0'};
    return json_pack("{s:o, s:o, s:o, s:o}", "name", text_or_null(option->name), "letter",
                     text_or_null(letter[0] ? letter : NULL), "value", text_or_null(option->value),
                     "text", text_or_null(option->text));
}

static json_t *groups_json(const struct cox_command *command)
{
    json_t *groups = json_array();
    for (size_t i = 0; i < COX_COMMAND_GROUP_COUNT_MAX && command->groups[i].group; i++) {
        const struct cox_option_group *group = command->groups[i].group;
        json_t *options = json_array();
        for (const struct cox_option *option = group->options; option->name; option++)
            json_array_append_new(options, option_json(option));
        json_array_append_new(groups, json_pack("{s:o, s:o}", "title", text_or_null(group->title),
                                                "options", options));
    }
    return groups;
}

int cox_tables_json(const struct cox_commands *commands)
{
    json_t *root = json_array();
    for (size_t i = 0; i < commands->count; i++) {
        const struct cox_command *command = commands->list[i];
        json_array_append_new(
            root, json_pack("{s:s, s:s, s:o, s:o, s:o}", "name", command->name, "summary",
                            command->summary, "arguments", text_or_null(command->arguments), "text",
                            text_or_null(command->text), "groups", groups_json(command)));
    }
    int r = json_dumpf(root, stdout, JSON_INDENT(1));
    json_decref(root);
    putchar('\n');
    return r ? COX_EXIT_FAILED : COX_EXIT_OK;
}
