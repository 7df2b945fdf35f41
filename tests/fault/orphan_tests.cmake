# The coordinator is killed. The program is the coordinator, too.
cox_test_program(test_fault_orphan SOURCES orphan_test.c LIBS coxswain_testlib)
add_dependencies(test_fault_orphan scripted_worker)
cox_command_test(NAME fault/orphan LABEL fault TIER all TIMEOUT 180 PROCESSORS 2
    COMMAND test_fault_orphan)
cox_command_test(NAME fault/orphan_sealed LABEL fault TIER all TIMEOUT 180 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_fault_orphan)
