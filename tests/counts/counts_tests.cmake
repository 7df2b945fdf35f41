# The sources that a round goes through once more as they are released: without fault points, and with the optimization that the
# record was made with. The rest comes from the libraries of this build.
if(NOT COX_SANITIZE AND NOT COX_FUZZ)
    set(hot_sources
        channel/base/base.c channel/shm/geometry.c channel/base/semaphore.c channel/attach/named/semaphore_gate.c channel/attach/sealed/futex_gate.c channel/shm/request.c channel/shm/reply.c
        proto/wire.c proto/step_wire.c proto/operation.c
        worker/loop/worker.c worker/loop/take.c worker/loop/take_reply.c worker/loop/lending.c worker/loop/serve_init.c worker/loop/serve.c worker/loop/reply_message.c worker/loop/out_of_line.c worker/loop/pause.c worker/sequences/table.c worker/sequences/sequence_store.c worker/sequences/column_parser.c
        worker/sequences/batch_builder.c worker/sequences/step_digest.c
        coordinator/executor/submit.c coordinator/collector/collector.c coordinator/collector/complete.c coordinator/collector/pass.c coordinator/collector/late.c coordinator/collector/replies.c coordinator/collector/request_buffers.c coordinator/collector/stats.c
        coordinator/collector/report.c coordinator/process/supervise.c coordinator/process/child.c coordinator/executor/core.c coordinator/executor/engine_gate.c)
    list(TRANSFORM hot_sources PREPEND ${PROJECT_SOURCE_DIR}/)
    add_executable(counts_hot_path ${CMAKE_CURRENT_LIST_DIR}/hot_path.c ${hot_sources})
    target_compile_options(counts_hot_path PRIVATE -UCOX_TESTING -O2 -g)
    target_link_libraries(counts_hot_path PRIVATE
        coxswain_coordinator coxswain_worker_lib coxswain_proto coxswain_channel coxswain_warnings)
    string(REGEX MATCH "^[0-9]+" compiler_major ${CMAKE_C_COMPILER_VERSION})
    set(hot_path_command ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/hot_path.py $<TARGET_FILE:counts_hot_path>
        ${CMAKE_C_COMPILER_ID}-${compiler_major} ${CMAKE_CURRENT_LIST_DIR}/hot_path.json)
    cox_command_test(NAME counts/hot_path LABEL counts TIER quick TIMEOUT 120 PROCESSORS 2
        COMMAND ${hot_path_command})
    cox_command_test(NAME counts/recorder LABEL counts TIER nightly TIMEOUT 300 PROCESSORS 2
        COMMAND ${hot_path_command} --recorder)
    cox_command_test(NAME counts/system_calls LABEL counts TIER quick TIMEOUT 120 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/system_calls.py $<TARGET_FILE:counts_hot_path>)
    add_custom_target(counts_renew COMMAND ${hot_path_command} --renew VERBATIM)
    add_dependencies(counts_renew counts_hot_path)
endif()
