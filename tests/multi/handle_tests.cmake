set(handle_sources ${CMAKE_CURRENT_LIST_DIR}/handle_peer.c ${CMAKE_CURRENT_LIST_DIR}/../unit/handle_fixture.c
    ${CMAKE_CURRENT_LIST_DIR}/../unit/channel_fixture.c)

cox_multi_test(NAME handle TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/handle_test.c ${handle_sources}
    LIBS coxswain_channel TIMEOUT 120)
cox_multi_test(NAME handle_socket TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/handle_socket_test.c ${handle_sources}
    LIBS coxswain_channel TIMEOUT 120)
cox_user_test(multi handle TIER all)
cox_user_test(multi handle_socket TIER all)
