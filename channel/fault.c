#include "fault.h"

#if COX_TESTING

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static _Atomic int fault_rank = -1;
static _Atomic int fault_passages;

void cox_fault_rank(int rank)
{
    atomic_store(&fault_rank, rank);
}

void cox_fault_point(const char *name)
{
    const char *plan = getenv("COXSWAIN_FAULT");
    size_t length = strlen(name);
    if (!plan || strncmp(plan, name, length) != 0 || plan[length] != ':')
        return;
    const char *action = plan + length + 1;
    int sig = strncmp(action, "kill", 4) == 0   ? SIGKILL
              : strncmp(action, "stop", 4) == 0 ? SIGSTOP
                                                : 0;
    const char *rank = strchr(action, ':');
    const char *count = rank ? strchr(rank + 1, ':') : NULL;
    int wanted = rank && strncmp(rank + 1, "coordinator", 11) != 0 ? atoi(rank + 1) : -1;
    if (sig == 0 || wanted != atomic_load(&fault_rank))
        return;
    /* To this thread: a stop of the process may find another one first, while this one goes on. */
    if (atomic_fetch_add(&fault_passages, 1) + 1 == (count ? atoi(count + 1) : 1))
        raise(sig);
}

#else

/* An empty translation unit is not ISO C. */
typedef int cox_fault_unused;

#endif
