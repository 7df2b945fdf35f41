#include "cuda_driver.h"

#include <assert.h>
#include <dlfcn.h>
#include <string.h>

/* As the driver has them. */
static_assert(sizeof(struct cox_cuda_properties) == 24 + sizeof(void *), "CUmemAllocationProp");
static_assert(offsetof(struct cox_cuda_properties, location) == 8, "CUmemAllocationProp");
static_assert(sizeof(struct cox_cuda_access) == 12, "CUmemAccessDesc");

static int driver_find(struct cox_cuda_driver *driver, void *ret_function, const char *symbol,
                       struct cox_error *err)
{
    void *found = dlsym(driver->library, symbol);
    if (!found)
        return cox_fail(err, COX_UNSUPPORTED,
                        "the CUDA driver has no %s: version 11.4 or later is needed", symbol);
    memcpy(ret_function, &found, sizeof found); /* ISO C converts no object pointer to a function */
    return 0;
}

int cox_cuda_driver_open(struct cox_cuda_driver *driver, const char *library, struct cox_error *err)
{
    struct cox_cuda_driver opened = {0};
    /* It stays, though it is closed: unloading the code of running threads would end the process.
     */
    opened.library = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!opened.library) {
        const char *why = dlerror();
        return cox_fail(err, COX_UNSUPPORTED, "no CUDA driver: %s", why ? why : library);
    }
    int r = 0;
#define FIND(field, symbol, parameters)                                                            \
    if (r == 0)                                                                                    \
        r = driver_find(&opened, &opened.field, symbol, err);
    COX_CUDA_FUNCTIONS(FIND)
#undef FIND
    if (r == 0) {
        cox_cuda_result result = opened.init(0);
        if (result != COX_CUDA_SUCCESS)
            r = cox_cuda_fail(&opened, result, COX_UNSUPPORTED, "starting the CUDA driver", err);
    }
    if (r)
        cox_cuda_driver_close(&opened);
    else
        *driver = opened;
    return r;
}

void cox_cuda_driver_close(struct cox_cuda_driver *driver)
{
    if (driver->library)
        dlclose(driver->library);
    driver->library = NULL;
}

int cox_cuda_fail(const struct cox_cuda_driver *driver, cox_cuda_result result, int code,
                  const char *what, struct cox_error *err)
{
    const char *name = NULL, *text = NULL;
    if (driver->error_name(result, &name) != COX_CUDA_SUCCESS || !name)
        name = "an error without a name";
    if (driver->error_string(result, &text) != COX_CUDA_SUCCESS || !text)
        text = "unknown";
    if (result == COX_CUDA_OUT_OF_MEMORY)
        code = COX_NO_SPACE;
    else if (result == COX_CUDA_NOT_PERMITTED)
        code = COX_DENIED;
    else if (result == COX_CUDA_NOT_SUPPORTED && code == -EIO)
        code = COX_UNSUPPORTED;
    return cox_fail(err, code, "%s: %s (%d): %s", what, name, result, text);
}
