/* A libtorch_cpu.so that has a flight recorder and nothing else, for torch_recorder_test.c, and for
 * stacks_test.py, which sets what it returns by the variable FAKE_TORCH; "hold": it does not. */
#include "fake_torch.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static size_t all_size, active_size;
static _Atomic int held, freed;

/* As std::string of libstdc++. */
struct string {
    char *text;
    size_t size;
    char local[16];
};

static const char *fixed;

__attribute__((constructor)) static void begin(void)
{
    fixed = getenv("FAKE_TORCH");
    atomic_store(&held, fixed && strcmp(fixed, "hold") == 0);
}

EXPORT void fake_torch_set(size_t all, size_t active)
{
    all_size = all;
    active_size = active;
}

EXPORT void fake_torch_hold(bool hold)
{
    atomic_store(&held, hold);
}

EXPORT int fake_torch_freed(void)
{
    return atomic_load(&freed);
}

/* std::string c10d::dump_fr_trace_json(bool, bool) */
EXPORT struct string _ZN4c10d18dump_fr_trace_jsonB5cxx11Ebb(bool collectives, bool active);
EXPORT struct string _ZN4c10d18dump_fr_trace_jsonB5cxx11Ebb(bool collectives, bool active)
{
    struct string made = {.size = fixed ? strlen(fixed) : active ? active_size : all_size};
    while (atomic_load(&held))
        usleep(1000);
    made.text = malloc(made.size + 1);
    if (fixed)
        memcpy(made.text, fixed, made.size);
    else
        memset(made.text, !collectives ? '?' : active ? 'b' : 'a', made.size);
    made.text[made.size] = '\0';
    return made;
}

/* operator delete */
EXPORT void _ZdlPv(void *memory);
EXPORT void _ZdlPv(void *memory)
{
    atomic_fetch_add(&freed, 1);
    free(memory);
}
