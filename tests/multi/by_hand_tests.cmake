# Workers that only the test starts, and that misbehave.
cox_multi_test(NAME by_hand TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/by_hand_test.c
    ${CMAKE_CURRENT_LIST_DIR}/hand.c LIBS coxswain_testlib TIMEOUT 120)
add_dependencies(test_multi_by_hand scripted_worker)
