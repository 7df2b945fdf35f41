# Each requirement has its tests, of which ROWS.md in the build tree is the table; the recorded times of a tier stay within its limit.
cox_command_test(NAME unit/rows LABEL unit TIER quick
    COMMAND ${COX_PYTHON} ${PROJECT_SOURCE_DIR}/tests/rows.py ${PROJECT_BINARY_DIR}/ROWS.md)
set(tiers_script ${PROJECT_SOURCE_DIR}/tests/tiers.py)
cox_command_test(NAME unit/tiers LABEL unit TIER quick
    COMMAND ${COX_PYTHON} ${tiers_script} check ${CMAKE_CTEST_COMMAND} ${PROJECT_BINARY_DIR})
# Records the times of the tests anew, from the last run of sh tools/test.
add_custom_target(times_renew
    COMMAND ${COX_PYTHON} ${tiers_script} renew ${CMAKE_CTEST_COMMAND} ${PROJECT_BINARY_DIR}
    VERBATIM)
# Ctrl-C ends whatever sh tools/test has started.
cox_command_test(NAME unit/supervised LABEL unit TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/supervised_test.py ${PROJECT_SOURCE_DIR} Supervised)
# In nightly, since quick has no second left.
cox_command_test(NAME unit/tests_progress LABEL unit TIER nightly TIMEOUT 300
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/supervised_test.py ${PROJECT_SOURCE_DIR} Progress)
