#include "kinds.h"

#include <string.h>

#define OWN(...)                                                                                   \
    {                                                                                              \
        "--subject", __VA_ARGS__, NULL                                                             \
    }
#define SLOW_PYTHON(name, ...)                                                                     \
    .host = (name), .world = PYTHON_WORLD, PYTHON("--by", name, __VA_ARGS__)
#define PYTHON(...) .program = "python_subject.py", .words = {__VA_ARGS__, NULL}
/* What a step of 16 sequences has, rounded up: a request of 90 and an answer of 70 bytes. */
#define STEP_BYTES 96
/* Of a section in Python. */
#define PYTHON_WORLD 8
/* A floor beside itself shows by what the measurement varies: where that is asked, and where a
 * round is mostly wake-ups. */
#define AGAIN_BYTES_MAX 4096

static const struct kind kinds[] = {
    {.name = "semaphore", .words = OWN("semaphore")},
    {.name = "futex", .words = OWN("futex")},
    {.name = "named", .words = OWN("coxswain", "--attach", "named")},
    {.name = "named-call", .words = OWN("coxswain", "--attach", "named", "--by", "call")},
    {.name = "sealed", .words = OWN("coxswain", "--attach", "sealed")},
    {.name = "sealed-call", .words = OWN("coxswain", "--attach", "sealed", "--by", "call")},
    {.name = "sealed-collect", .words = OWN("coxswain", "--attach", "sealed", "--by", "collect")},
    {.name = "named-poll", .words = OWN("coxswain", "--attach", "named", "--by", "poll")},
    {.name = "sealed-poll", .words = OWN("coxswain", "--attach", "sealed", "--by", "poll")},
    {.name = "sealed-hand-off", .words = OWN("coxswain", "--attach", "sealed", "--by", "hand-off")},
    {.name = "ping", .words = OWN("coxswain", "--attach", "sealed", "--by", "ping")},
    {.name = "named-off", .words = OWN("coxswain", "--attach", "named", "--spin", "off")},
    {.name = "sealed-off", .words = OWN("coxswain", "--attach", "sealed", "--spin", "off")},
    {.name = "sealed-max", .words = OWN("coxswain", "--attach", "sealed", "--spin", "max")},
    {.name = "seqpacket", .program = "bench-seqpacket"},
    {.name = "zmq", .program = "bench-zmq"},
    {.name = "nng", .program = "bench-nng"},
    {.name = "iceoryx", .program = "bench-iceoryx"},
    {.name = "mpi", .program = "bench-mpi", .host = "mpi", .spins_idle = true},
    {.name = "pickle", .program = "pickle_ring.py", .spins_idle = true},
    {.name = "sealed-bytes",
     .words = OWN("coxswain", "--attach", "sealed"),
     .bytes = STEP_BYTES,
     .reply_bytes = STEP_BYTES},
    {.name = "sealed-step-16", .words = OWN("steps", "--attach", "sealed", "--sequences", "16")},
    {.name = "sealed-step-256", .words = OWN("steps", "--attach", "sealed", "--sequences", "256")},
    {.name = "sealed-step-1024",
     .words = OWN("steps", "--attach", "sealed", "--sequences", "1024")},
    {.name = "named-step-16", .words = OWN("steps", "--attach", "named", "--sequences", "16")},
    {.name = "named-step-256", .words = OWN("steps", "--attach", "named", "--sequences", "256")},
    {.name = "named-step-1024", .words = OWN("steps", "--attach", "named", "--sequences", "1024")},
    {.name = "pickle-step-256",
     .program = "pickle_ring.py",
     .words = {"--sequences", "256", NULL},
     .spins_idle = true},
    {.name = "depth-1", .words = OWN("coxswain", "--attach", "sealed", "--depth", "1")},
    {.name = "depth-2", .words = OWN("coxswain", "--attach", "sealed", "--depth", "2")},
    {.name = "depth-4", .words = OWN("coxswain", "--attach", "sealed", "--depth", "4")},
    {.name = "depth-8", .words = OWN("coxswain", "--attach", "sealed", "--depth", "8")},
    {.name = "callers-1", .words = OWN("coxswain", "--attach", "sealed", "--callers", "1")},
    {.name = "callers-2", .words = OWN("coxswain", "--attach", "sealed", "--callers", "2")},
    {.name = "callers-4", .words = OWN("coxswain", "--attach", "sealed", "--callers", "4")},
    {.name = "callers-8", .words = OWN("coxswain", "--attach", "sealed", "--callers", "8")},
    {.name = "named-collect", .words = OWN("coxswain", "--attach", "named", "--by", "collect")},
    {.name = "py-call-c", PYTHON("--by", "call", "--workers", "c")},
    {.name = "py-submit-c", PYTHON("--by", "submit", "--workers", "c")},
    {.name = "py-call", PYTHON("--by", "call")},
    {.name = "py-submit", PYTHON("--by", "submit")},
    {.name = "py-await", PYTHON("--by", "await")},
    {.name = "py-call-sealed", PYTHON("--by", "call", "--attach", "sealed")},
    {.name = "py-pipe", PYTHON("--by", "pipe")},
    {.name = "py-zmq", PYTHON("--by", "zmq")},
    {.name = "py-vllm", SLOW_PYTHON("vllm", "--what", "bytes"), .spins_idle = true},
    {.name = "py-columns-256", PYTHON("--by", "columns", "--attach", "sealed")},
    {.name = "py-small", PYTHON("--by", "small")},
    {.name = "py-method", PYTHON("--by", "method", "--what", "object")},
    {.name = "py-method-sealed",
     PYTHON("--by", "method", "--what", "object", "--attach", "sealed")},
    {.name = "py-pipe-object", PYTHON("--by", "pipe", "--what", "object")},
    {.name = "py-zmq-object", PYTHON("--by", "zmq", "--what", "object")},
    {.name = "py-mpi4py-object", SLOW_PYTHON("mpi4py", "--what", "object"), .spins_idle = true},
    {.name = "py-ray-object", SLOW_PYTHON("ray", "--what", "object")},
    {.name = "py-vllm-object", SLOW_PYTHON("vllm", "--what", "object"), .spins_idle = true},
    {.name = "py-memcpy", PYTHON("--by", "memcpy", "--what", "array")},
    {.name = "py-copies", PYTHON("--by", "copies", "--what", "array")},
    {.name = "py-array", PYTHON("--by", "method", "--what", "array")},
    {.name = "py-array-sealed", PYTHON("--by", "method", "--what", "array", "--attach", "sealed")},
    {.name = "py-pipe-array", PYTHON("--by", "pipe", "--what", "array")},
    {.name = "py-zmq-array", PYTHON("--by", "zmq", "--what", "array")},
    {.name = "py-mpi4py-array", SLOW_PYTHON("mpi4py", "--what", "array"), .spins_idle = true},
    {.name = "py-ray-array", SLOW_PYTHON("ray", "--what", "array")},
    {.name = "py-vllm-array", SLOW_PYTHON("vllm", "--what", "array"), .spins_idle = true},
    {.name = "pickle-again", .program = "pickle_ring.py", .spins_idle = true},
    {.name = "semaphore-again", .words = OWN("semaphore"), .bytes_max = AGAIN_BYTES_MAX},
    {.name = "futex-again", .words = OWN("futex"), .bytes_max = AGAIN_BYTES_MAX},
};

