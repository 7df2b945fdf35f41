# Pools of blocks between processes (include/coxswain/memory/pool.h), each a forked process of the test; and as threads.
foreach(name pool pool_stress)
    set(sources ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c ${CMAKE_CURRENT_LIST_DIR}/../unit/pool_fixture.c)
    cox_multi_test(NAME ${name} TIER all SOURCES ${sources} LIBS coxswain_testlib TIMEOUT 120)
    cox_thread_test(NAME ${name} TIER all SOURCES ${sources} TIMEOUT 240)
endforeach()
