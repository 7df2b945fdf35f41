cox_multi_test(NAME supervise SOURCES ${CMAKE_CURRENT_LIST_DIR}/supervise_test.c
    LIBS coxswain_coordinator TIMEOUT 120)
