# Workers started by hand, and replacements, by hand and of whole groups, struck at their steps.
cox_test_program(test_fault_replace SOURCES replace_test.c ${CMAKE_CURRENT_LIST_DIR}/../multi/hand.c LIBS coxswain_testlib)
add_dependencies(test_fault_replace scripted_worker legacy_native)
cox_command_test(NAME fault/replace LABEL fault TIER all TIMEOUT 300 PROCESSORS 2
    COMMAND test_fault_replace)
cox_command_test(NAME fault/replace_sealed LABEL fault TIER all TIMEOUT 300 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_fault_replace)
