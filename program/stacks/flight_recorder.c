#include "flight_recorder.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define GROUP_MAX 32
#define NAME_SIZE 64
#define DEFAULT_NAME "0"
#define DEFAULT_WHAT "default_pg"

struct group {
    char name[NAME_SIZE], what[NAME_SIZE];
    /* the last collective that was entered, and the first one that has not completed; 0: none */
    uint64_t entered, waits;
    /* of the latter */
    char operation[NAME_SIZE];
};

struct recorder {
    struct group groups[GROUP_MAX];
    uint32_t group_count;
    size_t collective_count;
    /* all documents of the dump */
    json_t *documents;
};

/* A word of a rank: what separates words here is replaced. */
static void word(const json_t *value, char text[NAME_SIZE])
{
    const char *from = json_string_value(value);
    size_t size = 0;
    for (; from && *from && size + 1 < NAME_SIZE; from++) {
        const bool plain = (*from >= '0' && *from <= '9') || (*from >= 'A' && *from <= 'Z') ||
                           (*from >= 'a' && *from <= 'z') || strchr("_.:-", *from);
        text[size++] = plain ? *from : '_';
    }
    text[size] = '\0';
    if (!size)
        snprintf(text, NAME_SIZE, "-");
}

static uint64_t number(const json_t *object, const char *name)
{
    const json_int_t value = json_integer_value(json_object_get(object, name));
    return value > 0 ? (uint64_t)value : 0;
}

/* "gloo:all_reduce", "nccl:all_reduce". */
static void operation_of(const json_t *entry, char text[NAME_SIZE])
{
    word(json_object_get(entry, "profiling_name"), text);
    const char *behind = strrchr(text, ':');
    if (behind && behind[1])
        memmove(text, behind + 1, strlen(behind));
}

/* A collective that waits for no other rank any more. */
static bool is_over(const json_t *entry)
{
    const char *state = json_string_value(json_object_get(entry, "state"));
    return (state && strcmp(state, "completed") == 0) ||
           json_is_true(json_object_get(entry, "retired"));
}

/* Returns NULL: it has no name, or there are too many. */
static struct group *group_of(struct recorder *recorder, const json_t *name, const json_t *what)
{
    char text[NAME_SIZE];
    if (!json_string_length(name)) /* gloo names none */
        return NULL;
    word(name, text);
    for (uint32_t i = 0; i < recorder->group_count; i++)
        if (strcmp(recorder->groups[i].name, text) == 0)
            return &recorder->groups[i];
    if (recorder->group_count == GROUP_MAX)
        return NULL;
    struct group *group = &recorder->groups[recorder->group_count++];
    *group = (struct group){0};
    memcpy(group->name, text, sizeof text);
    word(what, group->what);
    return group;
}

static void entry_take(struct recorder *recorder, const json_t *entry)
{
    const json_t *names = json_object_get(entry, "process_group");
    const uint64_t sequence = number(entry, "collective_seq_id");
    /* Sends and receives are between two ranks. */
    if (!sequence || json_is_true(json_object_get(entry, "is_p2p")))
        return;
    struct group *group = group_of(recorder, json_array_get(names, 0), json_array_get(names, 1));
    recorder->collective_count++;
    if (!group)
        return;
    group->entered = sequence > group->entered ? sequence : group->entered;
    if (is_over(entry) || (group->waits && group->waits <= sequence))
        return;
    group->waits = sequence;
    operation_of(entry, group->operation);
}

static void document_take(struct recorder *recorder, json_t *document)
{
    const char *name;
    json_t *group;
    size_t i;
    json_t *entry;
    json_object_foreach(json_object_get(document, "pg_config"), name, group)
        group_of(recorder, json_object_get(group, "name"), json_object_get(group, "desc"));
    json_array_foreach(json_object_get(document, "entries"), i, entry) entry_take(recorder, entry);
}

/* All ranks are in the default group, but one that has entered nothing does not say so. */
static void default_group_add(struct recorder *recorder)
{
    for (uint32_t i = 0; i < recorder->group_count; i++)
        if (strcmp(recorder->groups[i].what, DEFAULT_WHAT) == 0)
            return;
    if (recorder->group_count < GROUP_MAX)
        recorder->groups[recorder->group_count++] =
            (struct group){.name = DEFAULT_NAME, .what = DEFAULT_WHAT};
}

static void entry_print(const json_t *entry, uint64_t real_ns, FILE *to)
{
    char name[NAME_SIZE], operation[NAME_SIZE], state[NAME_SIZE], type[NAME_SIZE];
    char *sizes = json_dumps(json_object_get(entry, "input_sizes"), JSON_ENCODE_ANY);
    const uint64_t created_ns = number(entry, "time_created_ns");
    word(json_array_get(json_object_get(entry, "process_group"), 0), name);
    operation_of(entry, operation);
    word(json_object_get(entry, "state"), state);
    word(json_array_get(json_object_get(entry, "input_dtypes"), 0), type);
    fprintf(to, "  %s %" PRIu64 " %s %.120s %s: %s", name, number(entry, "collective_seq_id"),
            operation, sizes ? sizes : "", type, is_over(entry) ? "completed" : state);
    if (created_ns && created_ns < real_ns)
        fprintf(to, ", entered %.1f s ago", (double)(real_ns - created_ns) / 1e9);
    fputc('\n', to);
    free(sizes);
}

static void entries_print(const struct recorder *recorder, uint64_t real_ns, FILE *to)
{
    uint32_t printed = 0;
    size_t d;
    json_t *document;
    json_array_foreach(recorder->documents, d, document)
    {
        const json_t *entries = json_object_get(document, "entries");
        for (size_t i = json_array_size(entries); i > 0 && printed < COX_FLIGHT_RECORDER_LINE_MAX;
             i--, printed++)
            entry_print(json_array_get(entries, i - 1), real_ns, to);
    }
}

void cox_flight_recorder_print(const char *dump, uint64_t real_ns, FILE *to)
{
    static struct recorder recorder;
    recorder = (struct recorder){.documents = json_array()};
    bool readable = recorder.documents != NULL;
    while (readable && *dump) {
        const size_t length = strcspn(dump, "\n");
        json_t *document = json_loadb(dump, length, 0, NULL);
        readable = json_is_object(document);
        if (readable)
            document_take(&recorder, document);
        json_array_append_new(recorder.documents, document);
        dump += length + (dump[length] == '\n');
    }
    if (readable)
        default_group_add(&recorder);
    if (!readable)
        fprintf(to, "not there: PyTorch's flight recorder: its dump cannot be read\n");
    else
        fprintf(to,
                "PyTorch's flight recorder: %" PRIu32
                " process groups, %zu collectives, the last ones first\n",
                recorder.group_count, recorder.collective_count);
    for (uint32_t i = 0; readable && i < recorder.group_count; i++) {
        const struct group *group = &recorder.groups[i];
        fprintf(to, "torch: group %s (%s): entered %" PRIu64 ", waits in %s", group->name,
                group->what, group->entered, group->waits ? group->operation : "none\n");
        if (group->waits)
            fprintf(to, " %" PRIu64 "\n", group->waits);
    }
    if (readable)
        entries_print(&recorder, real_ns, to);
    json_decref(recorder.documents);
}
