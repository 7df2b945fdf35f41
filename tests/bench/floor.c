#include "floor.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "group.h"
#include "load.h"
#include "peers/workers.h"

#define LINE_SIZE 128

/* In shared memory, one per worker, each semaphore on lines of its own. */
struct pair {
    _Alignas(LINE_SIZE) sem_t request;
    _Alignas(LINE_SIZE) sem_t reply;
};

/* In shared memory. The pairs come behind it, then the request, then the replies. */
struct words {
    /* workers wait on it; by the coordinator */
    _Alignas(LINE_SIZE) _Atomic uint32_t round;
    /* counted down by workers */
    _Alignas(LINE_SIZE) _Atomic uint32_t unanswered;
    /* the round; by the last of them */
    _Alignas(LINE_SIZE) _Atomic uint32_t answered;
};

struct floor;

struct gate {
    void (*request_post)(struct floor *floor);
    void (*request_wait)(struct floor *floor, uint32_t rank, uint32_t round);
    void (*reply_post)(struct floor *floor, uint32_t rank, uint32_t round);
    /* Once for every rank, in order. */
    void (*reply_wait)(struct floor *floor, uint32_t rank);
};

struct floor {
    const struct gate *gate;
    struct subject_options options;
    size_t reply_stride;
    /* the whole mapping starts here */
    struct words *words;
    size_t map_size;
    struct pair *pairs;
    uint8_t *request;
    uint8_t *replies;
    /* private: the replies, copied out */
    uint8_t *copies;
    /* the coordinator's, and a worker's own count */
    uint32_t round;
    struct workers workers;
};

/* ---- semaphores ---- */

static void semaphore_request_post(struct floor *floor)
{
    for (uint32_t rank = 0; rank < floor->options.rank_count; rank++)
        sem_post(&floor->pairs[rank].request);
}

static void semaphore_request_wait(struct floor *floor, uint32_t rank, uint32_t round)
{
    (void)round;
    group_sem_wait(&floor->pairs[rank].request);
}

static void semaphore_reply_post(struct floor *floor, uint32_t rank, uint32_t round)
{
    (void)round;
    sem_post(&floor->pairs[rank].reply);
}

static void semaphore_reply_wait(struct floor *floor, uint32_t rank)
{
    group_sem_wait(&floor->pairs[rank].reply);
}

static const struct gate semaphore_gate = {semaphore_request_post, semaphore_request_wait,
                                           semaphore_reply_post, semaphore_reply_wait};

/* ---- futex words ---- */

static void word_wait(_Atomic uint32_t *word, uint32_t until)
{
    /* Pairs with the release store of word_set. */
    for (uint32_t now; (now = atomic_load_explicit(word, memory_order_acquire)) != until;)
        syscall(SYS_futex, word, FUTEX_WAIT, now, NULL, NULL, 0);
}

static void word_set(_Atomic uint32_t *word, uint32_t value, int waiters)
{
    atomic_store_explicit(word, value, memory_order_release);
    syscall(SYS_futex, word, FUTEX_WAKE, waiters, NULL, NULL, 0);
}

static void futex_request_post(struct floor *floor)
{
    /* Published with the round. */
    atomic_store_explicit(&floor->words->unanswered, floor->options.rank_count,
                          memory_order_relaxed);
    word_set(&floor->words->round, floor->round, INT_MAX);
}

static void futex_request_wait(struct floor *floor, uint32_t rank, uint32_t round)
{
    (void)rank;
    word_wait(&floor->words->round, round);
}

static void futex_reply_post(struct floor *floor, uint32_t rank, uint32_t round)
{
    (void)rank;
    /* The last one has seen the replies of all others, and hands them on. */
    if (atomic_fetch_sub_explicit(&floor->words->unanswered, 1, memory_order_acq_rel) == 1)
        word_set(&floor->words->answered, round, 1);
}

static void futex_reply_wait(struct floor *floor, uint32_t rank)
{
    if (rank == 0)
        word_wait(&floor->words->answered, floor->round);
}

static const struct gate futex_gate = {futex_request_post, futex_request_wait, futex_reply_post,
                                       futex_reply_wait};

/* ---- both ---- */

