#include "floor.h"

#include <errno.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "load.h"

#define LINE_SIZE 128

/* In shared memory, one per worker, each semaphore on lines of its own. The request comes after all
 * of them, then the replies. */
struct floor_pair {
    _Alignas(LINE_SIZE) sem_t request;
    _Alignas(LINE_SIZE) sem_t reply;
};

struct floor {
    uint32_t rank_count;
    size_t request_size;
    size_t reply_size;
    size_t reply_stride;
    struct floor_pair *pairs; /* the whole mapping starts here */
    size_t map_size;
    uint8_t *request;
    uint8_t *replies;
    uint8_t *copies; /* private: the replies, copied out */
    pid_t *pids;
    uint32_t started;
};

static size_t align_up(size_t size)
{
    return (size + LINE_SIZE - 1) / LINE_SIZE * LINE_SIZE;
}

static void sem_wait_through(sem_t *sem)
{
    while (sem_wait(sem) < 0 && errno == EINTR)
        continue;
}

static _Noreturn void worker_main(const struct floor *floor, uint32_t rank, pid_t coordinator)
{
    struct load load;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != coordinator ||
        load_init(&load, floor->request_size, floor->reply_size))
        _exit(1);
    struct floor_pair *pair = &floor->pairs[rank];
    for (;;) {
        sem_wait_through(&pair->request);
        load_answer(&load, floor->request, rank, floor->replies + rank * floor->reply_stride);
        sem_post(&pair->reply);
    }
}

static int floor_map(struct floor *floor)
{
    size_t pairs_size = floor->rank_count * sizeof *floor->pairs;
    floor->reply_stride = align_up(floor->reply_size);
    floor->map_size =
        pairs_size + align_up(floor->request_size) + floor->rank_count * floor->reply_stride;
    void *map =
        mmap(NULL, floor->map_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return -errno;
    floor->pairs = map;
    floor->request = (uint8_t *)map + pairs_size;
    floor->replies = floor->request + align_up(floor->request_size);
    for (uint32_t rank = 0; rank < floor->rank_count; rank++)
        if (sem_init(&floor->pairs[rank].request, 1, 0) < 0 ||
            sem_init(&floor->pairs[rank].reply, 1, 0) < 0)
            return -errno;
    return 0;
}

int floor_start(uint32_t rank_count, size_t request_size, size_t reply_size,
                struct floor **ret_floor)
{
    struct floor *floor = calloc(1, sizeof *floor);
    if (!floor)
        return -ENOMEM;
    floor->rank_count = rank_count;
    floor->request_size = request_size;
    floor->reply_size = reply_size;
    int r = floor_map(floor);
    if (r == 0) {
        floor->copies = calloc(rank_count, floor->reply_stride);
        floor->pids = calloc(rank_count, sizeof *floor->pids);
        r = floor->copies && floor->pids ? 0 : -ENOMEM;
    }
    const pid_t coordinator = getpid();
    while (r == 0 && floor->started < rank_count) {
        pid_t pid = fork();
        if (pid == 0)
            worker_main(floor, floor->started, coordinator);
        if (pid < 0)
            r = -errno;
        else
            floor->pids[floor->started++] = pid;
    }
    if (r) {
        floor_free(floor);
        return r;
    }
    *ret_floor = floor;
    return 0;
}

struct floor *floor_free(struct floor *floor)
{
    if (!floor)
        return NULL;
    for (uint32_t rank = 0; rank < floor->started; rank++) {
        kill(floor->pids[rank], SIGKILL);
        while (waitpid(floor->pids[rank], NULL, 0) < 0 && errno == EINTR)
            continue;
    }
    if (floor->pairs)
        munmap(floor->pairs, floor->map_size);
    free(floor->copies);
    free(floor->pids);
    free(floor);
    return NULL;
}

const pid_t *floor_pids(const struct floor *floor)
{
    return floor->pids;
}

int floor_round(struct floor *floor, uint8_t *request, uint64_t round)
{
    bool right = true;
    load_number(request, round);
    memcpy(floor->request, request, floor->request_size);
    for (uint32_t rank = 0; rank < floor->rank_count; rank++)
        sem_post(&floor->pairs[rank].request);
    for (uint32_t rank = 0; rank < floor->rank_count; rank++) {
        size_t offset = rank * floor->reply_stride;
        sem_wait_through(&floor->pairs[rank].reply);
        memcpy(floor->copies + offset, floor->replies + offset, floor->reply_size);
        right &= load_matches(floor->copies + offset, rank, round);
    }
    return right ? 0 : -EBADMSG;
}
