cox_command_test(NAME legacy/selftest LABEL legacy TIMEOUT 120 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/legacy_selftest.py)
