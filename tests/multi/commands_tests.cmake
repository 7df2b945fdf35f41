# examples/worker.c and execute.c as a newcomer builds them, beside the commands, where tests look for programs.
foreach(example worker execute)
    add_executable(example_${example} ${PROJECT_SOURCE_DIR}/examples/${example}.c)
    set_target_properties(example_${example} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
    target_include_directories(example_${example} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
    target_link_libraries(example_${example} PRIVATE coxswain_worker_lib coxswain_proto coxswain_channel coxswain_warnings)
endforeach()

# examples/server.c, a coordinator of a user's own, and the commands on it.
add_executable(example_server ${PROJECT_SOURCE_DIR}/examples/server.c)
set_target_properties(example_server PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_include_directories(example_server PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
target_link_libraries(example_server PRIVATE coxswain_coordinator coxswain_proto coxswain_channel coxswain_warnings)
cox_command_test(NAME multi/prometheus LABEL multi TIER nightly TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/prometheus_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/trace LABEL multi TIER nightly TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/trace_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/probes LABEL multi TIER nightly TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/probes_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/metrics LABEL multi TIER quick TIMEOUT 120 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/metrics_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/scrapes LABEL multi TIER nightly TIMEOUT 600 PROCESSORS 2
    ENVIRONMENT "COX_SCRAPE_SECONDS=180"
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/metrics_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR} test_m18_a_scrape_every_10_ms test_m18_connections_that_say_nothing_are_closed)
# On terminals of tmux, and with 128 ranks: too long for all.
cox_command_test(NAME multi/top LABEL multi TIER nightly TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/top_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/server LABEL multi TIER quick TIMEOUT 120 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/server_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})

# Runs a command as on an older kernel or under a seccomp profile.
configure_file(${CMAKE_CURRENT_LIST_DIR}/without.py ${PROJECT_BINARY_DIR}/bin/without COPYONLY)

# What the README shows first.
foreach(attach named sealed)
    set(label multi)
    if(attach STREQUAL "sealed")
        set(label sealed)
    endif()
    cox_command_test(NAME ${label}/demo LABEL ${label} TIER quick PROCESSORS 2
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/demo_test.sh $<TARGET_FILE:coxswain>
                ${PROJECT_SOURCE_DIR} ${attach})
endforeach()

# The commands: what they print, a group that is kept, wrong input, and what clean and doctor find.
foreach(part generate run wrong_input doctor)
    cox_command_test(NAME multi/commands_${part} LABEL multi TIER all TIMEOUT 300 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/commands_${part}_test.py ${PROJECT_BINARY_DIR}/bin
                ${PROJECT_SOURCE_DIR})
    if(part MATCHES "run|doctor")
        cox_command_test(NAME sealed/commands_${part} LABEL sealed TIER nightly TIMEOUT 300 PROCESSORS 2
            ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed"
            COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/commands_${part}_test.py ${PROJECT_BINARY_DIR}/bin
                    ${PROJECT_SOURCE_DIR})
    endif()
endforeach()
# A running group: status, the clients it has at once, and how it ends.
foreach(part status clients end)
    cox_command_test(NAME multi/control_${part} LABEL multi TIER all TIMEOUT 300 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/control_${part}_test.py ${PROJECT_BINARY_DIR}/bin
                ${PROJECT_SOURCE_DIR})
    if(part MATCHES "status|end")
        cox_command_test(NAME sealed/control_${part} LABEL sealed TIER nightly TIMEOUT 300 PROCESSORS 2
            ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed"
            COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/control_${part}_test.py ${PROJECT_BINARY_DIR}/bin
                    ${PROJECT_SOURCE_DIR})
    endif()
endforeach()
# As a service: what a service manager is told, the log; and what shells complete.
cox_command_test(NAME multi/as_service LABEL multi TIER all TIMEOUT 120
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/as_service_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/first_hour LABEL multi TIER all TIMEOUT 300
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/first_hour_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
# The runtime directory goes away; a rank is frozen.
cox_command_test(NAME multi/surroundings LABEL multi TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/surroundings_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
# A coordinator is killed, and another one takes over its name.
cox_command_test(NAME multi/takeover LABEL multi TIER all TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/takeover_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
# A second signal while a group ends or starts.
cox_command_test(NAME multi/signals LABEL multi TIER all TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/signals_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/recover LABEL multi TIER all TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/recover_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/lora_command LABEL multi TIER all TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/lora_command_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
cox_command_test(NAME multi/weights LABEL multi TIER all TIMEOUT 600 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/weights_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
# Prefill and decode.
cox_command_test(NAME multi/split LABEL multi TIER nightly TIMEOUT 600 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/split_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
