cox_command_test(NAME unit/rows LABEL unit COMMAND ${COX_PYTHON} ${PROJECT_SOURCE_DIR}/tests/rows.py check)
