# Random subsets of a group killed at random instants; the long way is chaos.py BIN_DIR SOURCE_DIR --kills 1000.
cox_command_test(NAME fault/chaos LABEL fault TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/chaos.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR} --kills 250)
cox_command_test(NAME fault/chaos_sealed LABEL fault TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/chaos.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR} --kills 150 --attach sealed)
# The same for half an hour: generate_chaos.py BIN_DIR SOURCE_DIR --minutes 30.
cox_command_test(NAME fault/generate_chaos LABEL fault TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/generate_chaos.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR} --minutes 0.3)
cox_command_test(NAME fault/generate_chaos_sealed LABEL fault TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/generate_chaos.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR} --minutes 0.2 --attach sealed)
# A kept group under deaths, stops and recovery commands; for half an hour: recovery_soak.py BIN_DIR SOURCE_DIR
# --seconds 1800.
cox_command_test(NAME fault/recovery_soak LABEL fault TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/recovery_soak.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR} --seconds 20 --pause 0,0.4)
cox_command_test(NAME fault/recovery_soak_sealed LABEL fault TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/recovery_soak.py ${PROJECT_BINARY_DIR}/bin
            ${PROJECT_SOURCE_DIR} --seconds 20 --pause 0,0.4 --attach sealed)
