#include "unwind.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined __x86_64__
#define REGISTER_COUNT 17
#define SP_REGISTER 7
#define PC_REGISTER 16
#else
#define REGISTER_COUNT 32
#define SP_REGISTER 31
#endif

/* DWARF_CB_ABORT and DWARF_CB_OK. */
#define ABORT 1
#define CONTINUE 0

static pid_t next_thread(struct Dwfl *dwfl, void *context, void **thread_context)
{
    (void)dwfl;
    (void)context;
    (void)thread_context;
    return 0;
}

static bool get_thread(struct Dwfl *dwfl, pid_t tid, void *context, void **thread_context)
{
    struct cox_unwind *unwind = context;
    (void)dwfl;
    *thread_context = unwind;
    return unwind->thread && unwind->thread->tid == tid;
}

/* Of the copied stack alone: what the process has there by now is of another moment. */
static bool memory_read(struct Dwfl *dwfl, uint64_t address, uint64_t *ret_word, void *context)
{
    const struct cox_unwind *unwind = context;
    const struct cox_stack_thread *thread = unwind->thread;
    (void)dwfl;
    if (address < thread->sp || address - thread->sp > thread->size ||
        thread->size - (address - thread->sp) < sizeof *ret_word)
        return false;
    memcpy(ret_word, unwind->copy->pool + thread->at + (address - thread->sp), sizeof *ret_word);
    return true;
}

static bool set_initial_registers(struct Dwfl_Thread *dwfl_thread, void *context)
{
    const struct cox_unwind *unwind = context;
    const struct cox_stack_thread *thread = unwind->thread;
#ifndef PC_REGISTER
    unwind->libdw.set_pc(dwfl_thread, thread->pc);
#endif
    if (thread->known == 2)
        return unwind->libdw.set_registers(dwfl_thread, 0, REGISTER_COUNT, thread->registers);
#ifdef PC_REGISTER
    if (!unwind->libdw.set_registers(dwfl_thread, PC_REGISTER, 1, &thread->pc))
        return false;
#endif
    return unwind->libdw.set_registers(dwfl_thread, SP_REGISTER, 1, &thread->sp);
}

static const char *base_name(const char *path)
{
    const char *slash = path ? strrchr(path, '/') : NULL;
    return slash ? slash + 1 : path ? path : "";
}

static void copy_name(char *to, size_t size, const char *name)
{
    snprintf(to, size, "%s", name);
    for (char *c = to; *c; c++)
        if ((unsigned char)*c < ' ' || (unsigned char)*c >= 0x7f)
            *c = '?';
}

static void function_name(const struct cox_unwind *unwind, struct cox_unwind_frame *frame,
                          const char *symbol)
{
    int status = -1;
    char *plain = unwind->libdw.demangle && symbol[0] == '_' && symbol[1] == 'Z'
                      ? unwind->libdw.demangle(symbol, NULL, NULL, &status)
                      : NULL;
    copy_name(frame->function, sizeof frame->function, plain && status == 0 ? plain : symbol);
    free(plain);
}

static bool object_of_system(const char *object)
{
    return strncmp(object, "libc.so", 7) == 0 || strncmp(object, "libc-", 5) == 0 ||
           strncmp(object, "libpthread", 10) == 0 || strncmp(object, "ld-linux", 8) == 0 ||
           strncmp(object, "[vdso", 5) == 0;
}

