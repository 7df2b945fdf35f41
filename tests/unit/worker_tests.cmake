# Steps in both forms, what they allocate, their digests, and random ones against a model.
foreach(test table_steps table_nested table_memory table_digests table_random adapter_references)
    cox_unit_test(NAME ${test} TIER quick
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/${test}_test.c
                ${CMAKE_CURRENT_LIST_DIR}/table_fixture.c
                ${CMAKE_CURRENT_LIST_DIR}/table_model.c
                ${CMAKE_CURRENT_LIST_DIR}/table_request.c
        LIBS coxswain_worker_lib)
endforeach()
cox_unit_test(NAME pause TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/pause_test.c
    LIBS coxswain_worker_lib)
cox_unit_test(NAME weights_subscriber TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/weights_subscriber_test.c ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c
    LIBS coxswain_transfer coxswain_worker_lib)
# A fake PyTorch, which the process has loaded under that name.
if(NOT COX_SANITIZE)
    add_library(fake_torch SHARED ${CMAKE_CURRENT_LIST_DIR}/fake_torch.c)
    target_include_directories(fake_torch PRIVATE ${PROJECT_SOURCE_DIR})
    set_target_properties(fake_torch PROPERTIES OUTPUT_NAME torch_cpu
        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/fake_torch)
    cox_unit_test(NAME torch_recorder TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/torch_recorder_test.c
        LIBS coxswain_worker_lib)
    target_compile_definitions(test_unit_torch_recorder PRIVATE COX_FAKE_TORCH="$<TARGET_FILE:fake_torch>")
    add_dependencies(test_unit_torch_recorder fake_torch)
endif()
