#include "command.h"

#include "channel/shm/geometry.h"

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>
#include <sys/utsname.h>

void cox_version_print(void)
{
#if defined(__clang__)
    const char *compiler = "clang " __clang_version__;
#else
    const char *compiler = "gcc " __VERSION__;
#endif
#if COX_TESTING
    const char *testing = "testing: fault points are compiled in\n";
#else
    const char *testing = "";
#endif
    struct utsname system;
    printf("coxswain %s\n", cox_version());
    printf("built by %s, with protobuf-c %s and jansson %s\n", compiler, protobuf_c_version(),
           JANSSON_VERSION);
    if (uname(&system) == 0)
        printf("on %s %s, %s\n", system.sysname, system.release, system.machine);
    printf("features: named and sealed groups, large payloads, shared weights, LoRA, prefill\n"
           "and decode, recovery, legacy workers\n"
           "limits: %d ranks, depth %d, names of %d bytes\n%s",
           COX_RANK_COUNT_MAX, COX_DEPTH_MAX, COX_NAME_SIZE_MAX, testing);
}
