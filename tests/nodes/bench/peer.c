#include "peer.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/measure.h"

#define NSEC_PER_SEC 1e9
#define NSEC_PER_MSEC UINT64_C(1000000)
#define STEPS_MAX ((size_t)1 << 20)
/* Of each node its own, and one that only the transport knows. */
#define PROCESSES_MAX (2 * PEER_NODES_MAX)
#define DEATH_PATIENCE_NS UINT64_C(20000000000)
#define SIZE_MAX_ALLOWED ((size_t)1 << 30)

static const char usage_text[] =
    "usage: %s lead|node [OPTION...]\n"
    "  --nodes A,B,...   addresses of the nodes\n"
    "  --lead A          address of the lead\n"
    "  --server A        address of the server, where the transport has one\n"
    "  --index I         node: which of the addresses is its own (0)\n"
    "  --folder DIR      keys and certificates\n"
    "  --variant WORD    a way of the transport's own\n"
    "  --mode MODE       full: steps back to back; paced: one each period; bulk; pull (full)\n"
    "  --period-us N     paced: the period (10000)\n"
    "  --ms N            lead: how long it measures (1000)\n"
    "  --request N, --reply N      bytes to and from each node (1280, 1024)\n"
    "  --bulk N, --chunk N         bytes that are acknowledged, of one call (67108864, 1048576)\n"
    "  --node-pids P,Q,..., --server-pids P,...   lead: processes whose CPU time and memory it reports\n"
    "  --idle-ms N       lead: also reports its CPU time while nothing is asked, so long (0: no)\n"
    "  --die stop|kill   lead: then the last node gets the signal, and it reports when a step fails\n"
    "  --join FILE       lead: writes its process id there once all nodes are connected\n";

struct processes {
    pid_t pids[PROCESSES_MAX];
    clockid_t clocks[PROCESSES_MAX];
    size_t count;
};

struct measured {
    struct peer_options options;
    /* 0: back to back */
    uint64_t period_ns, duration_ns;
    /* 0: not measured */
    uint64_t idle_ns;
    /* 0: no node dies */
    int death;
    /* cgroup.procs of a control group; NULL: it stays in that which it is in */
    const char *group;
    struct processes nodes, servers;
};

/* Of everything that is counted beside the samples. */
struct usage {
    uint64_t lead_ns, nodes_ns, servers_ns, wire_bytes;
};

int peer_fail(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why);
    return -EIO;
}

int peer_fail_errno(const char *what, int error)
{
    peer_fail(what, strerror(error));
    return -error;
}

void peer_path(const struct peer_options *options, bool lead, const char *end, char *ret_path,
               size_t size)
{
    if (lead)
        snprintf(ret_path, size, "%s/lead%s", options->folder, end);
    else
        snprintf(ret_path, size, "%s/node-%" PRIu32 "%s", options->folder, options->index, end);
}

bool peer_reply(const struct peer_options *options, const void *request, size_t size,
                uint8_t *ret_reply)
{
    const uint64_t index = options->index;
    if (size != options->request_size)
        return false;
    memcpy(ret_reply, request, sizeof index);
    memcpy(ret_reply + sizeof index, &index, sizeof index);
    return true;
}

int peer_replies_take(struct peer_replies *replies, const void *reply, size_t size)
{
    uint64_t header[2];
    if (size != replies->options->reply_size)
        return -EBADMSG;
    memcpy(header, reply, sizeof header);
    if (header[0] != replies->step || header[1] >= replies->options->node_count ||
        replies->arrived[header[1]])
        return -EBADMSG;
    replies->arrived[header[1]] = true;
    replies->left--;
    return 0;
}

/* ---- what is counted ---- */

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    if (clock_gettime(clock, &now) < 0)
        return 0;
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static uint64_t processes_ns(const struct processes *processes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < processes->count; i++)
        sum += clock_ns(processes->clocks[i]);
    return sum;
}

/* Both directions of every interface of this network namespace but the loopback. */
static uint64_t wire_bytes(void)
{
    FILE *file = fopen("/proc/self/net/dev", "re");
    char line[512];
    uint64_t sum = 0;
    while (file && fgets(line, sizeof line, file)) {
        char name[32];
        uint64_t received, sent;
        if (sscanf(line, " %31[^:]: %" SCNu64 " %*u %*u %*u %*u %*u %*u %*u %" SCNu64, name,
                   &received, &sent) == 3 &&
            strcmp(name, "lo") != 0)
            sum += received + sent;
    }
    if (file)
        fclose(file);
    return sum;
}

/* Proportional set size: shared pages in equal parts. 0: unknown, or the process is another user's.
 * */
static uint64_t memory_kib(pid_t pid)
{
    char path[64], line[256];
    uint64_t kib = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "Pss: %" SCNu64, &kib) != 1)
        continue;
    if (file)
        fclose(file);
    return kib;
}

