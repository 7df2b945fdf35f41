# The response thread stands still between two steps.
cox_test_program(test_fault_gather_race SOURCES gather_race_test.c LIBS coxswain_testlib)
add_dependencies(test_fault_gather_race scripted_worker)
cox_command_test(NAME fault/gather_race LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND test_fault_gather_race)
cox_command_test(NAME fault/gather_race_sealed LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_fault_gather_race)
