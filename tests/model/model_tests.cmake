cox_command_test(NAME model/gate LABEL model TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 "gate legacy")
cox_command_test(NAME model/futex_gate LABEL model TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 "futex_gate elide")
cox_command_test(NAME model/group LABEL model TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 group)
cox_command_test(NAME model/pool LABEL model TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 pool)
cox_command_test(NAME model/kv LABEL model TIMEOUT 600 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 kv)
