# The check that each step of the protocol has its point; over the sources, in any build.
cox_command_test(NAME fault/points LABEL fault TIER quick TIMEOUT 300
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/points.py)
