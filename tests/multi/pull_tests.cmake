# Groups of the reference model that read each other's KV blocks.
cox_multi_test(NAME pull TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/pull_test.c
            ${CMAKE_CURRENT_LIST_DIR}/kv_group.c
            ${PROJECT_SOURCE_DIR}/engine/rank/engine.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_commands.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_cache.c
    LIBS coxswain_testlib coxswain_transfer coxswain_model coxswain_worker_lib TIMEOUT 240)

# Processes alone, without groups.
cox_multi_test(NAME pull_stress TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/pull_stress_test.c
    LIBS coxswain_testlib coxswain_transfer TIMEOUT 120)
