/* bench-mpi: Open MPI over shared memory: a request is a Bcast, the replies are a Gather.
 *
 * Started by itself it becomes mpirun of one process more than there are ranks. Process 0 is the
 * coordinator; mpirun passes its stdin and stdout through, byte by byte. Waiting is polling in Open
 * MPI: by its own choice it gives the CPU away between polls only where processes are more than
 * cores; with the word `yield` always, `busy` never. One mpirun goes through many rows (--world):
 * the processes of a row have a communicator, the others sleep, and the choice is made again for
 * each row as mpirun would. mpirun binds no process to a core of its own, as no other subject does:
 * all stay where the conductor has placed them. */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <mpi.h>

#include "tests/bench/load.h"
#include "tests/bench/subject.h"
#include "leftovers.h"

/* Process id of mpirun: a process that waits for its death must know that it has not died already.
 */
#define LAUNCHER_VARIABLE "COXSWAIN_BENCH_MPIRUN"
/* Instead of a round's number. */
#define ROUND_STOP UINT64_MAX
#define CHOICE_VARIABLE "COXSWAIN_BENCH_MPI_YIELD"
/* Of MPI_Comm_create_group. */
#define ROW_TAG 1

/* Open MPI's own, which MPI_Init calls with mpi_yield_when_idle: declared in no header of a user.
 * */
bool opal_progress_set_yield_when_idle(bool yields);

/* What the coordinator tells a sleeping process. */
struct row {
    /* 0: the end */
    uint32_t rank_count;
    uint64_t request_size, reply_size;
};

struct world {
    struct subject_options options;
    /* of this row's processes */
    MPI_Comm group;
    /* owned: the coordinator's own place first */
    uint8_t *replies;
};

/* ---- becoming mpirun ---- */

static void remove_folder(const void *folder)
{
    leftovers_remove_tree(folder);
}

/* Takes a word for this program out of the arguments. Returns what mpi_yield_when_idle is to be;
 * NULL: not said. */
static const char *take_word(int *argc, char **argv)
{
    static const char *const words[2] = {"busy", "yield"};
    static const char *const values[2] = {"0", "1"};
    for (int i = 0; i < 2 && *argc > 1; i++) {
        if (strcmp(argv[1], words[i]) != 0)
            continue;
        memmove(&argv[1], &argv[2], (size_t)(*argc - 1) * sizeof *argv);
        (*argc)--;
        return values[i];
    }
    return NULL;
}

/* Of the world, where there are several rows. */
static unsigned find_rank_count(int argc, char **argv)
{
    unsigned largest = 0;
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--ranks") == 0 || strcmp(argv[i], "--world") == 0) {
            const unsigned count = (unsigned)strtoul(argv[i + 1], NULL, 10);
            largest = count > largest ? count : largest;
        }
    return largest;
}

static void set_parameter(const char *name, const char *value)
{
    char variable[128];
    snprintf(variable, sizeof variable, "OMPI_MCA_%s", name);
    setenv(variable, value, 1);
}

