/* The main of programs that have none of their own. */
#include "test.h"

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    if (test_begin)
        test_begin();
    return test_run(NULL, NULL);
}
