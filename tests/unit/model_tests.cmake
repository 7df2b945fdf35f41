# Checkpoints for the tests are written by model_fixture.c.
set(model_fixture ${CMAKE_CURRENT_LIST_DIR}/model_fixture.c)
set(model_bench ${model_fixture} ${CMAKE_CURRENT_LIST_DIR}/model_bench.c)

cox_unit_test(NAME tile TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/tile_test.c
    LIBS coxswain_model m)
# The kernel for processors without AVX2, also where this one has it.
cox_unit_test(NAME tile_baseline TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/tile_test.c ${PROJECT_SOURCE_DIR}/engine/compute/tile.c
    LIBS coxswain_channel m)
target_compile_definitions(test_unit_tile_baseline PRIVATE COX_TILE_BASELINE=1)
foreach(test tile tile_baseline)
    target_compile_options(test_unit_${test} PRIVATE -ffp-contract=off) # as engine/compute
endforeach()
cox_unit_test(NAME cache TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/cache_test.c
    LIBS coxswain_model)
cox_unit_test(NAME sample TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/sample_test.c
    LIBS coxswain_model m)
cox_unit_test(NAME forward TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/forward_test.c ${model_bench}
    LIBS coxswain_model m)
# The files change between the two looks at them.
target_link_options(test_unit_forward PRIVATE -Wl,--wrap=cox_model_digest_folder)
cox_unit_test(NAME adapter TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/adapter_test.c ${model_bench}
    LIBS coxswain_model m)
cox_unit_test(NAME adapters TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/adapter_cache_test.c ${model_fixture}
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_cache.c
    LIBS coxswain_model m)
cox_unit_test(NAME model_image TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/model_image_test.c ${model_fixture}
    LIBS coxswain_model m)
