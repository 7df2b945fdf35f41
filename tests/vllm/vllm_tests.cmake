# Rows of test_survive.py that run before a change lands, with a real vLLM; `sh tools/test vllm` runs the rest.
if(COX_BUILD_PYTHON AND NOT COX_SANITIZE)
    cox_command_test(NAME vllm/survive LABEL vllm TIER all TIMEOUT 600 PROCESSORS 2
        ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python"
                    "PYTHONDONTWRITEBYTECODE=1"
                    "COX_BIN_DIR=${PROJECT_BINARY_DIR}/bin"
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/two_rows.sh)
endif()
