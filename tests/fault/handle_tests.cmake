# By-value handles whose exporter or importer is killed, or stopped, at each of their steps.
set(unit_folder ${CMAKE_CURRENT_LIST_DIR}/../unit)
set(multi_folder ${CMAKE_CURRENT_LIST_DIR}/../multi)
cox_test_program(test_fault_handle
    SOURCES handle_test.c ${multi_folder}/handle_peer.c ${multi_folder}/control_socket_fixture.c ${unit_folder}/handle_fixture.c
        ${unit_folder}/channel_fixture.c
    LIBS coxswain_channel)
cox_command_test(NAME fault/handle LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND test_fault_handle)
cox_user_test(fault handle TIER all)
