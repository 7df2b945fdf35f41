#include "torch_recorder.h"

#include "channel/base/futex.h"
#include "channel/base/thread.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define FREE_MS 100

/* std::string of libstdc++, as the functions return it: in memory that the caller provides, in C as
 * in C++. Shorter ones than local are in it, and point to where they were made. */
struct cxx_string {
    char *text;
    size_t size;
    char local[16];
};

typedef struct cxx_string (*dump_fn)(bool include_collectives, bool only_active);

struct cox_torch_recorder {
    pthread_t thread;
    /* How often somebody has asked, and the thread has replied; the thread sleeps on the first one,
     * and who asks on the other. */
    _Atomic uint32_t calls, replied;
    _Atomic bool stopping;
    /* of the last reply */
    enum cox_stack_torch status;
    uint32_t size;
    char *text;
};

/* Returns false: it has no room. */
static bool append(struct cox_torch_recorder *recorder, const char *bytes, size_t size)
{
    if (size >= COX_STACK_TORCH_MAX - recorder->size)
        return false;
    char *text = realloc(recorder->text, recorder->size + size + 1);
    if (!text)
        return false;
    memcpy(text + recorder->size, bytes, size);
    text[recorder->size + size] = '\n';
    recorder->text = text;
    recorder->size += (uint32_t)size + 1;
    return true;
}

/* Where it is too much, those that have not completed alone. */
static void library_dump(struct cox_torch_recorder *recorder, void *library, dump_fn dump)
{
    void (*release)(void *memory) = NULL; /* operator delete */
    *(void **)(void *)&release = dlsym(RTLD_DEFAULT, "_ZdlPv");
    if (!release)
        *(void **)(void *)&release = dlsym(library, "_ZdlPv");
    for (int only_active = 0; only_active <= 1; only_active++) {
        const struct cxx_string made = dump(true, only_active);
        const bool apart = made.size >= sizeof made.local;
        const bool taken = apart && append(recorder, made.text, made.size);
        if (apart && release)
            release(made.text);
        if (taken || !apart) {
            recorder->status = taken ? COX_STACK_TORCH_THERE : recorder->status;
            return;
        }
    }
    recorder->status = COX_STACK_TORCH_TOO_LARGE;
}

static void libraries_dump(struct cox_torch_recorder *recorder)
{
    static const struct {
        const char *library, *symbol;
    } dumps[] = {
        {"libtorch_cuda.so", "_ZN4c10d20dump_nccl_trace_jsonB5cxx11Ebb"},
        {"libtorch_cpu.so", "_ZN4c10d18dump_fr_trace_jsonB5cxx11Ebb"},
    };
    recorder->size = 0;
    recorder->status = COX_STACK_TORCH_NONE;
    for (size_t i = 0; i < sizeof dumps / sizeof dumps[0]; i++) {
        dump_fn dump = NULL;
        void *library = dlopen(dumps[i].library, RTLD_LAZY | RTLD_NOLOAD);
        if (!library)
            continue;
        *(void **)(void *)&dump = dlsym(library, dumps[i].symbol);
        if (dump)
            library_dump(recorder, library, dump);
        dlclose(library);
    }
}

static void *recorder_main(void *argument)
{
    struct cox_torch_recorder *recorder = argument;
    pthread_setname_np(pthread_self(), "cox-torch");
    for (;;) {
        /* acquire: with the release in dump and free, below. */
        const uint32_t calls = atomic_load_explicit(&recorder->calls, memory_order_acquire);
        if (atomic_load_explicit(&recorder->stopping, memory_order_acquire))
            return NULL;
        if (calls == atomic_load_explicit(&recorder->replied, memory_order_relaxed)) {
            cox_futex_wait(&recorder->calls, calls, COX_DEADLINE_NEVER);
            continue;
        }
        libraries_dump(recorder);
        /* release: text and size; partner: the acquire in replied_to. */
        atomic_store_explicit(&recorder->replied, calls, memory_order_release);
        cox_futex_wake(&recorder->replied);
    }
}

/* Waits until the thread sleeps. Returns false: it does not until the deadline. */
static bool replied_to(struct cox_torch_recorder *recorder, uint64_t deadline_ns)
{
    for (;;) {
        /* acquire: with the release in recorder_main. */
        const uint32_t replied = atomic_load_explicit(&recorder->replied, memory_order_acquire);
        /* relaxed: the calling thread alone stores it. */
        if (replied == atomic_load_explicit(&recorder->calls, memory_order_relaxed))
            return true;
        if (cox_now_ns() >= deadline_ns)
            return false;
        cox_futex_wait(&recorder->replied, replied, deadline_ns);
    }
}

static void ask(struct cox_torch_recorder *recorder)
{
    /* release: with the thread's load. */
    atomic_fetch_add_explicit(&recorder->calls, 1, memory_order_release);
    cox_futex_wake(&recorder->calls);
}

enum cox_stack_torch cox_torch_recorder_dump(struct cox_torch_recorder *recorder,
                                             uint64_t deadline_ns, const char **ret_text,
                                             uint32_t *ret_size)
{
    if (!recorder)
        return COX_STACK_TORCH_NONE;
    if (!replied_to(recorder, 0))
        return COX_STACK_TORCH_SILENT; /* it is where it was when somebody asked before */
    ask(recorder);
    if (!replied_to(recorder, deadline_ns))
        return COX_STACK_TORCH_SILENT;
    if (recorder->status == COX_STACK_TORCH_THERE) {
        *ret_text = recorder->text;
        *ret_size = recorder->size;
    }
    return recorder->status;
}

static bool is_set(const char *name)
{
    const char *value = getenv(name);
    return value && strtol(value, NULL, 10) > 0;
}

struct cox_torch_recorder *cox_torch_recorder_new(void)
{
    if (!is_set("TORCH_FR_BUFFER_SIZE") && !is_set("TORCH_NCCL_TRACE_BUFFER_SIZE"))
        return NULL;
    struct cox_torch_recorder *recorder = calloc(1, sizeof *recorder);
    if (recorder && cox_thread_start(&recorder->thread, recorder_main, recorder)) {
        free(recorder);
        return NULL;
    }
    return recorder;
}

struct cox_torch_recorder *cox_torch_recorder_free(struct cox_torch_recorder *recorder)
{
    if (!recorder)
        return NULL;
    if (!replied_to(recorder, cox_deadline_after_ms(FREE_MS))) {
        pthread_detach(recorder->thread); /* it is in a call that does not return */
        return NULL;
    }
    /* release: with the thread's load. */
    atomic_store_explicit(&recorder->stopping, true, memory_order_release);
    ask(recorder);
    pthread_join(recorder->thread, NULL);
    free(recorder->text);
    free(recorder);
    return NULL;
}
