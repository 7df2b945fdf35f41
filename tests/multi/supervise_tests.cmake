# How ranks start, what they write, how they end, and a core that is written meanwhile.
foreach(part start output death core)
    cox_multi_test(NAME supervise_${part} TIER all
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/supervise_${part}_test.c
                ${CMAKE_CURRENT_LIST_DIR}/supervise_fixture.c
        LIBS coxswain_coordinator TIMEOUT 120)
endforeach()
cox_multi_test(NAME fork_server TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/fork_server_test.c
    LIBS coxswain_coordinator coxswain_testlib TIMEOUT 120)
