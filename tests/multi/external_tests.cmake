# Workers that only the test starts, at the control sockets of named and sealed groups; what ranks of a sealed group have.
cox_multi_test(NAME external TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/external_test.c
    ${CMAKE_CURRENT_LIST_DIR}/hand.c LIBS coxswain_testlib TIMEOUT 180)
add_dependencies(test_multi_external scripted_worker)
