cox_unit_test(NAME queue TIER quick SOURCES queue_test.c queue_fixture.c pool_fixture.c
    LIBS coxswain_memory)
cox_unit_test(NAME queue_set TIER quick SOURCES queue_set_test.c queue_fixture.c
    LIBS coxswain_memory)
cox_thread_test(NAME queue_set TIER all SOURCES queue_set_test.c queue_fixture.c)