/* Does not return but with an exit status, having told why. */
static int become_mpirun(int argc, char **argv, const char *yield, unsigned rank_count)
{
    /* Files that Open MPI would leave in /tmp and /dev/shm when it is killed. */
    static char folder[64];
    char text[32];
    char self[PATH_MAX];
    struct cox_error err = {0};
    int guard_fd;
    pid_t guard_pid;
    snprintf(folder, sizeof folder, "/dev/shm/coxswain-bench-mpi-%d", getpid());
    leftovers_remove_tree(folder); /* of a guard that was killed, too */
    if (!realpath("/proc/self/exe", self) || mkdir(folder, 0700) < 0) {
        printf("skip %s: %s\n", folder, strerror(errno));
        return 1;
    }
    if (leftovers_guard(remove_folder, folder, &guard_fd, &guard_pid, &err)) {
        leftovers_remove_tree(folder);
        printf("error %s\n", err.text);
        return 1;
    }
    set_parameter("orte_tmpdir_base", folder);
    set_parameter("btl_vader_backing_directory", folder);
    /* Shared memory alone; what mpirun itself talks over stays in this machine. */
    set_parameter("pml", "ob1");
    set_parameter("btl", "self,vader");
    set_parameter("oob_tcp_if_include", "lo");
    set_parameter("plm", "isolated");
    /* Processes are started by mpirun's main thread: they are killed when the thread that started
     * them ends. */
    set_parameter("orte_odls_base_num_threads", "0");
    if (yield)
        setenv(CHOICE_VARIABLE, yield, 1);
    snprintf(text, sizeof text, "%d", getpid());
    setenv(LAUNCHER_VARIABLE, text, 1);
    snprintf(text, sizeof text, "%u", rank_count + 1);

    char *before[] = {
        "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", text, self};
    char **arguments = calloc((size_t)argc + sizeof before / sizeof *before, sizeof *arguments);
    if (!arguments)
        return 1;
    memcpy(arguments, before, sizeof before);
    memcpy(&arguments[sizeof before / sizeof *before], &argv[1], (size_t)(argc - 1) * sizeof *argv);
    execv(BENCH_MPIRUN, arguments);
    printf("skip %s: %s\n", BENCH_MPIRUN, strerror(errno));
    return 1;
}

/* ---- the processes of a row ---- */

/* Where a process sleeps until a row has it: of the launcher and its number. */
static struct sockaddr_un sleeper_address(int process)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    /* abstract: no file */
    snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "coxswain-bench-mpi-%s-%d",
             getenv(LAUNCHER_VARIABLE), process);
    return address;
}

/* As mpirun would choose for as many processes alone. */
static void choose_yield(uint32_t rank_count)
{
    cpu_set_t processors;
    const char *told = getenv(CHOICE_VARIABLE);
    const bool fits = sched_getaffinity(0, sizeof processors, &processors) == 0 &&
                      rank_count + 1 <= (uint32_t)CPU_COUNT(&processors);
    opal_progress_set_yield_when_idle(told ? told[0] == '1' : !fits);
}

static MPI_Comm row_group(uint32_t rank_count)
{
    MPI_Group world, group;
    MPI_Comm communicator;
    int range[1][3] = {{0, (int)rank_count, 1}};
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_range_incl(world, 1, range, &group);
    MPI_Comm_create_group(MPI_COMM_WORLD, group, ROW_TAG, &communicator);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    return communicator;
}

static int worker_row(const struct row *row, uint32_t rank)
{
    struct load load;
    uint8_t *request = calloc(1, row->request_size);
    uint8_t *reply = calloc(1, row->reply_size);
    if (!request || !reply || load_init(&load, row->request_size, row->reply_size))
        return 1;
    choose_yield(row->rank_count);
    MPI_Comm group = row_group(row->rank_count);
    MPI_Barrier(group);
    for (;;) {
        uint64_t round;
        MPI_Bcast(request, (int)load.request_size, MPI_BYTE, 0, group);
        memcpy(&round, request, sizeof round);
        if (round == ROUND_STOP)
            break;
        load_answer(&load, request, rank, reply);
        MPI_Gather(reply, (int)load.reply_size, MPI_BYTE, NULL, 0, MPI_BYTE, 0, group);
    }
    MPI_Comm_free(&group);
    free(request);
    free(reply);
    return 0;
}

static int worker_main(int process)
{
    const struct sockaddr_un address = sleeper_address(process);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct row row = {0};
    int r = fd < 0 || bind(fd, (const struct sockaddr *)&address, sizeof address) < 0;
    MPI_Barrier(MPI_COMM_WORLD); /* all can be told */
    while (r == 0) {
        const ssize_t got = recv(fd, &row, sizeof row, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == sizeof row && row.rank_count == 0)
            break;
        r = got != sizeof row || worker_row(&row, (uint32_t)process - 1);
    }
    close(fd);
    return r;
}

/* ---- the coordinator ---- */

