# That it runs, every reply is right, and no process dies; times are not judged.
if(COX_BUILD_BENCH)
    cox_command_test(NAME bench/smoke LABEL bench TIER all TIMEOUT 180 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/smoke.py $<TARGET_FILE:coxswain-bench>)
    cox_command_test(NAME bench/brief LABEL bench TIER nightly TIMEOUT 240 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/smoke.py $<TARGET_FILE:coxswain-bench> brief)
    cox_command_test(NAME bench/ranks_smoke LABEL bench TIER all TIMEOUT 60 PROCESSORS 2
        COMMAND $<TARGET_FILE:coxswain-ranks> --ranks 2,4 --rounds 20 --slices 1 --json ranks_smoke.json)
    cox_command_test(NAME bench/deaths_smoke LABEL bench TIER all TIMEOUT 60 PROCESSORS 2
        COMMAND $<TARGET_FILE:coxswain-deaths> --kills 8 --coordinators 2 --sizes 0,4 --json deaths_smoke.json)
    cox_command_test(NAME bench/deadlines_smoke LABEL bench TIER all TIMEOUT 60 PROCESSORS 2
        COMMAND $<TARGET_FILE:coxswain-deadlines> --ranks 2 --samples 8 --turns 1 --json deadlines_smoke.json)
    cox_command_test(NAME bench/replace_smoke LABEL bench TIER all TIMEOUT 60 PROCESSORS 2
        COMMAND $<TARGET_FILE:coxswain-replace> --ranks 1,2 --runs 3 --json replace_smoke.json)
    cox_command_test(NAME bench/pull_smoke LABEL bench TIER all TIMEOUT 60 PROCESSORS 2
        COMMAND $<TARGET_FILE:coxswain-pull> --bytes 4194304 --pairs 2 --json pull_smoke.json)
endif()
