cox_command_test(NAME model/gate LABEL model TIER nightly TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 "gate legacy")
cox_command_test(NAME model/futex_gate LABEL model TIER nightly TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 "futex_gate elide")
cox_command_test(NAME model/group LABEL model TIER nightly TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 group)
cox_command_test(NAME model/pool LABEL model TIER nightly TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 pool)
cox_command_test(NAME model/kv LABEL model TIER nightly TIMEOUT 600 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 kv)
cox_command_test(NAME model/node LABEL model TIER nightly TIMEOUT 1800 PROCESSORS 2
    COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/check.sh short 2 "node_request node_rejoin node_takeover")
