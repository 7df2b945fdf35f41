# Groups of the reference model that read each other's KV blocks.
cox_multi_test(NAME pull
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/pull_test.c
            ${CMAKE_CURRENT_LIST_DIR}/kv_group.c
            ${PROJECT_SOURCE_DIR}/worker/engine.c
    LIBS coxswain_testlib coxswain_transfer coxswain_model coxswain_worker_lib TIMEOUT 240)
cox_sealed_test(pull TIMEOUT 240)
