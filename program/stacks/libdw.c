#include "libdw.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#define LIBRARY "libdw.so.1"

int cox_libdw_open(struct cox_libdw *ret_libdw, struct cox_error *err)
{
    static const struct {
        const char *name;
        size_t offset;
    } functions[] = {
        {"dwfl_begin", offsetof(struct cox_libdw, begin)},
        {"dwfl_end", offsetof(struct cox_libdw, end)},
        {"dwfl_linux_proc_report", offsetof(struct cox_libdw, proc_report)},
        {"dwfl_report_end", offsetof(struct cox_libdw, report_end)},
        {"dwfl_attach_state", offsetof(struct cox_libdw, attach_state)},
        {"dwfl_getthread_frames", offsetof(struct cox_libdw, thread_frames)},
        {"dwfl_frame_pc", offsetof(struct cox_libdw, frame_pc)},
        {"dwfl_thread_state_registers", offsetof(struct cox_libdw, set_registers)},
        {"dwfl_thread_state_register_pc", offsetof(struct cox_libdw, set_pc)},
        {"dwfl_addrmodule", offsetof(struct cox_libdw, module_of)},
        {"dwfl_module_info", offsetof(struct cox_libdw, module_info)},
        {"dwfl_module_addrinfo", offsetof(struct cox_libdw, symbol_of)},
        {"dwfl_module_getsrc", offsetof(struct cox_libdw, source_of)},
        {"dwfl_lineinfo", offsetof(struct cox_libdw, line_info)},
        {"dwfl_errno", offsetof(struct cox_libdw, error)},
        {"dwfl_errmsg", offsetof(struct cox_libdw, error_text)},
        {"dwfl_linux_proc_find_elf", offsetof(struct cox_libdw, proc_find_elf)},
        {"dwfl_standard_find_debuginfo", offsetof(struct cox_libdw, standard_find_debuginfo)},
    };
    memset(ret_libdw, 0, sizeof *ret_libdw);
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return cox_fail(err, COX_UNSUPPORTED, "native frames need " LIBRARY " (Debian: libdw1): %s",
                        dlerror());
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *symbol = dlsym(library, functions[i].name);
        if (!symbol)
            return cox_fail(err, COX_UNSUPPORTED,
                            "native frames need " LIBRARY
                            " of elfutils 0.158 or later: it has no %s",
                            functions[i].name);
        memcpy((char *)ret_libdw + functions[i].offset, &symbol, sizeof symbol);
    }
    void *cxx = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_LOCAL);
    void *demangle = cxx ? dlsym(cxx, "__cxa_demangle") : NULL;
    memcpy(&ret_libdw->demangle, &demangle, sizeof demangle);
    return 0;
}
