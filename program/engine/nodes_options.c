#include "nodes_options.h"

#include "channel/base/hash.h"
#include "channel/base/idioms.h"
#include "engine/model/digest.h"
#include "program/client/nearest.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SECONDS_MIN 0.001
#define SECONDS_MAX 1e6

/* ---- values: false: the value is not what the member expects ---- */

/* Appends to a list with commas. */
static bool list_add(char *list, size_t size, const char *text)
{
    const size_t used = strlen(list);
    return snprintf(list + used, size - used, "%s%s", used ? "," : "", text) < (int)(size - used);
}

static bool is_address(const json_t *value)
{
    return json_is_string(value) && strrchr(json_string_value(value), ':');
}

static bool take_servers(struct cox_nodes_choice *choice, const json_t *value)
{
    size_t i;
    const json_t *server;
    json_array_foreach(value, i, server)
    {
        const char *url = json_string_value(server);
        if (!url || !strstr(url, "://") || strchr(url, ',') ||
            !list_add(choice->url, sizeof choice->url, url))
            return false;
    }
    choice->access.url = choice->url;
    return choice->url[0] != '\0';
}

/* One node, {"name": "a", "ranks": 4} or with "listen". */
static bool take_place(struct cox_nodes_choice *choice, const json_t *place)
{
    const json_t *name = json_object_get(place, "name"), *ranks = json_object_get(place, "ranks");
    const json_t *listen = json_object_get(place, "listen");
    char text[512];
    if (!json_is_string(name) || strchr(json_string_value(name), ':') ||
        strchr(json_string_value(name), ',') || !json_is_integer(ranks) ||
        (listen && !is_address(listen)) || json_object_size(place) != (listen ? 3 : 2))
        return false;
    return snprintf(text, sizeof text, "%s:%" JSON_INTEGER_FORMAT, json_string_value(name),
                    json_integer_value(ranks)) < (int)sizeof text &&
           list_add(choice->nodes, sizeof choice->nodes, text);
}

static bool take_nodes(struct cox_nodes_choice *choice, const json_t *value)
{
    size_t i;
    const json_t *place;
    json_array_foreach(value, i, place) if (!take_place(choice, place)) return false;
    return choice->nodes[0] != '\0';
}

static bool take_certificates(struct cox_nodes_choice *choice, const json_t *value)
{
    (void)choice;
    return json_is_string(value) && json_string_value(value)[0];
}

static bool take_insecure(struct cox_nodes_choice *choice, const json_t *value)
{
    choice->access.insecure_loopback = json_is_true(value);
    return json_is_boolean(value);
}

static bool take_lead_listen(struct cox_nodes_choice *choice, const json_t *value)
{
    (void)choice;
    return is_address(value);
}

static bool take_seconds(const json_t *value, uint64_t *ret_ms)
{
    const double seconds = json_number_value(value);
    if (!(seconds >= SECONDS_MIN && seconds <= SECONDS_MAX))
        return false;
    *ret_ms = (uint64_t)llround(seconds * 1000);
    return true;
}

static bool take_grace(struct cox_nodes_choice *choice, const json_t *value)
{
    return take_seconds(value, &choice->times.lead_grace_ms);
}

static bool take_suspect(struct cox_nodes_choice *choice, const json_t *value)
{
    return take_seconds(value, &choice->times.suspect_ms);
}

static bool take_dead(struct cox_nodes_choice *choice, const json_t *value)
{
    return take_seconds(value, &choice->times.dead_ms);
}

/* ---- members ---- */

#define SECONDS "a number of seconds, 0.001 to 1000000"

static const struct {
    const char *name;
    bool (*take)(struct cox_nodes_choice *choice, const json_t *value);
    const char *expected;
} members[] = {
    {"servers", take_servers, "NATS servers, as in [\"tls://nats1:4222\"]"},
    {"nodes", take_nodes,
     "nodes, as in [{\"name\": \"a\", \"ranks\": 4}], with \"listen\": \"HOST:PORT\" or without"},
    {"certificates", take_certificates, "the directory that coxswain-certificates has made"},
    {"insecure_loopback", take_insecure, "true or false"},
    {"lead_listen", take_lead_listen, "\"HOST:PORT\""},
    {"lead_grace", take_grace, SECONDS},
    {"suspect_after", take_suspect, SECONDS},
    {"dead_after", take_dead, SECONDS},
};
#define MEMBER_COUNT (sizeof members / sizeof members[0])

static int unknown_member(const struct cox_json_file *file, const char *key, struct cox_error *err)
{
    struct cox_nearest nearest = {.typed = key};
    for (size_t i = 0; i < MEMBER_COUNT; i++)
        cox_nearest_try(&nearest, members[i].name);
    return cox_fail(err, COX_INVALID, "%s, line %d: '%.64s' is no member of a cluster file%s%s%s",
                    file->path, cox_json_file_line(file, key), key,
                    nearest.best ? ": did you mean '" : "", nearest.best ? nearest.best : "",
                    nearest.best ? "'?" : "");
}

