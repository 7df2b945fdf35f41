# Random subsets of a group are killed at random instants: chaos.py. The text stays right under such
# kills: generate_chaos.py. A kept group serves under deaths, stops and recovery commands:
# recovery_soak.py. `sh tools/test nightly soaks` runs each of the three for some minutes.
function(cox_chaos_test name tier script)
    set(environment "")
    # AddressSanitizer keeps freed memory, up to 256 MiB of it, which would count as growth. LeakSanitizer
    # still judges each process at its end.
    if(COX_SANITIZE STREQUAL "address" AND script STREQUAL "recovery_soak.py")
        set(environment "ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:allocator_may_return_null=1:quarantine_size_mb=1:thread_local_quarantine_size_kb=16")
    endif()
    cox_command_test(NAME fault/${name} LABEL fault TIER ${tier} TIMEOUT 300 PROCESSORS 2
        ENVIRONMENT ${environment}
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/${script} ${PROJECT_BINARY_DIR}/bin
                ${PROJECT_SOURCE_DIR} ${ARGN})
endfunction()

cox_chaos_test(chaos_short all chaos.py --kills 40)
cox_chaos_test(chaos_short_sealed all chaos.py --kills 40 --attach sealed)
cox_chaos_test(chaos nightly chaos.py --kills 250)
cox_chaos_test(chaos_sealed nightly chaos.py --kills 150 --attach sealed)

cox_chaos_test(generate_chaos_short all generate_chaos.py --minutes 0.1)
cox_chaos_test(generate_chaos nightly generate_chaos.py --minutes 0.3)

cox_chaos_test(recovery_soak_short all recovery_soak.py --seconds 6 --pause 0,0.4)
cox_chaos_test(recovery_soak nightly recovery_soak.py --seconds 20 --pause 0,0.4)
cox_chaos_test(recovery_soak_sealed nightly recovery_soak.py --seconds 20 --pause 0,0.4
    --attach sealed)
