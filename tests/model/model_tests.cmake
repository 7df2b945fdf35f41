cox_command_test(NAME model/gate LABEL model TIMEOUT 1200 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2)
