# Checkpoints for the tests are written by model_fixture.c.
set(model_fixture ${CMAKE_CURRENT_LIST_DIR}/model_fixture.c)

cox_unit_test(NAME tile SOURCES ${CMAKE_CURRENT_LIST_DIR}/tile_test.c LIBS coxswain_model m)
cox_unit_test(NAME cache SOURCES ${CMAKE_CURRENT_LIST_DIR}/cache_test.c LIBS coxswain_model)
cox_unit_test(NAME sample SOURCES ${CMAKE_CURRENT_LIST_DIR}/sample_test.c LIBS coxswain_model m)
cox_unit_test(NAME safetensors
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/safetensors_test.c ${model_fixture}
    LIBS coxswain_model m)
cox_unit_test(NAME config
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/config_test.c ${model_fixture}
    LIBS coxswain_model)
cox_unit_test(NAME forward
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/forward_test.c ${model_fixture}
    LIBS coxswain_model m)
# The files change between the two looks at them.
target_link_options(test_unit_forward PRIVATE -Wl,--wrap=cox_model_digest_folder)
cox_unit_test(NAME adapter
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/adapter_test.c ${model_fixture}
    LIBS coxswain_model m)
cox_unit_test(NAME adapters
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/adapters_test.c ${model_fixture}
            ${PROJECT_SOURCE_DIR}/engine/rank/adapters.c
    LIBS coxswain_model m)
cox_unit_test(NAME block
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/block_test.c ${model_fixture}
    LIBS coxswain_model m)
