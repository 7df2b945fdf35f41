cox_command_test(NAME unit/rows LABEL unit TIER quick COMMAND ${COX_PYTHON} ${PROJECT_SOURCE_DIR}/tests/rows.py check)
# Ctrl-C ends whatever sh tools/test has started.
cox_command_test(NAME unit/supervised LABEL unit TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/supervised_test.py ${PROJECT_SOURCE_DIR})
