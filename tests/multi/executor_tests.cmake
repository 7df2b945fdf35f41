# Sets `ret_tier` to quick or nightly if `name` is in that list, else to all.
function(cox_executor_tier ret_tier name)
    cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "QUICK;NIGHTLY")
    set(tier all)
    if(name IN_LIST arg_QUICK)
        set(tier quick)
    elseif(name IN_LIST arg_NIGHTLY)
        set(tier nightly)
    endif()
    set(${ret_tier} ${tier} PARENT_SCOPE)
endfunction()

# The executor with real workers; scripted_worker obeys what the requests say.
set(executor_tests attach collect completion counters executor faults flight group lateness operations pause
    replay restart session step take threads worker wrapper)
foreach(name IN LISTS executor_tests)
    cox_executor_tier(tier ${name} QUICK attach collect completion counters executor faults flight lateness
        operations replay restart session step take threads worker wrapper)
    set(sources ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c)
    if(name STREQUAL step)
        list(APPEND sources ${CMAKE_CURRENT_LIST_DIR}/chats.c)
    endif()
    cox_multi_test(NAME ${name} TIER ${tier} SOURCES ${sources} LIBS coxswain_testlib TIMEOUT 120)
    add_dependencies(test_multi_${name} scripted_worker)
endforeach()

# Not with ranks as threads: it writes into the memory of other processes.
cox_multi_test(NAME digest TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/digest_test.c ${CMAKE_CURRENT_LIST_DIR}/chats.c
    LIBS coxswain_testlib TIMEOUT 120)
add_dependencies(test_multi_digest scripted_worker)
cox_command_test(NAME sealed/digest LABEL sealed TIER all TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_multi_digest)

cox_multi_test(NAME soak TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/soak_test.c
    LIBS coxswain_testlib TIMEOUT 120 ARGS 100000)
add_dependencies(test_multi_soak scripted_worker)

# The same with ranks as threads. Left out: faults, whose ranks are killed by their own fault points, and wrapper, which
# is about processes.
foreach(name attach collect counters executor flight group lateness operations pause step take threads)
    cox_executor_tier(tier ${name} QUICK attach collect counters flight step take NIGHTLY group)
    set(sources ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c)
    if(name STREQUAL step)
        list(APPEND sources ${CMAKE_CURRENT_LIST_DIR}/chats.c)
    endif()
    cox_thread_test(NAME ${name} TIER ${tier} SOURCES ${sources} TIMEOUT 240)
endforeach()
cox_thread_test(NAME soak TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/soak_test.c
    TIMEOUT 240 ARGS 10000)

# And with sealed groups: nothing has a name, the gates are futexes.
foreach(name IN LISTS executor_tests)
    cox_executor_tier(tier ${name} QUICK attach counters executor faults flight operations restart
        step take worker NIGHTLY pause)
    cox_executor_tier(threads ${name} NIGHTLY lateness)
    cox_sealed_test(${name} TIER ${tier} THREADS ${threads} TIMEOUT 240)
endforeach()
cox_sealed_test(soak TIER all THREADS all TIMEOUT 240 ARGS 20000)

# Workers that take requests and reply to them do what those with callbacks do.
foreach(name executor flight operations replay step)
    cox_executor_tier(tier ${name} QUICK step)
    cox_command_test(NAME takes/${name} LABEL multi TIER ${tier} TIMEOUT 120 PROCESSORS 2
        ENVIRONMENT "COX_TEST_TAKES=1" COMMAND test_multi_${name})
    # What a request says is the same for every gate.
    if(name MATCHES "executor|flight")
        cox_command_test(NAME takes_sealed/${name} LABEL sealed TIER all TIMEOUT 240 PROCESSORS 2
            ENVIRONMENT "COX_TEST_TAKES=1" "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_multi_${name})
    endif()
endforeach()

# A host with an event loop. Not with ranks as threads, which inherit no eventfd.
cox_multi_test(NAME poll TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/poll_test.c
    LIBS coxswain_testlib TIMEOUT 120)
add_dependencies(test_multi_poll scripted_worker)
cox_command_test(NAME sealed/poll LABEL sealed TIER quick TIMEOUT 240 PROCESSORS 2
    ENVIRONMENT "COXSWAIN_TEST_ATTACH=sealed" COMMAND test_multi_poll)

# Control connections without a control socket.
cox_multi_test(NAME service TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/service_test.c
    LIBS coxswain_testlib coxswain_commands TIMEOUT 120)
target_link_options(test_multi_service PRIVATE -Wl,--wrap=pthread_create)
add_dependencies(test_multi_service scripted_worker)

# Ranks that are replaced by a policy.
cox_multi_test(NAME recovery TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/recovery_test.c
    LIBS coxswain_testlib coxswain_commands TIMEOUT 240)
add_dependencies(test_multi_recovery scripted_worker)
cox_sealed_test(recovery TIER nightly TIMEOUT 300)

# Several steps of the engine loop in flight, with a worker of its own.
add_executable(async_worker ${CMAKE_CURRENT_LIST_DIR}/async_worker.c)
set_target_properties(async_worker PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_link_libraries(async_worker PRIVATE coxswain_testlib coxswain_warnings)
cox_multi_test(NAME async TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/async_test.c
    LIBS coxswain_testlib coxswain_commands TIMEOUT 240)
add_dependencies(test_multi_async async_worker)

# The linker sends the timed system calls of the coordinator's threads through the test, which writes their deadlines down.
cox_multi_test(NAME deadline TIER all SOURCES ${CMAKE_CURRENT_LIST_DIR}/deadline_test.c
    LIBS coxswain_testlib TIMEOUT 120)
add_dependencies(test_multi_deadline scripted_worker)
target_link_options(test_multi_deadline PRIVATE
    -Wl,--wrap=syscall,--wrap=sem_clockwait,--wrap=pthread_cond_timedwait)
cox_sealed_test(deadline TIER all TIMEOUT 240)
