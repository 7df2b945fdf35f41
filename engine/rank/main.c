/* coxswain-worker: the reference inference worker. One rank that runs a Llama-architecture model on
 * the CPU. */
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "adapter_cache.h"
#include "channel/base/thread.h"
#include "engine.h"
#include <coxswain/worker.h>

#define BLOCK_SIZE_DEFAULT 16
#define BLOCK_COUNT_DEFAULT 512
#define SWAP_BLOCK_COUNT_DEFAULT 64

enum exit_status {
    EXIT_OK = 0,
    EXIT_FAILED = 1,
    EXIT_USAGE = 2,
};

/* Lock-free: read in a signal handler. */
static struct cox_worker *_Atomic running_worker;
static struct cox_engine *_Atomic running_engine;

static void on_terminate(int number)
{
    (void)number;
    if (running_engine)
        cox_engine_stop(running_engine);
    if (running_worker)
        cox_worker_stop(running_worker);
}

static void print_help(FILE *to)
{
    fprintf(
        to,
        "Usage: coxswain-worker [--socket NAME|PATH] [OPTION]...\n"
        "\n"
        "The reference inference worker: one rank of a group, running a Llama-architecture model\n"
        "(config.json and model.safetensors) on the CPU. A coordinator starts it, for example\n"
        "`coxswain run -n 4 -- coxswain-worker --model DIR`, and passes rank, world size and group in the\n"
        "environment (COXSWAIN_*) or by flags (--local_rank, --local_world_size, --shm_name_prefix, ...).\n"
        "Started by hand it registers at the control socket of a group that waits for it (coxswain run --worker none), and\n"
        "SIGTERM or Ctrl-C ends it; the group treats that as its death.\n"
        "\n"
        "  --socket NAME|PATH    register at the control socket of this group, which assigns rank (--local_rank) and\n"
        "                        world size unless given\n"
        "  --model DIR           model folder; the init request may name another\n"
        "  --block-count N       KV blocks (default %d)\n"
        "  --block-size N        positions per KV block (default %d)\n"
        "  --swap-block-count N  blocks of swap space (default %d)\n"
        "  --lora-slots N        LoRA adapters at a time, 1 to %u (default %u)\n"
        "  -h, --help            this text\n"
        "\n"
        "Exit status: 0 stopped, 1 failure, 2 usage, 70 the coordinator died.\n",
        BLOCK_COUNT_DEFAULT, BLOCK_SIZE_DEFAULT, SWAP_BLOCK_COUNT_DEFAULT,
        COX_ADAPTER_SLOT_COUNT_MAX, COX_ADAPTER_SLOT_COUNT_DEFAULT);
}

static int help(void)
{
    print_help(stdout);
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_OK;
    fprintf(stderr, "coxswain-worker: cannot write to standard output: %s\n",
            cox_status_text(-errno));
    return EXIT_FAILED;
}

static int parse_count(const char *flag, const char *text, uint32_t *ret_count)
{
    char *end;
    errno = 0;
    unsigned long number = strtoul(text, &end, 10);
    if (errno || end == text || *end || number > INT32_MAX) {
        fprintf(stderr, "coxswain-worker: %s is '%s': expected a number\n", flag, text);
        return EXIT_USAGE;
    }
    *ret_count = (uint32_t)number;
    return 0;
}

