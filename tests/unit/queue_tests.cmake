cox_unit_test(NAME queue SOURCES queue_test.c queue_fixture.c LIBS coxswain_channel)
cox_unit_test(NAME queue_set SOURCES queue_set_test.c queue_fixture.c LIBS coxswain_channel)
cox_thread_test(NAME queue_set SOURCES queue_set_test.c queue_fixture.c)
