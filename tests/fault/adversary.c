/*
 * adversary: a library that turns one rank into an attacker. It is preloaded into every process of
 * a group and acts in the first process of one rank alone. adversary_test.py gives the orders.
 *
 * Environment: ADVERSARY_RANK, the rank; ADVERSARY_FOLDER, a folder with the FIFO `orders` and the
 * file `report`. An order is a line `NUMBER WHAT ARGUMENTS`; its reports are lines, the last of
 * them `done NUMBER`.
 *
 *   inventory                  tries to become able to write each shared mapping and each file of
 *                              this process, and reports `writes INODE NAME` for each inode that
 *                              was mapped for writing before, and `gains INODE HOW NAME` for each
 *                              attempt that succeeded
 *   scribble VALUE SET MS      overwrites, for so long, each mapping of SET that is mapped for
 *                              writing. VALUE: zero, ones, random, identities. SET: words, payload,
 *                              all
 *   punch SET MS               makes holes in them
 *
 * One thread, started before main. It trusts no state of the process that it is in, and calls
 * nothing of Coxswain.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE /* Linux 5.1 */
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define MAPPING_COUNT_MAX 1024
#define PROCESS_COUNT_MAX 64
#define BURST_SIZE 4096
#define PAYLOAD "memfd:cox_payload_"

struct mapping {
    uint8_t *begin;
    size_t size;
    uint64_t inode;
    bool writable;
    char name[128];
};

struct process {
    uint64_t pid, start;
};

static FILE *report;
static struct mapping mappings[MAPPING_COUNT_MAX];
static size_t mapping_count;
static struct process processes[PROCESS_COUNT_MAX];
static size_t process_count;
static uint64_t random_state = UINT64_C(0x9e3779b97f4a7c15);

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* ---- what there is ---- */

/* Shared mappings of files, anonymous ones apart: those have no inode that others could map. */
static void mappings_read(void)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    mapping_count = 0;
    while (maps && mapping_count < MAPPING_COUNT_MAX && fgets(line, sizeof line, maps)) {
        struct mapping *mapping = &mappings[mapping_count];
        uint64_t begin, end;
        char access[8] = "", name[256] = "";
        int fields = sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %*s %*s %" SCNu64 " %255[^\n]",
                            &begin, &end, access, &mapping->inode, name);
        if (fields < 5 || access[3] != 's')
            continue;
        char *deleted = strstr(name, " (deleted)");
        if (deleted)
            *deleted = '\0';
        mapping->begin = (uint8_t *)(uintptr_t)begin;
        mapping->size = end - begin;
        mapping->writable = access[1] == 'w';
        snprintf(mapping->name, sizeof mapping->name, "%.127s",
                 strncmp(name, "/memfd:", 7) == 0 ? name + 1 : name);
        mapping_count++;
    }
    if (maps)
        fclose(maps);
}

static bool process_read(uint64_t pid, struct process *ret_process)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%" PRIu64 "/stat", pid);
    FILE *stat = fopen(path, "re");
    size_t length = stat ? fread(text, 1, sizeof text - 1, stat) : 0;
    if (stat)
        fclose(stat);
    text[length] = '\0';
    const char *at = strrchr(text, ')');
    uint64_t start;
    if (!at ||
        sscanf(
            at + 1,
            " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64,
            &start) != 1)
        return false;
    *ret_process = (struct process){pid, start};
    return true;
}

/* Its own identity, and those of the coordinator and of the other ranks: what words of theirs may
 * say. */
static void processes_read(void)
{
    char path[64];
    process_count = 0;
    if (process_read((uint64_t)getpid(), &processes[process_count]))
        process_count++;
    if (process_read((uint64_t)getppid(), &processes[process_count]))
        process_count++;
    snprintf(path, sizeof path, "/proc/%d/task", (int)getppid());
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/children", (int)getppid(), task->d_name);
        FILE *children = fopen(path, "re");
        uint64_t pid;
        while (children && process_count < PROCESS_COUNT_MAX &&
               fscanf(children, "%" SCNu64, &pid) == 1)
            if (process_read(pid, &processes[process_count]))
                process_count++;
        if (children)
            fclose(children);
    }
    if (tasks)
        closedir(tasks);
}

/* ---- inventory ---- */

