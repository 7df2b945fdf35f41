cox_multi_test(NAME domain
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/domain_test.c ${CMAKE_CURRENT_LIST_DIR}/../unit/channel_fixture.c
            ${CMAKE_CURRENT_LIST_DIR}/../lib/inverted_domain.c
    LIBS coxswain_channel)
