/*
 * libdw: the functions of elfutils' libdwfl that unwind needs, found at run time: neither the
 * library nor the program needs elfutils to build or to start.
 *
 * The types are those of elfutils/libdwfl.h, which is stable: 0.158 (2014) and later.
 *
 * Threads: one. Blocks: on the file system.
 * Ownership: the library stays open.
 */
#ifndef COX_PROGRAM_LIBDW_H
#define COX_PROGRAM_LIBDW_H

#include <coxswain/base.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct Dwfl;
struct Dwfl_Module;
struct Dwfl_Thread;
struct Dwfl_Frame;
struct Dwfl_Line;

struct cox_libdw_callbacks { /* Dwfl_Callbacks */
    void *find_elf;
    void *find_debuginfo;
    void *section_address;
    char **debuginfo_path;
};

struct cox_libdw_thread_callbacks { /* Dwfl_Thread_Callbacks */
    pid_t (*next_thread)(struct Dwfl *dwfl, void *context, void **thread_context);
    bool (*get_thread)(struct Dwfl *dwfl, pid_t tid, void *context, void **thread_context);
    bool (*memory_read)(struct Dwfl *dwfl, uint64_t address, uint64_t *ret_word, void *context);
    bool (*set_initial_registers)(struct Dwfl_Thread *thread, void *thread_context);
    void (*detach)(struct Dwfl *dwfl, void *context);
    void (*thread_detach)(struct Dwfl_Thread *thread, void *thread_context);
};

struct cox_libdw_symbol { /* GElf_Sym */
    uint32_t name;
    unsigned char info, other;
    uint16_t section;
    uint64_t value, size;
};

struct cox_libdw {
    struct Dwfl *(*begin)(const struct cox_libdw_callbacks *callbacks);
    void (*end)(struct Dwfl *dwfl);
    int (*proc_report)(struct Dwfl *dwfl, pid_t pid);
    int (*report_end)(struct Dwfl *dwfl, void *removed, void *context);
    bool (*attach_state)(struct Dwfl *dwfl, void *elf, pid_t pid,
                         const struct cox_libdw_thread_callbacks *callbacks, void *context);
    int (*thread_frames)(struct Dwfl *dwfl, pid_t tid,
                         int (*frame)(struct Dwfl_Frame *frame, void *context), void *context);
    bool (*frame_pc)(struct Dwfl_Frame *frame, uint64_t *ret_pc, bool *ret_activation);
    bool (*set_registers)(struct Dwfl_Thread *thread, int first, unsigned count,
                          const uint64_t *values);
    void (*set_pc)(struct Dwfl_Thread *thread, uint64_t pc);
    struct Dwfl_Module *(*module_of)(struct Dwfl *dwfl, uint64_t address);
    const char *(*module_info)(struct Dwfl_Module *module, void ***user, uint64_t *start,
                               uint64_t *end, uint64_t *dw_bias, uint64_t *symbol_bias,
                               const char **main_file, const char **debug_file);
    const char *(*symbol_of)(struct Dwfl_Module *module, uint64_t address, uint64_t *ret_offset,
                             struct cox_libdw_symbol *ret_symbol, void *section, void *elf,
                             void *bias);
    struct Dwfl_Line *(*source_of)(struct Dwfl_Module *module, uint64_t address);
    const char *(*line_info)(struct Dwfl_Line *line, uint64_t *address, int *ret_line, int *column,
                             void *time, void *length);
    int (*error)(void);
    const char *(*error_text)(int error);
    void *proc_find_elf, *standard_find_debuginfo;
    /* of the C++ library, if it is there: readable names; NULL */
    char *(*demangle)(const char *name, char *buffer, size_t *size, int *status);
};

/* Returns 0; COX_UNSUPPORTED: the library is not installed, err names the package. */
int cox_libdw_open(struct cox_libdw *ret_libdw, struct cox_error *err);

#endif
