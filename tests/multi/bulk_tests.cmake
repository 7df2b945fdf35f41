# What does not fit its frame or slot, with a worker of its own, some of which lie.
add_executable(bulk_worker ${CMAKE_CURRENT_LIST_DIR}/bulk_worker.c)
set_target_properties(bulk_worker PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_link_libraries(bulk_worker PRIVATE coxswain_testlib coxswain_warnings)

cox_multi_test(NAME bulk TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/bulk_test.c
    LIBS coxswain_testlib TIMEOUT 600)
add_dependencies(test_multi_bulk bulk_worker without)
cox_sealed_test(bulk TIER nightly TIMEOUT 600)

# The same where nobody may take fds out of anybody: all blocks come by the door.
cox_command_test(NAME multi/bulk_by_the_door LABEL multi TIER nightly TIMEOUT 600 PROCESSORS 2
    COMMAND without pidfd_getfd=EPERM $<TARGET_FILE:test_multi_bulk>)
cox_command_test(NAME sealed/bulk_by_the_door LABEL sealed TIER all TIMEOUT 600 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed"
    COMMAND without pidfd_getfd=EPERM $<TARGET_FILE:test_multi_bulk>)
