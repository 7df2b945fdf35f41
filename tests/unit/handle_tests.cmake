cox_unit_test(NAME handle TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/handle_test.c ${CMAKE_CURRENT_LIST_DIR}/handle_fixture.c
            ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c
    LIBS coxswain_proto coxswain_channel)
cox_user_test(unit handle TIER quick)