static uint64_t processes_kib(const struct processes *processes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < processes->count; i++)
        sum += memory_kib(processes->pids[i]);
    return sum;
}

static struct usage usage_now(const struct measured *measured)
{
    return (struct usage){.lead_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID),
                          .nodes_ns = processes_ns(&measured->nodes),
                          .servers_ns = processes_ns(&measured->servers),
                          .wire_bytes = wire_bytes()};
}

/* ---- the lead ---- */

struct run {
    const struct peer_ops *ops;
    void *lead;
    /* owned: the request or a chunk of bulk */
    uint8_t *bytes;
    /* owned */
    uint64_t *samples_ns;
    /* of all phases, so that no late reply passes for one of this step */
    uint64_t step;
};

static int run_step(struct run *run, const struct peer_options *options)
{
    const uint64_t step = ++run->step;
    struct peer_replies replies = {.options = options, .step = step, .left = options->node_count};
    memcpy(run->bytes, &step, sizeof step);
    if (options->bulk)
        return run->ops->bulk(run->lead, run->bytes);
    int r = run->ops->step(run->lead, run->bytes, &replies);
    return r ? peer_fail_errno("a step", -r) : 0;
}

/* Takes at least one sample. */
static int run_for(struct run *run, const struct measured *measured, uint64_t duration_ns,
                   size_t *ret_count)
{
    const uint64_t start_ns = measure_now_ns();
    uint64_t now_ns = start_ns, due_ns = start_ns;
    size_t count = 0;
    do {
        if (measured->period_ns > 0) {
            measure_sleep_until(due_ns);
            now_ns = measure_now_ns();
            /* A step that took longer than its period delays the next ones. */
            due_ns = (due_ns > now_ns ? due_ns : now_ns) + measured->period_ns;
        }
        int r = run_step(run, &measured->options);
        if (r)
            return r;
        const uint64_t end_ns = measure_now_ns();
        run->samples_ns[count++] = end_ns - now_ns;
        now_ns = end_ns;
    } while (now_ns - start_ns < duration_ns && count < STEPS_MAX);
    *ret_count = count;
    return 0;
}

/* CPU time of the lead per second of nothing. */
static double run_idle(const struct measured *measured)
{
    const uint64_t begin_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID), start_ns = measure_now_ns();
    measure_sleep_until(start_ns + measured->idle_ns);
    return (double)(clock_ns(CLOCK_PROCESS_CPUTIME_ID) - begin_ns) * 1e6 /
           (double)(measure_now_ns() - start_ns);
}

/* From the signal to the end of the step that fails, in ms. */
static double run_death(struct run *run, const struct measured *measured)
{
    const uint64_t start_ns = measure_now_ns();
    uint64_t now_ns = start_ns;
    kill(measured->nodes.pids[measured->options.node_count - 1], measured->death);
    while (run_step(run, &measured->options) == 0 && now_ns - start_ns < DEATH_PATIENCE_NS)
        now_ns = measure_now_ns();
    return (double)(measure_now_ns() - start_ns) / 1e6;
}

static void print_bulk(const struct measured *measured, const struct run *run, size_t count,
                       const struct usage *used)
{
    const double gigabytes = (double)measured->options.bulk_size / 1e9;
    printf("\"gb_s\": %.3f, \"cpu_s_gb\": %.3f, \"bulk_bytes\": %zu, \"chunk_bytes\": %zu, ",
           gigabytes / ((double)run->samples_ns[count / 2] / NSEC_PER_SEC),
           (double)(used->lead_ns + used->nodes_ns) / NSEC_PER_SEC / gigabytes / (double)count,
           measured->options.bulk_size, measured->options.chunk_size);
}

static void print_result(const struct measured *measured, const struct run *run, size_t count,
                         double seconds, const struct usage *used)
{
    const struct peer_options *options = &measured->options;
    const double steps = (double)count, us = 1e3 * steps;
    printf("{\"transport\": \"%s%s%s\", \"nodes\": %" PRIu32 ", \"mode\": \"%s\", ",
           run->ops->transport, options->variant[0] ? "-" : "", options->variant,
           options->node_count,
           options->pull         ? "pull"
           : options->bulk       ? "bulk"
           : measured->period_ns ? "paced"
                                 : "full");
    if (options->bulk)
        print_bulk(measured, run, count, used);
    else
        printf("\"request_bytes\": %zu, \"reply_bytes\": %zu, ",
               run->ops->request_size ? run->ops->request_size(run->lead) : options->request_size,
               options->reply_size);
    printf("\"steps\": %zu, \"p50_us\": %.1f, \"p99_us\": %.1f, \"steps_s\": %.1f, ", count,
           (double)run->samples_ns[count / 2] / 1e3,
           (double)run->samples_ns[count * 99 / 100] / 1e3, steps / seconds);
    printf("\"lead_us\": %.1f, \"nodes_us\": %.1f, \"server_us\": %.1f, \"wire_bytes\": %.0f, ",
           (double)used->lead_ns / us, (double)used->nodes_ns / us, (double)used->servers_ns / us,
           (double)used->wire_bytes / steps);
    printf("\"lead_kib\": %" PRIu64 ", \"nodes_kib\": %" PRIu64 ", \"server_kib\": %" PRIu64,
           memory_kib(getpid()), processes_kib(&measured->nodes),
           processes_kib(&measured->servers));
}

