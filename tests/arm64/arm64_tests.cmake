# That the library compiles for arm64, without a warning; in nightly, since all has no six seconds left. What it does there is a step of nightly (machine.sh).
if(NOT COX_SANITIZE)
    cox_command_test(NAME arm64/cross_build LABEL arm64 TIER nightly TIMEOUT 300 PROCESSORS 2
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/cross_build.sh ${CMAKE_COMMAND} ${PROJECT_SOURCE_DIR}
            ${PROJECT_BINARY_DIR}/tests/arm64)
endif()
