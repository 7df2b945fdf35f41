# The rank group (include/coxswain/group.h), each rank a forked process of the test.
foreach(name rank_group rank_group_join rank_group_ends rank_fds)
    cox_multi_test(NAME ${name} TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c
        LIBS coxswain_testlib TIMEOUT 180)
endforeach()
# The same with ranks as threads.
cox_thread_test(NAME rank_group TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/rank_group_test.c
    TIMEOUT 240)
