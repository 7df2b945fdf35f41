# Doors and their visitors, killed and stopped at each of their steps.
set(multi_folder ${CMAKE_CURRENT_LIST_DIR}/../multi)
cox_test_program(test_fault_door
    SOURCES door_test.c ${multi_folder}/door_fixture.c ${CMAKE_CURRENT_LIST_DIR}/../unit/channel_fixture.c
    LIBS coxswain_channel)
cox_command_test(NAME fault/door LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND test_fault_door)