static int run_measured(struct run *run, const struct measured *measured)
{
    size_t count;
    int r = run_for(run, measured, measured->duration_ns / 10, &count);
    if (r)
        return r;
    const struct usage before = usage_now(measured);
    const uint64_t start_ns = measure_now_ns();
    r = run_for(run, measured, measured->duration_ns, &count);
    if (r)
        return r;
    const double seconds = (double)(measure_now_ns() - start_ns) / NSEC_PER_SEC;
    const struct usage after = usage_now(measured);
    const struct usage used = {.lead_ns = after.lead_ns - before.lead_ns,
                               .nodes_ns = after.nodes_ns - before.nodes_ns,
                               .servers_ns = after.servers_ns - before.servers_ns,
                               .wire_bytes = after.wire_bytes - before.wire_bytes};
    measure_sort(run->samples_ns, count);
    print_result(measured, run, count, seconds, &used);
    if (measured->idle_ns)
        printf(", \"idle_lead_us_s\": %.1f", run_idle(measured));
    if (measured->death)
        printf(", \"dead_ms\": %.1f", run_death(run, measured));
    puts("}");
    return 0;
}

/* Adds the processes that only the transport knows. */
static void add_processes(struct measured *measured, const struct run *run)
{
    pid_t pids[PEER_NODES_MAX];
    struct processes *nodes = &measured->nodes;
    const uint32_t count = run->ops->processes ? run->ops->processes(run->lead, pids) : 0;
    for (uint32_t i = 0; i < count && nodes->count < PROCESSES_MAX; i++) {
        nodes->pids[nodes->count] = pids[i];
        nodes->count += clock_getcpuclockid(pids[i], &nodes->clocks[nodes->count]) == 0;
    }
}

static int join_group(const struct measured *measured)
{
    FILE *file = measured->group ? fopen(measured->group, "we") : NULL;
    if (!measured->group)
        return 0;
    if (!file)
        return peer_fail_errno(measured->group, errno);
    fprintf(file, "%d\n", (int)getpid());
    return fclose(file) ? peer_fail_errno(measured->group, errno) : 0;
}

static int lead_main(struct measured *measured, const struct peer_ops *ops)
{
    const struct peer_options *options = &measured->options;
    struct run run = {.ops = ops};
    if (options->bulk ? !ops->bulk : !ops->step)
        return peer_fail(ops->transport, "does not measure this mode");
    run.bytes = calloc(1, options->bulk ? options->chunk_size : options->request_size);
    run.samples_ns = malloc(STEPS_MAX * sizeof *run.samples_ns);
    int r = run.bytes && run.samples_ns ? ops->start(options, &run.lead)
                                        : peer_fail_errno("samples", ENOMEM);
    if (r == 0) {
        add_processes(measured, &run);
        r = join_group(measured);
        if (r == 0)
            r = run_measured(&run, measured);
        fflush(stdout); /* nodes may end first, and then the driver ends this process */
        ops->stop(run.lead);
    }
    free(run.samples_ns);
    free(run.bytes);
    return r;
}

/* ---- options ---- */

static bool parse_number(const char *text, uint64_t min, uint64_t max, uint64_t *ret_value)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || value < min || value > max)
        return false;
    *ret_value = value;
    return true;
}

/* Writes ends of strings into the list. */
static bool parse_nodes(char *list, struct peer_options *options)
{
    char *rest = list;
    for (char *address; (address = strsep(&rest, ","));) {
        if (options->node_count == PEER_NODES_MAX || !*address)
            return false;
        options->nodes[options->node_count++] = address;
    }
    return true;
}

static bool parse_processes(char *list, struct processes *processes)
{
    char *rest = list;
    for (char *text; (text = strsep(&rest, ","));) {
        uint64_t pid;
        if (processes->count == PROCESSES_MAX || !parse_number(text, 1, INT32_MAX, &pid) ||
            clock_getcpuclockid((pid_t)pid, &processes->clocks[processes->count]) != 0)
            return false;
        processes->pids[processes->count++] = (pid_t)pid;
    }
    return true;
}

