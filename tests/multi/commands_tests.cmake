cox_command_test(NAME multi/commands LABEL multi TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/commands_test.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR})
