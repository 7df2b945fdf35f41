# The model computed by several processes together, without a coordinator.
cox_multi_test(NAME tensor TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/tensor_test.c
            ${CMAKE_CURRENT_LIST_DIR}/crew.c
            ${CMAKE_CURRENT_LIST_DIR}/../unit/model_fixture.c
    LIBS coxswain_transfer coxswain_model coxswain_worker_lib m TIMEOUT 120)

# The callbacks of the reference worker; what they use of worker.c and serve_init.c is played by the test.
cox_multi_test(NAME engine TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/engine_test.c
            ${CMAKE_CURRENT_LIST_DIR}/crew.c
            ${PROJECT_SOURCE_DIR}/engine/rank/engine.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_commands.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_cache.c
    LIBS coxswain_transfer coxswain_model coxswain_worker_lib TIMEOUT 120)

# A coordinator and ranks of the reference model, of which some are replaced.
cox_multi_test(NAME replace TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/replace_test.c
            ${PROJECT_SOURCE_DIR}/engine/rank/engine.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_commands.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_cache.c
    LIBS coxswain_testlib coxswain_transfer coxswain_model coxswain_worker_lib TIMEOUT 240)
cox_sealed_test(replace TIER all TIMEOUT 240)

# LoRA adapters in such a group.
cox_multi_test(NAME lora TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/lora_test.c
            ${CMAKE_CURRENT_LIST_DIR}/../unit/model_fixture.c
            ${PROJECT_SOURCE_DIR}/engine/rank/engine.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_commands.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_cache.c
    LIBS coxswain_testlib coxswain_commands coxswain_transfer coxswain_model coxswain_worker_lib TIMEOUT 120)

# Other weights while such a group computes.
cox_multi_test(NAME switch TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/switch_test.c
            ${CMAKE_CURRENT_LIST_DIR}/weights_attack.c
            ${CMAKE_CURRENT_LIST_DIR}/../unit/model_fixture.c
            ${PROJECT_SOURCE_DIR}/engine/rank/engine.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_commands.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_cache.c
    LIBS coxswain_testlib coxswain_commands coxswain_transfer coxswain_model coxswain_worker_lib TIMEOUT 120)
