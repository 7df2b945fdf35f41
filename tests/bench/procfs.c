#include "procfs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* A named group has a semaphore for each rank, channel and direction. */
#define OBJECT_COUNT_MAX 4096
#define SWEEP_PATIENCE_MS 1000

/* ---- the tree ---- */

/* Calls visit for every thread of a process. */
static void each_thread(pid_t pid, void (*visit)(pid_t pid, const char *thread, void *context),
                        void *context)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%jd/task", (intmax_t)pid);
    DIR *threads = opendir(path);
    if (!threads)
        return;
    for (struct dirent *entry; (entry = readdir(threads)) != NULL;)
        if (entry->d_name[0] != '.')
            visit(pid, entry->d_name, context);
    closedir(threads);
}

static FILE *thread_file(pid_t pid, const char *thread, const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "/proc/%jd/task/%.32s/%s", (intmax_t)pid, thread, name);
    return fopen(path, "re");
}

static void add_children(pid_t pid, const char *thread, void *context)
{
    struct procfs_tree *tree = context;
    FILE *file = thread_file(pid, thread, "children");
    int child;
    if (!file)
        return;
    while (tree->count < PROCFS_TREE_MAX && fscanf(file, "%d", &child) == 1)
        tree->pids[tree->count++] = child;
    fclose(file);
}

void procfs_tree(pid_t root, struct procfs_tree *ret_tree)
{
    ret_tree->pids[0] = root;
    ret_tree->count = 1;
    for (size_t i = 0; i < ret_tree->count; i++)
        each_thread(ret_tree->pids[i], add_children, ret_tree);
}

static void find_running(pid_t pid, const char *thread, void *context)
{
    bool *running = context;
    char state = 'S';
    FILE *file = thread_file(pid, thread, "stat");
    if (!file)
        return;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && state == 'R')
        *running = true;
    fclose(file);
}

void procfs_add_running(const struct procfs_tree *tree, struct procfs_tree *running)
{
    for (size_t i = 1; i < tree->count; i++) {
        const pid_t pid = tree->pids[i];
        bool runs = false;
        size_t known = 0;
        each_thread(pid, find_running, &runs);
        while (known < running->count && running->pids[known] != pid)
            known++;
        if (runs && known == running->count && known < PROCFS_TREE_MAX)
            running->pids[running->count++] = pid;
    }
}

void procfs_signal(const struct procfs_tree *tree, int signal)
{
    for (size_t i = tree->count; i > 0; i--)
        kill(tree->pids[i - 1], signal);
}

static bool is_of(const struct procfs_tree *tree, const char *name)
{
    char *end;
    if (strncmp(name, "sem.", 4) == 0)
        name += 4;
    const long pid = strtol(name, &end, 10);
    for (size_t i = 0; end > name && *end == '_' && i < tree->count; i++)
        if (tree->pids[i] == pid)
            return true;
    return false;
}

void procfs_end(const struct procfs_tree *tree)
{
    procfs_signal(tree, SIGKILL);
    while (waitpid(tree->pids[0], NULL, 0) < 0 && errno == EINTR)
        continue;
    DIR *names = opendir("/dev/shm");
    for (const struct dirent *entry; names && (entry = readdir(names)) != NULL;)
        if (is_of(tree, entry->d_name))
            unlinkat(dirfd(names), entry->d_name, 0);
    if (names)
        closedir(names);
}

/* Names that a peer of the benchmark gives its files have the id of its process. */
static bool is_left(int folder_fd, const char *name)
{
    static const char *const prefixes[] = {"coxswain-bench-mpi-", "coxswain-bench-",
                                           "sem.coxswain-bench-"};
    struct stat status;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        const size_t length = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], length) != 0)
            continue;
        const long pid = strtol(name + length, NULL, 10);
        return pid > 0 && kill((pid_t)pid, 0) < 0 && errno == ESRCH &&
               fstatat(folder_fd, name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
               status.st_uid == geteuid();
    }
    return false;
}

static int remove_one(const char *path, const struct stat *status, int type, struct FTW *position)
{
    (void)status, (void)type, (void)position;
    remove(path); /* what cannot be removed keeps its folder */
    return 0;
}

static void sweep_folder(const char *folder)
{
    char path[512];
    DIR *names = opendir(folder);
    for (const struct dirent *entry; names && (entry = readdir(names)) != NULL;)
        if (is_left(dirfd(names), entry->d_name) &&
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) < (int)sizeof path)
            nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    if (names)
        closedir(names);
}

