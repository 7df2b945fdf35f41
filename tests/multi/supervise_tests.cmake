cox_multi_test(NAME supervise TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/supervise_test.c
    LIBS coxswain_coordinator TIMEOUT 120)