const char *const kinds_of_bytes[] = {
    "semaphore",      "futex",      "named",       "named-call",      "sealed",      "sealed-call",
    "sealed-collect", "named-poll", "sealed-poll", "seqpacket",       "zmq",         "nng",
    "iceoryx",        "mpi",        "pickle",      "semaphore-again", "futex-again", NULL};
const char *const kinds_of_curves[] = {"semaphore", "futex", "named", "sealed", NULL};
const char *const kinds_of_one[] = {"futex", "sealed", "sealed-off", "sealed-max", NULL};
const char *const kinds_of_loops[] = {"semaphore",       "futex",       "named", "sealed",
                                      "semaphore-again", "futex-again", NULL};
const char *const kinds_of_ring[] = {"py-call", "pickle", "pickle-again", "py-vllm", NULL};
const char *const kinds_of_copies[] = {"py-memcpy", "py-array", "py-array-sealed", "py-copies",
                                       NULL};
const char *const kinds_of_steps[] = {"sealed-bytes",     "sealed-step-16",  "sealed-step-256",
                                      "sealed-step-1024", "named-step-16",   "named-step-256",
                                      "named-step-1024",  "pickle-step-256", NULL};
const char *const kinds_of_depth[] = {"depth-1",   "depth-2",   "depth-4",   "depth-8", "callers-1",
                                      "callers-2", "callers-4", "callers-8", NULL};
const char *const kinds_of_call[] = {"sealed",          "sealed-call", "sealed-collect",
                                     "sealed-hand-off", "ping",        NULL};
const char *const kinds_of_allocations[] = {"named", "named-call", "sealed", "sealed-call", NULL};
const char *const kinds_of_python[] = {"named-collect",
                                       "sealed-collect",
                                       "py-call-c",
                                       "py-submit-c",
                                       "py-call",
                                       "py-submit",
                                       "py-await",
                                       "py-call-sealed",
                                       "py-pipe",
                                       "py-zmq",
                                       "py-vllm",
                                       "pickle",
                                       NULL};
const char *const kinds_of_objects[] = {"py-small",       "py-method",      "py-method-sealed",
                                        "py-pipe-object", "py-zmq-object",  "py-mpi4py-object",
                                        "py-ray-object",  "py-vllm-object", NULL};
const char *const kinds_of_arrays[] = {
    "py-memcpy",    "py-array",        "py-array-sealed", "py-copies",     "py-pipe-array",
    "py-zmq-array", "py-mpi4py-array", "py-ray-array",    "py-vllm-array", NULL};
const char *const kinds_of_columns[] = {"sealed-step-256", "py-columns-256", NULL};
const char *const kinds_of_rate[] = {"semaphore", "futex",  "named",       "named-call",
                                     "named-off", "sealed", "sealed-call", "sealed-off",
                                     "seqpacket", "mpi",    "pickle",      NULL};
const char *const kinds_of_idle[] = {"named", "sealed", NULL};
const char *const peers_that_sleep[] = {"seqpacket", "iceoryx", "zmq", "nng", NULL};
const char *const peers_that_spin[] = {"mpi", "pickle", NULL};

const struct kind *kind_find(const char *name)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kinds[i].name, name) == 0)
            return &kinds[i];
    return NULL;
}
