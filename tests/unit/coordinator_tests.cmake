cox_unit_test(NAME signals TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/signals_test.c
    LIBS coxswain_commands)
cox_unit_test(NAME batcher TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/batcher_test.c
    LIBS coxswain_commands)
cox_unit_test(NAME batcher_flight TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/batcher_flight_test.c
    LIBS coxswain_commands)
# Brings its own executor, and the workers' sequence table to check every step with.
foreach(name engine_loop prompt_queue transfers)
    cox_unit_test(NAME ${name} TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c
        ${CMAKE_CURRENT_LIST_DIR}/engine_loop_fixture.c LIBS coxswain_commands coxswain_worker_lib)
endforeach()
cox_unit_test(NAME shared_weights TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/shared_weights_test.c ${CMAKE_CURRENT_LIST_DIR}/engine_loop_fixture.c
            ${CMAKE_CURRENT_LIST_DIR}/model_fixture.c
    LIBS coxswain_commands coxswain_worker_lib coxswain_model)
cox_unit_test(NAME legacy_bridge TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/legacy_bridge_test.c ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c
    LIBS coxswain_coordinator)
cox_unit_test(NAME helper_process TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/helper_process_test.c
    LIBS coxswain_testlib coxswain_coordinator)
cox_unit_test(NAME recorder TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/recorder_test.c
    LIBS coxswain_coordinator)
foreach(name latency last_errors replies rank divergence transport)
    cox_unit_test(NAME ${name} TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c
        LIBS coxswain_coordinator)
endforeach()
# Which memory of replies has huge pages.
target_link_options(test_unit_replies PRIVATE -Wl,--wrap=madvise)
# What is read of texts and files.
cox_test_program(test_texts SOURCES texts.c ${PROJECT_SOURCE_DIR}/program/stacks/flight_recorder.c
        ${PROJECT_SOURCE_DIR}/program/command/top_table.c ${PROJECT_SOURCE_DIR}/program/command/units.c
    LIBS coxswain_commands coxswain_model coxswain_worker_lib PkgConfig::JANSSON)
set_target_properties(test_texts PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
cox_command_test(NAME unit/texts LABEL unit TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/texts_test.py ${PROJECT_BINARY_DIR}/bin ${PROJECT_SOURCE_DIR})