static void gained(uint64_t inode, const char *how, const char *name)
{
    fprintf(report, "gains %" PRIu64 " %s %s\n", inode, how, name);
}

static bool can_map(int fd)
{
    void *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return false;
    munmap(map, 4096);
    return true;
}

/* Writes what is there already. */
static bool can_write(int fd)
{
    uint8_t byte;
    return pread(fd, &byte, 1, 0) == 1 && pwrite(fd, &byte, 1, 0) == 1;
}

static void attack_fd(int fd, const struct stat *st, const char *name)
{
    const uint64_t inode = st->st_ino;
    if (can_map(fd))
        gained(inode, "map", name);
    if (can_write(fd))
        gained(inode, "pwrite", name);
    if (ftruncate(fd, st->st_size + 4096) == 0)
        gained(inode, "grow", name);
    if (ftruncate(fd, st->st_size / 2) == 0)
        gained(inode, "shrink", name);
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0)
        gained(inode, "punch", name);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL) == 0)
        gained(inode, "seal", name);
}

/* With its mode changed first: the file is its user's. */
static void attack_path(const char *path, const struct stat *st, const char *name)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 && chmod(path, 0600) == 0)
        fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    if (can_map(fd))
        gained(st->st_ino, "reopen-map", name);
    if (can_write(fd))
        gained(st->st_ino, "reopen-pwrite", name);
    if (ftruncate(fd, st->st_size / 2) == 0)
        gained(st->st_ino, "reopen-shrink", name);
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0)
        gained(st->st_ino, "reopen-punch", name);
    close(fd);
}

static void attack_fds(void)
{
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[64], name[256];
        const int fd = atoi(entry->d_name);
        struct stat st;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, name, sizeof name - 1);
        if (length < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
            continue;
        name[length] = '\0';
        if (strncmp(name, "/memfd:", 7) != 0 && strncmp(name, "/dev/shm/", 9) != 0)
            continue;
        const char *plain = name[1] == 'm' ? name + 1 : name;
        char *deleted = strstr(name, " (deleted)");
        if (deleted)
            *deleted = '\0';
        attack_fd(fd, &st, plain);
        attack_path(path, &st, plain);
    }
    if (folder)
        closedir(folder);
}

static void attack_mapping(const struct mapping *mapping)
{
    char path[96];
    struct stat st;
    if (!mapping->writable && mprotect(mapping->begin, mapping->size, PROT_READ | PROT_WRITE) == 0)
        gained(mapping->inode, "mprotect", mapping->name);
    /* A size of 0 makes a second mapping of the same pages. */
    void *again = mremap(mapping->begin, 0, mapping->size, MREMAP_MAYMOVE);
    if (again != MAP_FAILED) {
        if (!mapping->writable && mprotect(again, mapping->size, PROT_READ | PROT_WRITE) == 0)
            gained(mapping->inode, "mremap-mprotect", mapping->name);
        if (!mapping->writable && madvise(again, mapping->size, MADV_REMOVE) == 0)
            gained(mapping->inode, "remove", mapping->name);
        munmap(again, mapping->size);
    }
    snprintf(path, sizeof path, "/proc/self/map_files/%" PRIxPTR "-%" PRIxPTR,
             (uintptr_t)mapping->begin, (uintptr_t)mapping->begin + mapping->size);
    if (stat(path, &st) == 0)
        attack_path(path, &st, mapping->name);
}

static void inventory(void)
{
    mappings_read();
    for (size_t i = 0; i < mapping_count; i++)
        if (mappings[i].writable)
            fprintf(report, "writes %" PRIu64 " %s\n", mappings[i].inode, mappings[i].name);
    for (size_t i = 0; i < mapping_count; i++)
        attack_mapping(&mappings[i]);
    attack_fds();
}

/* ---- damage ---- */

enum value { ZERO, ONES, RANDOM, IDENTITIES };

/* Pid and start time as the words of groups, queues and pools have had them, alone and packed. */
static uint64_t identity_word(void)
{
    if (process_count == 0)
        return next_random();
    const struct process *process = &processes[next_random() % process_count];
    switch (next_random() % 8) {
    case 0:
        return process->pid;
    case 1:
        return process->start;
    case 2:
        return process->pid << 42 | (process->start & ((UINT64_C(1) << 42) - 1));
    case 3:
        return (next_random() & 0xff) << 56 | process->pid << 32 | (uint32_t)process->start;
    case 4:
        return UINT64_C(0x55) << 56 | process->pid << 32 | (uint32_t)process->start;
    case 5:
        return (uint64_t)(uint32_t)process->pid << 32 | (next_random() & 7);
    case 6:
        return next_random() & 0xff;
    default:
        return (next_random() & 7) << 56 | (next_random() & 0xffff);
    }
}

