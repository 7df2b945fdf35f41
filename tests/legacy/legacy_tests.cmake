# A worker on our library with the replies of legacy_worker.py; beside the commands, where tests look for programs.
add_executable(legacy_native ${CMAKE_CURRENT_LIST_DIR}/native_worker.c)
set_target_properties(legacy_native PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_include_directories(legacy_native PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(legacy_native PRIVATE coxswain_worker_lib coxswain_proto coxswain_channel coxswain_warnings)

cox_command_test(NAME legacy/selftest LABEL legacy TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/legacy_selftest.py)
cox_command_test(NAME legacy/native LABEL legacy TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/native_test.py $<TARGET_FILE:legacy_native>
            $<TARGET_FILE:coxswain-worker>)
