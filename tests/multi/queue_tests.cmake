foreach(name queue queue_stress)
    cox_multi_test(NAME ${name} TIER all SOURCES ${name}_test.c ../unit/queue_fixture.c
        LIBS coxswain_testlib TIMEOUT 120)
    cox_thread_test(NAME ${name} TIER all SOURCES ${name}_test.c ../unit/queue_fixture.c
        TIMEOUT 120)
endforeach()