static int take_members(struct cox_nodes_choice *choice, struct cox_error *err)
{
    const struct cox_json_file *file = &choice->file;
    const char *key;
    json_t *value;
    json_object_foreach(file->root, key, value)
    {
        size_t i = 0;
        while (i < MEMBER_COUNT && strcmp(members[i].name, key) != 0)
            i++;
        if (i == MEMBER_COUNT)
            return unknown_member(file, key, err);
        if (!members[i].take(choice, value))
            return cox_fail(err, COX_INVALID, "%s, line %d: '%s': expected %s", file->path,
                            cox_json_file_line(file, key), key, members[i].expected);
    }
    if (!choice->url[0] || !choice->nodes[0])
        return cox_fail(err, COX_INVALID, "%s: '%s' is missing: expected %s", file->path,
                        members[choice->url[0] ? 1 : 0].name,
                        members[choice->url[0] ? 1 : 0].expected);
    struct cox_error error = {0};
    uint32_t node_count;
    if (cox_nodes_parse(choice->nodes, NULL, &node_count, &choice->rank_count, &error))
        return cox_fail(err, COX_INVALID, "%s, line %d: %.900s", file->path,
                        cox_json_file_line(file, "nodes"), error.text);
    return 0;
}

/* ---- what one process gets ---- */

/* NULL: no node of that name. */
static const json_t *find_node(const struct cox_nodes_choice *choice, const char *name)
{
    size_t i;
    const json_t *place;
    json_array_foreach(json_object_get(choice->file.root, "nodes"), i,
                       place) if (strcmp(json_string_value(json_object_get(place, "name")), name) ==
                                  0) return place;
    return NULL;
}

static int choose_address(struct cox_nodes_choice *choice, const char *node, struct cox_error *err)
{
    const json_t *place = node ? find_node(choice, node) : NULL;
    if (node && !place)
        return cox_fail(err, COX_INVALID,
                        "%s, line %d: no node is named '%.64s', as --node says: there are %.400s",
                        choice->file.path, cox_json_file_line(&choice->file, "nodes"), node,
                        choice->nodes);
    choice->listen = json_string_value(node ? json_object_get(place, "listen")
                                            : json_object_get(choice->file.root, "lead_listen"));
    return 0;
}

/* A path of the file is one from the file's directory. */
static int choose_certificates(struct cox_nodes_choice *choice, const char *node,
                               struct cox_error *err)
{
    const struct cox_json_file *file = &choice->file;
    const char *folder = json_string_value(json_object_get(file->root, "certificates"));
    const char *slash = strrchr(file->path, '/');
    const int base = folder && folder[0] != '/' && slash ? (int)(slash + 1 - file->path) : 0;
    if ((folder != NULL) == choice->access.insecure_loopback)
        return cox_fail(err, COX_INVALID,
                        "%s: expected either 'certificates', the directory that "
                        "coxswain-certificates has made, or on one machine 'insecure_loopback'",
                        file->path);
    if (!folder)
        return 0;
    const int length =
        snprintf(choice->ca, sizeof choice->ca, "%.*s%s/ca.pem", base, file->path, folder);
    const int longest = snprintf(choice->key, sizeof choice->key, "%.*s%s/%s%s-key.pem", base,
                                 file->path, folder, node ? "node-" : "", node ? node : "lead");
    if (length >= PATH_MAX || longest >= PATH_MAX)
        return cox_fail(err, COX_INVALID, "%s, line %d: 'certificates': the path is too long",
                        file->path, cox_json_file_line(file, "certificates"));
    snprintf(choice->certificate, sizeof choice->certificate, "%.*s.pem",
             longest - (int)strlen("-key.pem"), choice->key);
    choice->access.ca = choice->ca;
    choice->access.certificate = choice->certificate;
    choice->access.key = choice->key;
    return 0;
}

int cox_nodes_choice_read(struct cox_nodes_choice *choice, const char *path, const char *node,
                          struct cox_error *err)
{
    int r = cox_json_file_read("--cluster", path, &choice->file, err);
    if (r == 0)
        r = take_members(choice, err);
    if (r == 0)
        r = choose_address(choice, node, err);
    return r ? r : choose_certificates(choice, node, err);
}

void cox_nodes_choice_deinit(struct cox_nodes_choice *choice)
{
    cox_json_file_deinit(&choice->file);
}

/* ---- facts ---- */

static int tokenizer_digest(const char *model, uint64_t *ret_digest, struct cox_error *err)
{
    char path[PATH_MAX];
    uint8_t buffer[8192];
    uint64_t hash = COX_HASH_START;
    ssize_t got = 0;
    if (snprintf(path, sizeof path, "%s/tokenizer.json", model) >= (int)sizeof path)
        return cox_fail(err, COX_INVALID, "the path of the model is too long");
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && (got = read(fd, buffer, sizeof buffer)) > 0)
        hash = cox_hash_bytes(hash, buffer, (size_t)got);
    if (fd < 0 || got < 0)
        return cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
    *ret_digest = hash;
    return 0;
}

int cox_node_facts_read(const char *model, struct cox_node_facts *ret_facts, struct cox_error *err)
{
    uint64_t weights, tokenizer;
    int r = cox_model_digest_folder(model, &weights, err);
    if (r == 0)
        r = tokenizer_digest(model, &tokenizer, err);
    if (r)
        return r;
    snprintf(ret_facts->model, sizeof ret_facts->model, "%016" PRIx64, weights);
    snprintf(ret_facts->tokenizer, sizeof ret_facts->tokenizer, "%016" PRIx64, tokenizer);
    ret_facts->facts[0] = (struct cox_node_fact){"model digest", ret_facts->model};
    ret_facts->facts[1] = (struct cox_node_fact){"tokenizer digest", ret_facts->tokenizer};
    return 0;
}
