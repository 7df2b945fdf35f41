# Every target is one file. Here replay.c drives it over its corpus and seeded changes of that; the preset fuzz
# (COX_FUZZ) links it to libFuzzer as well, and runs nothing.
set(fuzz_folder ${CMAKE_CURRENT_LIST_DIR})
set(fuzz_change_count 100000)

# cox_fuzz_target(name SOURCES other files... LIBS target...)
function(cox_fuzz_target name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
    list(TRANSFORM arg_SOURCES PREPEND ${fuzz_folder}/)
    add_executable(replay_${name} ${fuzz_folder}/${name}.c ${fuzz_folder}/replay.c ${arg_SOURCES})
    target_include_directories(replay_${name} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(replay_${name} PRIVATE ${arg_LIBS} coxswain_channel coxswain_warnings)
    cox_command_test(NAME fuzz/${name} LABEL fuzz TIMEOUT 60
        COMMAND replay_${name} ${fuzz_folder}/corpus/${name} ${fuzz_change_count})
    if(COX_FUZZ)
        add_executable(fuzz_${name} ${fuzz_folder}/${name}.c ${arg_SOURCES})
        target_include_directories(fuzz_${name} PRIVATE ${PROJECT_SOURCE_DIR})
        target_link_libraries(fuzz_${name} PRIVATE ${arg_LIBS} coxswain_channel coxswain_warnings)
        target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
        add_dependencies(fuzzers fuzz_${name})
    endif()
endfunction()

if(COX_FUZZ)
    add_custom_target(fuzzers)
endif()
cox_fuzz_target(control_attach LIBS coxswain_channel)
cox_fuzz_target(request_frame SOURCES memory.c LIBS coxswain_channel)
cox_fuzz_target(reply_slot SOURCES memory.c LIBS coxswain_channel)
cox_fuzz_target(handle LIBS coxswain_channel)
cox_fuzz_target(wire_request LIBS coxswain_proto)
cox_fuzz_target(wire_response LIBS coxswain_proto)
cox_fuzz_target(step LIBS coxswain_worker_lib coxswain_proto)
cox_fuzz_target(safetensors LIBS coxswain_model)
cox_fuzz_target(config LIBS coxswain_model)
cox_fuzz_target(tokenizer LIBS coxswain_commands)
cox_fuzz_target(sizes LIBS coxswain_commands coxswain_worker_lib)

# Writes tests/fuzz/corpus anew: make_corpus tests/fuzz/corpus
add_executable(make_corpus EXCLUDE_FROM_ALL ${fuzz_folder}/make_corpus.c ${fuzz_folder}/memory.c
    ${fuzz_folder}/../unit/table_request.c)
target_include_directories(make_corpus PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(make_corpus PRIVATE coxswain_proto coxswain_channel coxswain_warnings)
