# A queue: processes killed at its steps, and its memory written over. Each process is a fork of the test.
foreach(part kill hostile)
    cox_test_program(test_fault_queue_${part} SOURCES queue_${part}_test.c ../unit/queue_fixture.c LIBS coxswain_memory)
    cox_command_test(NAME fault/queue_${part} LABEL fault TIER all TIMEOUT 180 PROCESSORS 2
        COMMAND test_fault_queue_${part})
endforeach()