static bool parse_mode(const char *mode, struct measured *measured)
{
    measured->options.pull = strcmp(mode, "pull") == 0;
    measured->options.bulk = measured->options.pull || strcmp(mode, "bulk") == 0;
    if (strcmp(mode, "paced") != 0)
        measured->period_ns = 0;
    return measured->options.bulk || strcmp(mode, "paced") == 0 || strcmp(mode, "full") == 0;
}

static bool parse_death(const char *word, int *ret_signal)
{
    *ret_signal = strcmp(word, "stop") == 0 ? SIGSTOP : strcmp(word, "kill") == 0 ? SIGKILL : 0;
    return *ret_signal != 0;
}

/* Where the value of --NAME goes: as a text, or as a number of units. */
struct option_row {
    const char *name;
    const char **text;
    uint64_t *number;
    uint64_t min, max, unit;
};

static bool parse_option(const struct option_row *row, const char *value)
{
    uint64_t number;
    if (row->text) {
        *row->text = value;
        return true;
    }
    if (!parse_number(value, row->min, row->max, &number))
        return false;
    *row->number = number * row->unit;
    return true;
}

static bool parse_options(int argc, char **argv, struct measured *measured)
{
    struct peer_options *options = &measured->options;
    const char *mode = "full", *nodes = NULL, *node_pids = NULL, *server_pids = NULL, *die = NULL;
    uint64_t index = 0, request = options->request_size, reply = options->reply_size,
             bulk = options->bulk_size, chunk = options->chunk_size;
    const struct option_row rows[] = {
        {"nodes", .text = &nodes},
        {"lead", .text = &options->lead},
        {"server", .text = &options->server},
        {"folder", .text = &options->folder},
        {"variant", .text = &options->variant},
        {"mode", .text = &mode},
        {"node-pids", .text = &node_pids},
        {"server-pids", .text = &server_pids},
        {"die", .text = &die},
        {"join", .text = &measured->group},
        {"index", NULL, &index, 0, PEER_NODES_MAX - 1, 1},
        {"period-us", NULL, &measured->period_ns, 1, 10000000, 1000},
        {"ms", NULL, &measured->duration_ns, 1, 3600000, NSEC_PER_MSEC},
        {"idle-ms", NULL, &measured->idle_ns, 0, 3600000, NSEC_PER_MSEC},
        {"request", NULL, &request, PEER_HEADER_SIZE, SIZE_MAX_ALLOWED, 1},
        {"reply", NULL, &reply, PEER_HEADER_SIZE, SIZE_MAX_ALLOWED, 1},
        {"bulk", NULL, &bulk, PEER_HEADER_SIZE, SIZE_MAX_ALLOWED, 1},
        {"chunk", NULL, &chunk, PEER_HEADER_SIZE, SIZE_MAX_ALLOWED, 1},
    };
    const size_t count = sizeof rows / sizeof rows[0];
    for (int i = 1; i < argc; i += 2) {
        size_t row = 0;
        while (row < count &&
               (strncmp(argv[i], "--", 2) != 0 || strcmp(argv[i] + 2, rows[row].name) != 0))
            row++;
        if (row == count || i + 1 == argc || !parse_option(&rows[row], argv[i + 1]))
            return false;
    }
    options->index = (uint32_t)index;
    options->request_size = request;
    options->reply_size = reply;
    options->bulk_size = bulk;
    options->chunk_size = chunk;
    return nodes && parse_nodes((char *)(uintptr_t)nodes, options) && parse_mode(mode, measured) &&
           (!node_pids || parse_processes((char *)(uintptr_t)node_pids, &measured->nodes)) &&
           (!server_pids || parse_processes((char *)(uintptr_t)server_pids, &measured->servers)) &&
           (!die || parse_death(die, &measured->death)) && options->index < options->node_count &&
           (!measured->death || measured->nodes.count >= options->node_count);
}

int peer_main(int argc, char **argv, const struct peer_ops *ops)
{
    struct measured measured = {.options = {.lead = "127.0.0.1",
                                            .server = "127.0.0.1",
                                            .folder = ".",
                                            .variant = "",
                                            .request_size = 1280,
                                            .reply_size = 1024,
                                            .bulk_size = (size_t)64 << 20,
                                            .chunk_size = (size_t)1 << 20},
                                .period_ns = 10 * NSEC_PER_MSEC,
                                .duration_ns = 1000 * NSEC_PER_MSEC};
    const bool lead = argc > 1 && strcmp(argv[1], "lead") == 0;
    if (argc < 2 || (!lead && strcmp(argv[1], "node") != 0) ||
        !parse_options(argc - 1, argv + 1, &measured)) {
        fprintf(stderr, usage_text, argv[0]);
        return 2;
    }
    /* The driver may be killed; and a write to a peer that is gone is an error, not the end. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    return (lead ? lead_main(&measured, ops) : ops->node(&measured.options)) ? 1 : 0;
}
