# The linker sends what is reserved through the test, which lets only little be so.
cox_unit_test(NAME domain TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/domain_test.c ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c
            ${CMAKE_CURRENT_LIST_DIR}/../lib/inverted_domain.c
    LIBS coxswain_memory)
target_link_options(test_unit_domain PRIVATE -Wl,--wrap=posix_fallocate -Wl,--wrap=fcntl)
