# Ranks get other processes: by hand, one by one and all together; legacy groups.
cox_multi_test(NAME replace_by_hand TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/replace_by_hand_test.c ${CMAKE_CURRENT_LIST_DIR}/hand.c
    LIBS coxswain_testlib TIMEOUT 180)
add_dependencies(test_multi_replace_by_hand scripted_worker)

cox_multi_test(NAME restart_all TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/restart_all_test.c
    LIBS coxswain_testlib TIMEOUT 120)
add_dependencies(test_multi_restart_all scripted_worker)
cox_sealed_test(restart_all TIER all TIMEOUT 240)

cox_multi_test(NAME legacy_restart TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/legacy_restart_test.c
    ${CMAKE_CURRENT_LIST_DIR}/legacy_group.c LIBS coxswain_testlib TIMEOUT 180)
add_dependencies(test_multi_legacy_restart legacy_native)
