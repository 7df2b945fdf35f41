/*
 * stack_protocol: how a rank gives its coordinator's helper what another process cannot see of its
 * stacks: the frames of an interpreter, where the kernel denies ptrace copies of its threads'
 * stacks, and the dump of PyTorch's flight recorder.
 *
 *   coordinator  makes a socket that listens, abstract and with a name that the kernel chooses, and
 *                starts the helper with it as COX_STACK_LISTEN_FD
 *   helper       stores that name in the rank's doorbell, adds 1 to rings (release), and wakes
 *   rank         connects; unless the kernel says that its coordinator listens there (SO_PEERCRED),
 *                it closes the connection, and has neither read nor written anything
 *   helper       takes the connection if the kernel says that it comes from the rank, and sends
 *                requests, one after the other: a struct cox_stack_request
 *   rank         replies to each: a struct cox_stack_reply, text_size bytes, thread_count threads,
 *                pool_size bytes
 *
 * The doorbell is a memfd of the rank, COX_STACK_DOORBELL_NAME, which the helper finds in
 * /proc/PID/fd. Each process of the user can write into it: then the rank connects in vain. What
 * the rank says and whom it lets in depends on the kernel's word alone: the connection's other end
 * was made by the coordinator, and the sender of a request (SCM_CREDENTIALS) got it from there.
 *
 * If the rank dies: the connection ends. If the helper dies: the same, and the rank takes back its
 * consent.
 */
#ifndef COX_CHANNEL_STACK_PROTOCOL_H
#define COX_CHANNEL_STACK_PROTOCOL_H

#include <stdatomic.h>
#include <stdint.h>

#define COX_STACK_DOORBELL_NAME "coxswain-stacks"
#define COX_STACK_THREAD_NAME "cox-stacks"
#define COX_STACK_LISTEN_FD 3
#define COX_STACK_MAGIC UINT64_C(0x324b4341545358c0)

/* What is kept of a rank: bytes of an interpreter's frames, and of a whole report. */
#define COX_STACK_TEXT_MAX (UINT32_C(256) << 10)
/* Threads of which frames are shown; of the others only the number. */
#define COX_STACK_THREAD_MAX 256
/* Bytes of stack per thread that the rank itself copies. */
#define COX_STACK_COPY_MAX (UINT32_C(16) << 10)
#define COX_STACK_POOL_SIZE (UINT32_C(1) << 20)
/* Bytes of a dump of PyTorch's flight recorder, and how long a rank waits for it. */
#define COX_STACK_TORCH_MAX (UINT32_C(4) << 20)
#define COX_STACK_TORCH_MS 300

struct cox_stack_doorbell {
    _Atomic uint32_t rings;
    /* of the abstract socket, without its first byte, which is 0 */
    char name[60];
};

enum cox_stack_wanted {
    /* the frames of the interpreter */
    COX_STACK_FRAMES = 1,
    /* the sender may trace the rank as long as the connection lasts (Yama) */
    COX_STACK_CONSENT = 2,
    /* copies of the stacks of all other threads */
    COX_STACK_COPIES = 4,
    /* the dump of PyTorch's flight recorder, and nothing else; not while the rank is traced, since
     * it takes locks */
    COX_STACK_TORCH = 8,
};

/* What a rank has of that. */
enum cox_stack_torch {
    /* no such recorder, or it has recorded nothing */
    COX_STACK_TORCH_NONE,
    COX_STACK_TORCH_THERE,
    /* it did not return within COX_STACK_TORCH_MS: a thread that hangs may hold its lock */
    COX_STACK_TORCH_SILENT,
    COX_STACK_TORCH_TOO_LARGE,
};

struct cox_stack_request {
    /* COX_STACK_MAGIC: no other service of the coordinator sends it */
    uint64_t magic;
    uint32_t flags;
    uint32_t reserved;
};

struct cox_stack_reply {
    uint32_t text_size;
    uint32_t thread_count;
    uint32_t pool_size;
    /* enum cox_stack_torch: of a request for it, whose text_size bytes of text are the dump */
    uint32_t torch;
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

#endif
