# The engine with two kills, with a real SGLang; `sh tools/test sglang` runs the rest. Nightly: tier `all` has no room for it.
if(COX_BUILD_PYTHON AND NOT COX_SANITIZE)
    cox_command_test(NAME sglang/engine LABEL sglang TIER nightly TIMEOUT 1400 PROCESSORS 2
        ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python"
                    "PYTHONDONTWRITEBYTECODE=1"
                    "COX_BIN_DIR=${PROJECT_BINARY_DIR}/bin"
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/one_row.sh)
endif()
