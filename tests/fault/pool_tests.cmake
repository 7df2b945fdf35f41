# Pools of blocks: a process killed at every step. Each is a forked process of the test.
cox_test_program(test_fault_pool_kill
    SOURCES pool_kill_test.c ${CMAKE_CURRENT_LIST_DIR}/../unit/pool_fixture.c LIBS coxswain_testlib)
cox_command_test(NAME fault/pool_kill LABEL fault TIMEOUT 180 COMMAND test_fault_pool_kill)
