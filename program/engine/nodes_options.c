#include "nodes_options.h"

#include "channel/base/hash.h"
#include "channel/base/idioms.h"
#include "engine/model/digest.h"
#include "program/cli/group_options.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    OPTION_NODES = COX_OPTION_KEY(0x2000),
    OPTION_CLUSTER,
    OPTION_CA,
    OPTION_CERT,
    OPTION_KEY,
    OPTION_INSECURE,
    OPTION_LISTEN,
    OPTION_LEAD_GRACE,
    OPTION_SUSPECT,
    OPTION_DEAD,
};

static int take_time(const char *what, const char *value, uint64_t *ret_ms, struct cox_error *err)
{
    uint64_t ms;
    int r = cox_parse_seconds(what, value, &ms, err);
    if (r == 0)
        *ret_ms = ms;
    return r;
}

static int take(void *context, int key, const char *value, struct cox_error *err)
{
    struct cox_nodes_choice *choice = context;
    switch (key) {
    case OPTION_NODES:
        choice->nodes = value;
        return 0;
    case OPTION_CLUSTER:
        choice->access.url = value;
        return 0;
    case OPTION_CA:
        choice->access.ca = value;
        return 0;
    case OPTION_CERT:
        choice->access.certificate = value;
        return 0;
    case OPTION_KEY:
        choice->access.key = value;
        return 0;
    case OPTION_INSECURE:
        choice->access.insecure_loopback = true;
        return 0;
    case OPTION_LISTEN:
        choice->listen = value;
        return strrchr(value, ':')
                   ? 0
                   : cox_fail(err, COX_INVALID, "--listen '%.60s' is no HOST:PORT", value);
    case OPTION_LEAD_GRACE:
        return take_time("--lead-grace", value, &choice->times.lead_grace_ms, err);
    case OPTION_SUSPECT:
        return take_time("--suspect-after", value, &choice->times.suspect_ms, err);
    default: /* OPTION_DEAD */
        return take_time("--dead-after", value, &choice->times.dead_ms, err);
    }
}

/* clang-format off */
#define ACCESS_OPTIONS                                                                             \
    {"cluster", OPTION_CLUSTER, "URL[,URL]", 0,                                                    \
     "the NATS servers, as in tls://nats1:4222,tls://nats2:4222", 0},                              \
    {"ca", OPTION_CA, "FILE", 0, "certificate of the cluster's CA (coxswain-certificates)", 0},    \
    {"cert", OPTION_CERT, "FILE", 0,                                                               \
     "certificate of this process: lead.pem, or node-NAME.pem", 0},                                \
    {"key", OPTION_KEY, "FILE", 0, "its key", 0},                                                  \
    {"insecure-loopback", OPTION_INSECURE, NULL, 0,                                                \
     "no TLS and no certificates: for trying nodes on one machine, by loopback addresses only",    \
     0},                                                                                           \
    {"listen", OPTION_LISTEN, "HOST:PORT", 0,                                                      \
     "where other processes of the group connect for what is large (default: the address from "    \
     "which the cluster is reached, any port)",                                                    \
     0}
/* clang-format on */

static const struct argp_option lead_options[] = {
    {"nodes", OPTION_NODES, "NAME:RANKS[,...]", 0,
     "the ranks are on these machines, where coxswain node runs: a:4,b:4 are ranks 0 to 3 on node a "
     "and 4 to 7 on b",
     0},
    ACCESS_OPTIONS,
    {"lead-grace", OPTION_LEAD_GRACE, "SECONDS", 0,
     "how long the ranks wait for another lead when this process is lost (default 30)", 0},
    {"suspect-after", OPTION_SUSPECT, "SECONDS", 0,
     "a node that was not heard so long gets no requests (default 0.3)", 0},
    {"dead-after", OPTION_DEAD, "SECONDS", 0,
     "a node that was not heard so long is dead (default 0.8)", 0},
    {0},
};
const struct cox_option_group cox_lead_option_group = {
    .title = "Ranks on several machines:", .options = lead_options, .take = take};

static const struct argp_option agent_options[] = {
    ACCESS_OPTIONS,
    {0},
};
const struct cox_option_group cox_agent_option_group = {
    .title = "The cluster:", .options = agent_options, .take = take};

bool cox_nodes_choice_given(const struct cox_nodes_choice *choice)
{
    const struct cox_cluster_access *access = &choice->access;
    const struct cox_node_times *times = &choice->times;
    return access->url || access->ca || access->certificate || access->key ||
           access->insecure_loopback || choice->listen || times->lead_grace_ms ||
           times->suspect_ms || times->dead_ms;
}

int cox_nodes_choice_check(const struct cox_nodes_choice *choice, struct cox_error *err)
{
    const struct cox_cluster_access *access = &choice->access;
    if (!access->url)
        return cox_fail(err, COX_INVALID,
                        "--cluster is missing: the NATS server, as in tls://HOST:4222");
    if (access->insecure_loopback)
        return access->ca || access->certificate || access->key
                   ? cox_fail(
                         err, COX_INVALID,
                         "--insecure-loopback uses no certificates: leave out --ca, --cert and "
                         "--key")
                   : 0;
    if (!access->ca || !access->certificate || !access->key)
        return cox_fail(err, COX_INVALID,
                        "--%s is missing: coxswain-certificates makes the files (or "
                        "--insecure-loopback, on one machine)",
                        !access->ca            ? "ca"
                        : !access->certificate ? "cert"
                                               : "key");
    return 0;
}

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