static void frame_describe(const struct cox_unwind *unwind, uint64_t pc, bool activation,
                           struct cox_unwind_frame *frame)
{
    const struct cox_libdw *libdw = &unwind->libdw;
    *frame = (struct cox_unwind_frame){.offset = pc};
    /* The call is before the address to return to, which may be another function's. */
    const uint64_t at = activation ? pc : pc - 1;
    struct Dwfl_Module *module = libdw->module_of(unwind->dwfl, at);
    if (!module)
        return;
    uint64_t start = 0, offset;
    struct cox_libdw_symbol symbol;
    const char *main_file = NULL;
    const char *name = libdw->module_info(module, NULL, &start, NULL, NULL, NULL, &main_file, NULL);
    copy_name(frame->object, sizeof frame->object, base_name(main_file ? main_file : name));
    frame->offset = pc - start;
    frame->of_system = object_of_system(frame->object);
    const char *function = libdw->symbol_of(module, at, &offset, &symbol, NULL, NULL, NULL);
    if (function)
        function_name(unwind, frame, function);
    struct Dwfl_Line *line = libdw->source_of(module, at);
    const char *file = line ? libdw->line_info(line, NULL, &frame->line, NULL, NULL, NULL) : NULL;
    if (file)
        copy_name(frame->file, sizeof frame->file, base_name(file));
}

static int on_frame(struct Dwfl_Frame *dwfl_frame, void *context)
{
    struct cox_unwind *unwind = context;
    uint64_t pc;
    bool activation;
    if (!unwind->libdw.frame_pc(dwfl_frame, &pc, &activation) || !pc)
        return ABORT;
    if (unwind->frame_count == COX_UNWIND_FRAME_MAX) {
        unwind->cut = true;
        return ABORT;
    }
    frame_describe(unwind, pc, activation, &unwind->frames[unwind->frame_count++]);
    return CONTINUE;
}

int cox_unwind_open(struct cox_unwind *unwind, pid_t pid, const struct cox_stack_copy *copy,
                    struct cox_error *err)
{
    static char *debuginfo_path;
    static struct cox_libdw_callbacks callbacks;
    static const struct cox_libdw_thread_callbacks threads = {
        .next_thread = next_thread,
        .get_thread = get_thread,
        .memory_read = memory_read,
        .set_initial_registers = set_initial_registers,
    };
    *unwind = (struct cox_unwind){.copy = copy};
    /* Nothing is fetched from other machines. */
    unsetenv("DEBUGINFOD_URLS");
    int r = cox_libdw_open(&unwind->libdw, err);
    if (r)
        return r;
    const struct cox_libdw *libdw = &unwind->libdw;
    callbacks = (struct cox_libdw_callbacks){.find_elf = libdw->proc_find_elf,
                                             .find_debuginfo = libdw->standard_find_debuginfo,
                                             .debuginfo_path = &debuginfo_path};
    unwind->dwfl = libdw->begin(&callbacks);
    if (!unwind->dwfl)
        return cox_fail(err, -ENOMEM, "libdw: %s", libdw->error_text(-1));
    r = libdw->proc_report(unwind->dwfl, pid);
    if (r == 0 && libdw->report_end(unwind->dwfl, NULL, NULL) != 0)
        r = -1;
    if (r == 0 && !libdw->attach_state(unwind->dwfl, NULL, pid, &threads, unwind))
        r = -1;
    if (r)
        cox_fail(err, r > 0 ? -r : COX_CORRUPT, "no native frames: %s",
                 r > 0 ? strerror(r) : libdw->error_text(-1));
    if (r)
        cox_unwind_close(unwind);
    return r > 0 ? -r : r ? COX_CORRUPT : 0;
}

void cox_unwind_close(struct cox_unwind *unwind)
{
    if (unwind->dwfl)
        unwind->libdw.end(unwind->dwfl);
    unwind->dwfl = NULL;
}

uint32_t cox_unwind_thread(struct cox_unwind *unwind, const struct cox_stack_thread *thread,
                           struct cox_unwind_frame *frames)
{
    unwind->thread = thread;
    unwind->frames = frames;
    unwind->frame_count = 0;
    unwind->cut = false;
    if (!thread->known)
        return 0;
    const int r = unwind->libdw.thread_frames(unwind->dwfl, thread->tid, on_frame, unwind);
    unwind->cut |= r < 0;
    /* Where no unwinding information leads further, the frame itself is known all the same. */
    if (!unwind->frame_count)
        frame_describe(unwind, thread->pc, true, &frames[unwind->frame_count++]);
    return unwind->frame_count;
}
