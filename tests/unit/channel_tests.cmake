set(channel_fixture ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c)

foreach(module base named semaphore region geometry spin gate control request reply peer copy fd_bundle socket hello fd_entries sealed)
    cox_unit_test(NAME ${module} TIER quick
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/${module}_test.c ${channel_fixture}
        LIBS coxswain_channel)
endforeach()
cox_unit_test(NAME sized_options TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/sized_options_test.c
    LIBS coxswain_memory coxswain_coordinator coxswain_worker_lib)
# The linker sends the gate's system calls through the test, which counts them.
cox_unit_test(NAME gate_futex TIER quick TIMEOUT 120
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/gate_futex_test.c ${channel_fixture}
    LIBS coxswain_channel)
target_link_options(test_unit_gate_futex PRIVATE -Wl,--wrap=syscall)
# Threads that cannot be made, or begin late.
cox_unit_test(NAME closer TIER quick
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/closer_test.c ${channel_fixture}
    LIBS coxswain_channel)
target_link_options(test_unit_closer PRIVATE -Wl,--wrap=pthread_create)

cox_unit_test(NAME lazy_copy TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/lazy_copy_test.c
    LIBS coxswain_channel)
# As before Linux 5.14.
target_link_options(test_unit_lazy_copy PRIVATE -Wl,--wrap=madvise)

cox_unit_test(NAME payload_memory TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/payload_memory_test.c
    LIBS coxswain_testlib)

cox_unit_test(NAME large_payload TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/large_payload_test.c
    LIBS coxswain_testlib TIMEOUT 60)