void procfs_sweep(void)
{
    struct procfs_tree tree;
    int left_ms = SWEEP_PATIENCE_MS;
    for (procfs_tree(getpid(), &tree); tree.count > 1; procfs_tree(getpid(), &tree)) {
        for (size_t i = 1; left_ms <= 0 && i < tree.count; i++)
            kill(tree.pids[i], SIGKILL);
        left_ms--;
        while (waitpid(-1, NULL, WNOHANG) > 0) /* children of those are ours then */
            continue;
        usleep(1000);
    }
    sweep_folder("/dev/shm");
    sweep_folder("/tmp");
}

/* ---- processors ---- */

static void add_processors(pid_t pid, const char *thread, void *context)
{
    cpu_set_t own[PROCFS_PROCESSOR_SETS], *all = context;
    (void)pid;
    CPU_ZERO_S(sizeof own, own);
    if (sched_getaffinity(atoi(thread), sizeof own, own) == 0)
        CPU_OR_S(sizeof own, all, all, own);
}

int procfs_processors(const struct procfs_tree *tree)
{
    cpu_set_t all[PROCFS_PROCESSOR_SETS];
    CPU_ZERO_S(sizeof all, all);
    for (size_t i = 0; i < tree->count; i++)
        each_thread(tree->pids[i], add_processors, all);
    return CPU_COUNT_S(sizeof all, all);
}

static void call_each(pid_t pid, const char *thread, void *context)
{
    void (*const *each)(pid_t) = context;
    (void)pid;
    (*each)((pid_t)strtol(thread, NULL, 10));
}

void procfs_threads(const struct procfs_tree *tree, bool but_root, void (*each)(pid_t thread))
{
    for (size_t i = but_root; i < tree->count; i++)
        each_thread(tree->pids[i], call_each, &each);
}

/* ---- usage ---- */

static void add_usage(pid_t pid, const char *thread, void *context)
{
    struct procfs_usage *usage = context;
    char line[256];
    uint64_t cpu_ns, runs, count;
    FILE *file = thread_file(pid, thread, "schedstat");
    if (file) {
        if (fscanf(file, "%" SCNu64 " %*u %" SCNu64, &cpu_ns, &runs) == 2) {
            usage->cpu_ns += cpu_ns;
            usage->runs += runs;
        }
        fclose(file);
    }
    file = thread_file(pid, thread, "status");
    if (!file)
        return;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "voluntary_ctxt_switches: %" SCNu64, &count) == 1)
            usage->sleeps += count;
        else if (sscanf(line, "nonvoluntary_ctxt_switches: %" SCNu64, &count) == 1)
            usage->preempted += count;
    }
    fclose(file);
}

void procfs_usage(const struct procfs_tree *tree, struct procfs_usage *ret_usage)
{
    *ret_usage = (struct procfs_usage){0};
    for (size_t i = 0; i < tree->count; i++)
        each_thread(tree->pids[i], add_usage, ret_usage);
}

/* ---- memory ---- */

static FILE *process_file(pid_t pid, const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%jd/%s", (intmax_t)pid, name);
    return fopen(path, "re");
}

static void add_memory(pid_t pid, struct procfs_memory *memory)
{
    char line[256];
    uint64_t kib;
    FILE *file = process_file(pid, "smaps_rollup");
    if (!file)
        return;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "Pss: %" SCNu64, &kib) == 1)
            memory->pss_kib += kib;
        else if (sscanf(line, "Private_Clean: %" SCNu64, &kib) == 1 ||
                 sscanf(line, "Private_Dirty: %" SCNu64, &kib) == 1)
            memory->private_kib += kib;
    }
    fclose(file);
}

static uint64_t shared_kib(pid_t pid)
{
    uint64_t objects[OBJECT_COUNT_MAX], total = 0;
    size_t count = 0;
    char line[4352];
    FILE *file = process_file(pid, "maps");
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        uint64_t from, to, inode;
        if (!strstr(line, "/memfd:") && !strstr(line, "/dev/shm/"))
            continue;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %" SCNu64, &from, &to, &inode) != 3)
            continue;
        size_t i = 0;
        while (i < count && objects[i] != inode)
            i++;
        if (i < count || count == OBJECT_COUNT_MAX)
            continue;
        objects[count++] = inode;
        total += (to - from) / 1024;
    }
    fclose(file);
    return total;
}

void procfs_memory(const struct procfs_tree *tree, struct procfs_memory *ret_memory)
{
    *ret_memory = (struct procfs_memory){.shared_kib = shared_kib(tree->pids[0])};
    for (size_t i = 0; i < tree->count; i++)
        add_memory(tree->pids[i], ret_memory);
}

uint64_t procfs_available(void)
{
    char line[256];
    uint64_t kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
            break;
    fclose(file);
    return kib * 1024;
}
