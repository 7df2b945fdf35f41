# A queue: processes killed at its steps, and its memory written over. Each process is a fork of the test.
cox_test_program(test_fault_queue_kill SOURCES queue_kill_test.c ../unit/queue_fixture.c LIBS coxswain_channel)
cox_command_test(NAME fault/queue_kill LABEL fault TIMEOUT 180 PROCESSORS 2 COMMAND test_fault_queue_kill)
