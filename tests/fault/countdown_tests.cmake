# Constructors with each of their system calls failing in turn. The linker sends what the libraries call through
# countdown_wraps.c.
set(countdown_list ${CMAKE_CURRENT_LIST_DIR}/countdown_symbols.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${countdown_list})
file(STRINGS ${countdown_list} countdown_wrapped REGEX "^wrap ")
list(TRANSFORM countdown_wrapped REPLACE "^wrap " "-Wl,--wrap=")

foreach(part large_payload channel group files weights control_socket handle queue rank_group control recovery restart sealed windows pool transfer)
    cox_test_program(test_fault_countdown_${part}
        SOURCES countdown_${part}_test.c countdown.c countdown_wraps.c
                ${CMAKE_CURRENT_LIST_DIR}/../unit/model_fixture.c
        LIBS coxswain_testlib coxswain_commands coxswain_transfer coxswain_model coxswain_coordinator coxswain_worker_lib
             PkgConfig::JANSSON)
    target_link_options(test_fault_countdown_${part} PRIVATE ${countdown_wrapped})
    cox_command_test(NAME fault/countdown_${part} LABEL fault TIER all TIMEOUT 120
        COMMAND test_fault_countdown_${part})
endforeach()
target_sources(test_fault_countdown_queue PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../unit/queue_fixture.c)
add_dependencies(test_fault_countdown_group scripted_worker)
add_dependencies(test_fault_countdown_recovery scripted_worker)
add_dependencies(test_fault_countdown_sealed scripted_worker)
add_dependencies(test_fault_countdown_transfer scripted_worker)
add_dependencies(test_fault_countdown_restart scripted_worker legacy_native)

# Above the libraries, in the worker's program alone.
cox_test_program(test_fault_countdown_exchange
    SOURCES countdown_exchange_test.c countdown.c countdown_wraps.c ${PROJECT_SOURCE_DIR}/engine/rank/engine.c ${PROJECT_SOURCE_DIR}/engine/rank/adapter_commands.c
            ${PROJECT_SOURCE_DIR}/engine/rank/adapter_cache.c
    LIBS coxswain_testlib coxswain_commands coxswain_transfer coxswain_model coxswain_coordinator coxswain_worker_lib
         PkgConfig::JANSSON)
target_link_options(test_fault_countdown_exchange PRIVATE ${countdown_wrapped})
cox_command_test(NAME fault/countdown_exchange LABEL fault TIER all TIMEOUT 120
    COMMAND test_fault_countdown_exchange)

# With a stand-in for the driver.
cox_test_program(test_fault_countdown_domain
    SOURCES countdown_domain_test.c countdown.c countdown_wraps.c
    LIBS coxswain_testlib coxswain_commands coxswain_model coxswain_coordinator coxswain_worker_lib
         PkgConfig::JANSSON)
target_link_options(test_fault_countdown_domain PRIVATE ${countdown_wrapped})
add_dependencies(test_fault_countdown_domain fake_cuda)
cox_command_test(NAME fault/countdown_domain LABEL fault TIER all TIMEOUT 120
    COMMAND test_fault_countdown_domain ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/libfake_cuda.so)

cox_command_test(NAME fault/countdown_symbols LABEL fault TIER all
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/countdown_symbols.py ${CMAKE_NM} ${countdown_list}
            ${CMAKE_CURRENT_LIST_DIR}
            $<TARGET_FILE:coxswain_channel> $<TARGET_FILE:coxswain_memory> $<TARGET_FILE:coxswain_messages> $<TARGET_FILE:coxswain_proto>
            $<TARGET_FILE:coxswain_coordinator>
            $<TARGET_FILE:coxswain_worker_lib> $<TARGET_FILE:coxswain_model_files> $<TARGET_FILE:coxswain_model> $<TARGET_FILE:coxswain_transfer>
            $<TARGET_FILE:coxswain_batching> $<TARGET_FILE:coxswain_commands>)
