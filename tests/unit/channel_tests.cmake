set(channel_fixture ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c)

foreach(module base semaphore region geometry gate control request reply peer inherit socket logon deposits sealed)
    cox_unit_test(NAME ${module}
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/${module}_test.c ${channel_fixture}
        LIBS coxswain_channel)
endforeach()
cox_unit_test(NAME options
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/options_test.c ${channel_fixture}
    LIBS coxswain_worker_lib)
