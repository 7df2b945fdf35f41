# The executor with real workers; scripted_worker obeys what the requests say.
foreach(name attach completion counters executor faults flight group lateness operations pause replay restart session step threads worker wrapper)
    cox_multi_test(NAME ${name} SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c
        LIBS coxswain_testlib TIMEOUT 120)
    add_dependencies(test_multi_${name} scripted_worker)
endforeach()

cox_multi_test(NAME soak SOURCES ${CMAKE_CURRENT_LIST_DIR}/soak_test.c
    LIBS coxswain_testlib TIMEOUT 120 ARGS 100000)
add_dependencies(test_multi_soak scripted_worker)

# The same with ranks as threads. Left out: faults, whose ranks are killed by their own fault points, and wrapper, which
# is about processes.
foreach(name attach counters executor flight group lateness operations pause step threads)
    cox_thread_test(NAME ${name} SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c TIMEOUT 240)
endforeach()
cox_thread_test(NAME soak SOURCES ${CMAKE_CURRENT_LIST_DIR}/soak_test.c TIMEOUT 240 ARGS 10000)

# And with sealed groups: nothing has a name, the gates are futexes.
foreach(name attach completion counters executor faults flight group lateness operations pause replay restart session step threads worker wrapper)
    cox_sealed_test(${name} TIMEOUT 240 LOOKING)
endforeach()
cox_sealed_test(soak TIMEOUT 240 ARGS 20000 LOOKING)

# Control connections without a door.
cox_multi_test(NAME service SOURCES ${CMAKE_CURRENT_LIST_DIR}/service_test.c
    LIBS coxswain_testlib coxswain_commands TIMEOUT 120)
add_dependencies(test_multi_service scripted_worker)
cox_sealed_test(service TIMEOUT 240)

# Ranks that are replaced by a policy.
cox_multi_test(NAME recovery SOURCES ${CMAKE_CURRENT_LIST_DIR}/recovery_test.c
    LIBS coxswain_testlib coxswain_commands TIMEOUT 240)
add_dependencies(test_multi_recovery scripted_worker)
cox_sealed_test(recovery TIMEOUT 300)

# Several steps of the scheduler in flight, with a worker of its own.
add_executable(async_worker ${CMAKE_CURRENT_LIST_DIR}/async_worker.c)
set_target_properties(async_worker PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_link_libraries(async_worker PRIVATE coxswain_testlib coxswain_warnings)
cox_multi_test(NAME async SOURCES ${CMAKE_CURRENT_LIST_DIR}/async_test.c
    LIBS coxswain_testlib coxswain_commands TIMEOUT 240)
add_dependencies(test_multi_async async_worker)
cox_sealed_test(async TIMEOUT 300)

# The linker sends the timed system calls of the coordinator's threads through the test, which writes their deadlines down.
cox_multi_test(NAME deadline SOURCES ${CMAKE_CURRENT_LIST_DIR}/deadline_test.c
    LIBS coxswain_testlib TIMEOUT 120)
add_dependencies(test_multi_deadline scripted_worker)
target_link_options(test_multi_deadline PRIVATE
    -Wl,--wrap=syscall,--wrap=sem_clockwait,--wrap=pthread_cond_timedwait)
cox_sealed_test(deadline TIMEOUT 240 LOOKING)
