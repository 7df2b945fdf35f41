cox_multi_test(NAME supervise TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/supervise_start_test.c
    LIBS coxswain_coordinator TIMEOUT 120)
cox_multi_test(NAME fork_server TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/fork_server_test.c
    LIBS coxswain_coordinator coxswain_testlib TIMEOUT 120)
