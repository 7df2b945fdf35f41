cox_command_test(NAME unit/rows LABEL unit TIER quick COMMAND ${COX_PYTHON} ${PROJECT_SOURCE_DIR}/tests/rows.py check)
