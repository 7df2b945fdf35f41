# What does not fit its frame or slot, with a worker of its own, some of which lie.
add_executable(large_payload_worker ${CMAKE_CURRENT_LIST_DIR}/large_payload_worker.c)
set_target_properties(large_payload_worker PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_link_libraries(large_payload_worker PRIVATE coxswain_testlib coxswain_warnings)

cox_multi_test(NAME large_payload TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/large_payload_test.c
    LIBS coxswain_testlib TIMEOUT 600)
add_dependencies(test_multi_large_payload large_payload_worker)
cox_sealed_test(large_payload TIER nightly TIMEOUT 600)

# The same where no process may copy fds from another: all large payloads come through the control socket.
cox_command_test(NAME multi/large_payload_by_the_socket LABEL multi TIER nightly TIMEOUT 600 PROCESSORS 2
    COMMAND ${PROJECT_BINARY_DIR}/bin/without pidfd_getfd=EPERM $<TARGET_FILE:test_multi_large_payload>)

# What agents receive, with the same worker.
cox_multi_test(NAME forward TIER nightly SOURCES ${CMAKE_CURRENT_LIST_DIR}/forward_test.c
    LIBS coxswain_testlib TIMEOUT 120)
add_dependencies(test_multi_forward large_payload_worker)
cox_sealed_test(forward TIER nightly TIMEOUT 120)
