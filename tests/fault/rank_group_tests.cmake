# The rank group: killed and stopped at every step, and with its memory written over. Each rank is a forked process of the test.
foreach(part kill stop hostile sealed)
    cox_test_program(test_fault_rank_group_${part} SOURCES rank_group_${part}_test.c LIBS coxswain_testlib)
    cox_command_test(NAME fault/rank_group_${part} LABEL fault TIER all TIMEOUT 180 PROCESSORS 2
        COMMAND test_fault_rank_group_${part})
endforeach()
