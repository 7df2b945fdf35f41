# Pools of blocks: a process killed, or stopped, at every step. Each is a forked process of the test.
foreach(part kill race)
    cox_test_program(test_fault_pool_${part}
        SOURCES pool_${part}_test.c ${CMAKE_CURRENT_LIST_DIR}/../unit/pool_fixture.c LIBS coxswain_testlib)
    cox_command_test(NAME fault/pool_${part} LABEL fault TIER all TIMEOUT 180
        COMMAND test_fault_pool_${part})
endforeach()
