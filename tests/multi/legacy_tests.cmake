# Our executor with workers that know no control region: tests/legacy/legacy_worker.py, and with a mix of both kinds.
cox_multi_test(NAME legacy TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/legacy_test.c ${CMAKE_CURRENT_LIST_DIR}/legacy_group.c
    LIBS coxswain_testlib TIMEOUT 180)
add_dependencies(test_multi_legacy legacy_native)
