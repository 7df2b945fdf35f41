# Control sockets and their clients, killed and stopped at each of their steps.
set(multi_folder ${CMAKE_CURRENT_LIST_DIR}/../multi)
cox_test_program(test_fault_control_socket
    SOURCES control_socket_test.c ${multi_folder}/control_socket_fixture.c ${CMAKE_CURRENT_LIST_DIR}/../unit/channel_fixture.c
    LIBS coxswain_channel)
cox_command_test(NAME fault/control_socket LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND test_fault_control_socket)
