# Every step of the protocol x every process, killed and stopped there.
cox_test_program(test_fault_matrix SOURCES matrix_test.c matrix_judge.c matrix_points.c matrix_renew.c matrix_run.c matrix_driver.c LIBS coxswain_testlib)
add_dependencies(test_fault_matrix scripted_worker)
cox_command_test(NAME fault/matrix LABEL fault TIER all TIMEOUT 450 PROCESSORS 2
    COMMAND test_fault_matrix)
cox_command_test(NAME fault/matrix_sealed LABEL fault TIER all TIMEOUT 450 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_fault_matrix)
