cox_multi_test(NAME allocation TIER all SOURCES allocation_test.c
    LIBS coxswain_coordinator coxswain_worker_lib coxswain_proto coxswain_channel)
