/*
 * stack_area: where a rank writes what another process cannot see of its stacks: the frames of an
 * interpreter, and, where the kernel denies ptrace, copies of its threads' stacks.
 *
 * The area is a memfd of the rank, COX_STACK_AREA_NAME, whose size is sealed. A reader of the same
 * user finds it in /proc/PID/fd: no number is passed on, and a rank of any release either has one
 * or has none. A thread of the rank sleeps on `wanted` until a reader asks.
 *
 *   reader   stores tracer and flags, then wanted + 1 (release), and wakes
 *   rank     does what the flags say, stores the sizes, then written = wanted (release), and wakes
 *
 * One reader at a time: it holds a lock (flock) on the file, which ends with it.
 *
 * Processes: one rank, readers of the same user. Readers take the bytes for untrusted input, copy
 *   each number once, and check the copy.
 * If the rank dies: the memory lives as long as a reader maps it, and is never written again.
 * If a reader dies: the lock is released, and the next reader asks for another number.
 */
#ifndef COX_CHANNEL_STACK_AREA_H
#define COX_CHANNEL_STACK_AREA_H

#include <stdatomic.h>
#include <stdint.h>

#define COX_STACK_AREA_NAME "coxswain-stacks"
#define COX_STACK_AREA_MAGIC UINT64_C(0x314b4341545358c0)

/* What is kept of a rank: bytes of an interpreter's frames, and of a whole report. */
#define COX_STACK_TEXT_MAX (UINT32_C(256) << 10)
/* Threads of which frames are shown; of the others only the number. */
#define COX_STACK_THREAD_MAX 256
/* Bytes of stack per thread that the rank itself copies. */
#define COX_STACK_COPY_MAX (UINT32_C(16) << 10)
#define COX_STACK_POOL_SIZE (UINT32_C(1) << 20)

enum cox_stack_wanted {
    /* the frames of the interpreter */
    COX_STACK_FRAMES = 1,
    /* the process `tracer` may trace this one, until the next request (Yama) */
    COX_STACK_CONSENT = 2,
    /* copies of the stacks of all other threads */
    COX_STACK_COPIES = 4,
};

/* General registers in the order of DWARF; the last one used is the program counter. */
#define COX_STACK_REGISTER_MAX 34

/* A thread at one moment. */
struct cox_stack_thread {
    int32_t tid;
    /* of registers: 0: none, 1: the program counter and the stack pointer, 2: all */
    uint32_t known;
    uint64_t pc, sp;
    uint64_t registers[COX_STACK_REGISTER_MAX];
    /* the thread's own address, as an interpreter calls it; 0: unknown */
    uint64_t self;
    /* where in the pool the bytes from sp on are */
    uint32_t at, size;
};

struct cox_stack_area {
    uint64_t magic;
    /* readers' */
    _Atomic uint32_t wanted;
    int32_t tracer;
    uint32_t flags;
    /* the rank's */
    _Atomic uint32_t written;
    /* the thread that writes: a tracer lets it run */
    int32_t tid;
    /* of text, without a zero */
    uint32_t text_size;
    uint32_t thread_count;
    uint32_t pool_used;
    struct cox_stack_thread threads[COX_STACK_THREAD_MAX];
    char text[COX_STACK_TEXT_MAX];
    uint8_t pool[COX_STACK_POOL_SIZE];
};

#endif