static int parse_arguments(struct cox_engine_options *engine, int argc, char **argv)
{
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'},
        {"block-count", required_argument, NULL, 'c'},
        {"block-size", required_argument, NULL, 's'},
        {"swap-block-count", required_argument, NULL, 'w'},
        {"lora-slots", required_argument, NULL, 'l'},
        {NULL, 0, NULL, 0},
    };
    int o, r = 0;
    while (r == 0 && (o = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (o) {
        case 'm':
            if (strlen(optarg) >= sizeof engine->model_dir) {
                fprintf(stderr, "coxswain-worker: --model: expected a path of under %zu bytes\n",
                        sizeof engine->model_dir);
                return EXIT_USAGE;
            }
            snprintf(engine->model_dir, sizeof engine->model_dir, "%s", optarg);
            break;
        case 'c':
            r = parse_count("--block-count", optarg, &engine->block_count);
            break;
        case 's':
            r = parse_count("--block-size", optarg, &engine->block_size);
            break;
        case 'w':
            r = parse_count("--swap-block-count", optarg, &engine->swap_block_count);
            break;
        case 'l':
            r = parse_count("--lora-slots", optarg, &engine->lora_slot_count);
            if (r == 0 && (engine->lora_slot_count < 1 ||
                           engine->lora_slot_count > COX_ADAPTER_SLOT_COUNT_MAX)) {
                fprintf(stderr, "coxswain-worker: --lora-slots is '%s': expected 1 to %u\n", optarg,
                        COX_ADAPTER_SLOT_COUNT_MAX);
                r = EXIT_USAGE;
            }
            break;
        default:
            return EXIT_USAGE;
        }
    }
    if (r == 0 && optind < argc) {
        fprintf(stderr, "coxswain-worker: unexpected argument '%s' (see --help)\n", argv[optind]);
        return EXIT_USAGE;
    }
    return r;
}

static int serve(const struct cox_worker_options *options, struct cox_engine *engine)
{
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_new(options, &cox_engine_callbacks, engine, &worker, &err);
    if (r == 0) {
        cox_engine_serve(engine, worker);
        running_engine = engine;
        running_worker = worker;
        const struct sigaction action = {.sa_handler = on_terminate};
        sigaction(SIGTERM, &action, NULL);
        /* A terminal's Ctrl-C reaches the whole process group, and the coordinator decides what it
         * means. In a worker started by hand it stops the worker. */
        struct sigaction before;
        sigaction(SIGINT, NULL, &before);
        if (!options->parent_pid && before.sa_handler != SIG_IGN)
            sigaction(SIGINT, &action, NULL);
        else
            signal(SIGINT, SIG_IGN);
        r = cox_worker_run(worker, &err);
        running_worker = NULL;
        running_engine = NULL;
    }
    uint32_t rank = worker ? cox_worker_rank(worker) : options->rank;
    if (r && rank == COX_WORKER_RANK_ANY)
        fprintf(stderr, "coxswain-worker: %s\n", err.text);
    else if (r)
        fprintf(stderr, "coxswain-worker: rank %" PRIu32 ": %s\n", rank, err.text);
    cox_worker_free(worker);
    return r;
}

int main(int argc, char **argv)
{
    struct cox_engine_options engine_options = {
        .block_size = BLOCK_SIZE_DEFAULT,
        .block_count = BLOCK_COUNT_DEFAULT,
        .swap_block_count = SWAP_BLOCK_COUNT_DEFAULT,
    };
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return help();
    struct cox_error err = {0};
    if (cox_thread_check_stack(&err)) {
        fprintf(stderr, "coxswain-worker: %s\n", err.text);
        return EXIT_FAILURE;
    }
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    if (cox_worker_options_parse(&options, &argc, argv, &err)) {
        fprintf(stderr, "coxswain-worker: %s (see --help)\n", err.text);
        return EXIT_USAGE;
    }
    options.leave_stuck = true; /* see engine.h */
    int r = parse_arguments(&engine_options, argc, argv);
    if (r)
        return r;

    struct cox_engine *engine = NULL;
    engine_options.log = options.log;
    /* A worker that registered by hello knows the control socket by its path or its name. One
     * started by the coordinator knows it from its environment. */
    const char *control_socket =
        strchr(options.control_socket, '/') ? options.control_socket : getenv("COXSWAIN_SOCKET");
    snprintf(engine_options.control_socket, sizeof engine_options.control_socket, "%s",
             control_socket ? control_socket : "");
    r = cox_engine_new(&engine_options, &engine);
    if (r)
        fprintf(stderr, "coxswain-worker: %s\n", cox_status_text(r));
    else
        r = serve(&options, engine);
    cox_engine_free(engine);
    return r ? EXIT_FAILED : EXIT_OK;
}
