cox_multi_test(NAME queue SOURCES queue_test.c ../unit/queue_fixture.c LIBS coxswain_testlib TIMEOUT 120)
cox_thread_test(NAME queue SOURCES queue_test.c ../unit/queue_fixture.c TIMEOUT 120)