static size_t align_up(size_t size)
{
    return (size + LINE_SIZE - 1) / LINE_SIZE * LINE_SIZE;
}

static const char *worker_main(const void *context, uint32_t rank)
{
    struct floor own = *(const struct floor *)context, *floor = &own;
    struct load load;
    if (load_init(&load, floor->options.request_size, floor->options.reply_size) ||
        load_copy_init(&load))
        return "no memory";
    for (uint32_t round = 1;; round++) {
        floor->gate->request_wait(floor, rank, round);
        load_answer_copy(&load, floor->request, rank, floor->replies + rank * floor->reply_stride);
        floor->gate->reply_post(floor, rank, round);
    }
}

static int map_memory(struct floor *floor)
{
    const struct subject_options *options = &floor->options;
    const size_t words_size = align_up(sizeof *floor->words);
    const size_t pairs_size = options->rank_count * sizeof *floor->pairs;
    const size_t request_size = align_up(options->request_size);
    floor->reply_stride = align_up(options->reply_size);
    floor->map_size =
        words_size + pairs_size + request_size + options->rank_count * floor->reply_stride;
    void *map =
        mmap(NULL, floor->map_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return -errno;
    floor->words = map;
    floor->pairs = (struct pair *)(void *)((uint8_t *)map + words_size);
    floor->request = (uint8_t *)floor->pairs + pairs_size;
    floor->replies = floor->request + request_size;
    for (uint32_t rank = 0; rank < options->rank_count; rank++)
        if (sem_init(&floor->pairs[rank].request, 1, 0) < 0 ||
            sem_init(&floor->pairs[rank].reply, 1, 0) < 0)
            return -errno;
    return 0;
}

static void floor_stop(void *subject)
{
    struct floor *floor = subject;
    workers_stop(&floor->workers);
    if (floor->words)
        munmap(floor->words, floor->map_size);
    free(floor->copies);
    free(floor);
}

static int floor_start(const struct gate *gate, const struct subject_options *options,
                       void **ret_subject, struct cox_error *err)
{
    struct floor *floor = calloc(1, sizeof *floor);
    if (!floor)
        return cox_fail(err, -ENOMEM, "no memory for a floor");
    floor->gate = gate;
    floor->options = *options;
    int r = map_memory(floor);
    if (r == 0) {
        floor->copies = calloc(options->rank_count, floor->reply_stride);
        r = floor->copies ? 0 : -ENOMEM;
    }
    if (r)
        cox_fail(err, r, "starting a floor: %s", cox_status_text(r));
    else
        r = workers_start(&floor->workers, options->rank_count, worker_main, floor, err);
    workers_go(&floor->workers);
    if (r) {
        floor_stop(floor);
        return r;
    }
    *ret_subject = floor;
    return 0;
}

static int floor_round(void *subject, uint8_t *request, uint64_t round, struct cox_error *err)
{
    struct floor *floor = subject;
    const struct subject_options *options = &floor->options;
    uint32_t wrong = options->rank_count;
    floor->round++;
    memcpy(floor->request, request, options->request_size);
    floor->gate->request_post(floor);
    for (uint32_t rank = 0; rank < options->rank_count; rank++) {
        uint8_t *copy = floor->copies + rank * floor->reply_stride;
        floor->gate->reply_wait(floor, rank);
        memcpy(copy, floor->replies + rank * floor->reply_stride, options->reply_size);
        if (!load_matches(copy, rank, round))
            wrong = rank;
    }
    return wrong < options->rank_count
               ? cox_fail(err, -EBADMSG, "worker %u answered something else", wrong)
               : 0;
}

static int semaphore_start(const struct subject_options *options, void **ret_subject,
                           struct cox_error *err)
{
    return floor_start(&semaphore_gate, options, ret_subject, err);
}

static int futex_start(const struct subject_options *options, void **ret_subject,
                       struct cox_error *err)
{
    return floor_start(&futex_gate, options, ret_subject, err);
}

const struct subject_ops floor_semaphore_ops = {
    .start = semaphore_start, .round = floor_round, .stop = floor_stop};
const struct subject_ops floor_futex_ops = {
    .start = futex_start, .round = floor_round, .stop = floor_stop};