static void write_burst(uint8_t *at, size_t size, enum value value)
{
    volatile uint64_t *words = (volatile uint64_t *)(void *)at;
    for (size_t i = 0; i < size / sizeof *words; i++)
        switch (value) {
        case ZERO:
            words[i] = 0;
            break;
        case ONES:
            words[i] = UINT64_MAX;
            break;
        case RANDOM:
            words[i] = next_random();
            break;
        case IDENTITIES:
            if (next_random() % 4 == 0)
                words[i] = identity_word();
            break;
        }
}

static bool is_in(const struct mapping *mapping, const char *set)
{
    const bool payload = strncmp(mapping->name, PAYLOAD, strlen(PAYLOAD)) == 0;
    return mapping->writable &&
           (strcmp(set, "all") == 0 || payload == (strcmp(set, "payload") == 0));
}

static void scribble(const char *name, const char *set, uint64_t ms)
{
    static const char *const names[] = {"zero", "ones", "random", "identities"};
    /* Between two bursts: the rank is to go on working, on what is left of its processor. */
    const struct timespec pause = {0, 50000};
    enum value value = ZERO;
    while (value < IDENTITIES && strcmp(names[value], name) != 0)
        value++;
    const uint64_t end = now_ms() + ms;
    processes_read();
    while (now_ms() < end) {
        mappings_read();
        for (size_t i = 0; i < mapping_count; i++) {
            const struct mapping *mapping = &mappings[i];
            if (!is_in(mapping, set))
                continue;
            const size_t pages = mapping->size / BURST_SIZE;
            for (size_t burst = 0; pages && burst < 4; burst++)
                write_burst(mapping->begin + next_random() % pages * BURST_SIZE, BURST_SIZE, value);
        }
        nanosleep(&pause, NULL);
    }
}

static void punch(const char *set, uint64_t ms)
{
    const struct timespec pause = {0, 1000000};
    const uint64_t end = now_ms() + ms;
    while (now_ms() < end) {
        mappings_read();
        for (size_t i = 0; i < mapping_count; i++)
            if (is_in(&mappings[i], set))
                madvise(mappings[i].begin, mappings[i].size, MADV_REMOVE);
        nanosleep(&pause, NULL);
    }
}

/* ---- orders ---- */

static void obey(const char *line)
{
    char number[32], what[32], first[32] = "", second[32] = "";
    uint64_t ms = 0;
    int count = sscanf(line, "%31s %31s %31s %31s %" SCNu64, number, what, first, second, &ms);
    if (count >= 2 && strcmp(what, "inventory") == 0)
        inventory();
    else if (count == 5 && strcmp(what, "scribble") == 0)
        scribble(first, second, ms);
    else if (count == 4 && strcmp(what, "punch") == 0)
        punch(first, strtoull(second, NULL, 10));
    else
        fprintf(report, "no such order: %s", line);
    fprintf(report, "done %s\n", number);
    fflush(report);
}

static void *attack(void *folder)
{
    char path[4096], line[256];
    snprintf(path, sizeof path, "%s/orders", (const char *)folder);
    FILE *orders = fopen(path, "re");
    while (orders && fgets(line, sizeof line, orders))
        obey(line);
    return NULL;
}

__attribute__((constructor)) static void begin(void)
{
    const char *folder = getenv("ADVERSARY_FOLDER"), *rank = getenv("ADVERSARY_RANK");
    const char *own = getenv("COXSWAIN_RANK"), *incarnation = getenv("COXSWAIN_INCARNATION");
    char path[4096];
    pthread_t thread;
    sigset_t all, before;
    /* A replacement is honest. */
    if (!folder || !rank || !own || !incarnation || strcmp(rank, own) != 0 ||
        strcmp(incarnation, "1") != 0)
        return;
    snprintf(path, sizeof path, "%s/report", folder);
    report = fopen(path, "ae");
    if (!report)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_create(&thread, NULL, attack, (void *)(uintptr_t)folder);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