static int sleepers_tell(const struct row *row, uint32_t count)
{
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int r = fd < 0 ? -errno : 0;
    for (int process = 1; r == 0 && process <= (int)count; process++) {
        const struct sockaddr_un address = sleeper_address(process);
        if (sendto(fd, row, sizeof *row, 0, (const struct sockaddr *)&address, sizeof address) < 0)
            r = -errno;
    }
    if (fd >= 0)
        close(fd);
    return r;
}

static int world_start(const struct subject_options *options, void **ret_subject,
                       struct cox_error *err)
{
    const struct row row = {options->rank_count, options->request_size, options->reply_size};
    int count;
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    if (options->request_size > INT_MAX || options->reply_size > INT_MAX / ((size_t)count + 1))
        return cox_fail(err, COX_UNSUPPORTED, "MPI counts in int");
    if ((uint32_t)count < options->rank_count + 1)
        return cox_fail(err, COX_INVALID, "%d processes for %u ranks", count, options->rank_count);
    struct world *world = calloc(1, sizeof *world);
    uint8_t *replies = calloc(options->rank_count + 1, options->reply_size);
    int r = world && replies ? sleepers_tell(&row, options->rank_count) : -ENOMEM;
    if (r) {
        free(world);
        free(replies);
        return cox_fail(err, r, "beginning a row: %s", strerror(-r));
    }
    *world = (struct world){.options = *options, .replies = replies};
    choose_yield(options->rank_count);
    world->group = row_group(options->rank_count);
    MPI_Barrier(world->group);
    *ret_subject = world;
    return 0;
}

static int world_round(void *subject, uint8_t *request, uint64_t round, struct cox_error *err)
{
    struct world *world = subject;
    const size_t reply_size = world->options.reply_size;
    MPI_Bcast(request, (int)world->options.request_size, MPI_BYTE, 0, world->group);
    MPI_Gather(MPI_IN_PLACE, (int)reply_size, MPI_BYTE, world->replies, (int)reply_size, MPI_BYTE,
               0, world->group);
    for (uint32_t rank = 0; rank < world->options.rank_count; rank++)
        if (!load_matches(world->replies + (rank + 1) * reply_size, rank, round))
            return cox_fail(err, -EBADMSG, "rank %u answered wrongly", rank);
    return 0;
}

static void world_stop(void *subject)
{
    struct world *world = subject;
    uint8_t *request = calloc(1, world->options.request_size);
    if (!request)
        MPI_Abort(MPI_COMM_WORLD, 1);
    load_number(request, ROUND_STOP);
    MPI_Bcast(request, (int)world->options.request_size, MPI_BYTE, 0, world->group);
    MPI_Comm_free(&world->group);
    free(request);
    free(world->replies);
    free(world);
}

static int coordinator_main(int argc, char **argv)
{
    static const struct subject_ops ops = {
        .start = world_start, .round = world_round, .stop = world_stop};
    static const struct row end = {0};
    int count;
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    MPI_Barrier(MPI_COMM_WORLD);
    const int status = subject_main(argc, argv, &ops);
    return status || sleepers_tell(&end, (uint32_t)count - 1);
}

int main(int argc, char **argv)
{
    static const struct subject_ops none = {0};
    const char *launcher = getenv(LAUNCHER_VARIABLE);
    if (!launcher) {
        const char *yield = take_word(&argc, argv);
        const unsigned rank_count = find_rank_count(argc, argv);
        /* Without ranks it only reports an error. */
        return rank_count ? become_mpirun(argc, argv, yield, rank_count)
                          : subject_main(argc, argv, &none);
    }
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != atoi(launcher))
        return 1;
    MPI_Init(NULL, NULL);
    int process;
    MPI_Comm_rank(MPI_COMM_WORLD, &process);
    const int status = process > 0 ? worker_main(process) : coordinator_main(argc, argv);
    if (status)
        MPI_Abort(MPI_COMM_WORLD, status);
    MPI_Finalize();
    return 0;
}
