# A process, or a rank, that writes what it can reach. The program is its own worker and its own meddler.
cox_test_program(test_fault_hostile SOURCES hostile_test.c meddler.c checked_worker.c LIBS coxswain_testlib)
cox_command_test(NAME fault/hostile LABEL fault TIMEOUT 120 PROCESSORS 2 COMMAND test_fault_hostile)
# A rank of a sealed group, which reaches its own memory and the hints.
cox_test_program(test_fault_hostile_sealed SOURCES hostile_sealed_test.c LIBS coxswain_testlib)
cox_command_test(NAME fault/hostile_sealed LABEL fault TIMEOUT 120 PROCESSORS 2 COMMAND test_fault_hostile_sealed)
if(COX_TESTING)
    cox_command_test(NAME fault/hostile_sealed_looking LABEL fault TIMEOUT 120 PROCESSORS 2
        ENVIRONMENT "COXSWAIN_TEST_CPUS=1000" COMMAND test_fault_hostile_sealed)
endif()
# The same of the rank group: its words and values, and the hints.
cox_test_program(test_fault_hostile_group SOURCES hostile_group_test.c LIBS coxswain_testlib)
cox_command_test(NAME fault/hostile_group LABEL fault TIMEOUT 240 PROCESSORS 2 COMMAND test_fault_hostile_group)
