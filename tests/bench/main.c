#include "coxswain.h"
#include "floor.h"
#include "group.h"
#include "steps.h"

#include <stdio.h>
#include <string.h>

/* coxswain-bench SUBJECT ...: one of the subjects that are no peers. argv keeps its first word as the program's name. */
static int own_subject_main(int argc, char **argv)
{
    if (strcmp(argv[0], "semaphore") == 0)
        return subject_main(argc, argv, &floor_semaphore_ops);
    if (strcmp(argv[0], "futex") == 0)
        return subject_main(argc, argv, &floor_futex_ops);
    if (strcmp(argv[0], "coxswain") == 0)
        return coxswain_subject_main(argc, argv);
    if (strcmp(argv[0], "steps") == 0)
        return steps_subject_main(argc, argv);
    return 2;
}

static int worker_main(int argc, char **argv)
{
    return argc > 2 && strcmp(argv[2], STEPS_WORDS) == 0 ? steps_worker_main(argc, argv)
                                                         : coxswain_worker_main(argc, argv);
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv);
    if (argc > 2 && strcmp(argv[1], "--subject") == 0)
        return own_subject_main(argc - 2, argv + 2);
    return 0;
}
