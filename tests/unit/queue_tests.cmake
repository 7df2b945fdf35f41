cox_unit_test(NAME queue SOURCES queue_test.c queue_fixture.c LIBS coxswain_channel)
