# Workers that are started by hand, killed and stopped on their way in.
cox_test_program(test_fault_by_hand SOURCES by_hand_test.c LIBS coxswain_testlib)
add_dependencies(test_fault_by_hand scripted_worker)
cox_command_test(NAME fault/by_hand LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND test_fault_by_hand)
cox_command_test(NAME fault/by_hand_sealed LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_fault_by_hand)
