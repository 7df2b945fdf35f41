# How the tree is laid out: which folder includes which, how large they are.
cox_command_test(NAME tree/includes LABEL tree TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/includes.py)
# The files of a folder call each other in layers.
cox_command_test(NAME tree/calls LABEL tree TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/calls.py)
# Where the shared words are loaded and stored.
cox_command_test(NAME tree/atomics LABEL tree TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/atomics.py)
# That nothing outside its folders asks how a group is attached.
cox_command_test(NAME tree/attach LABEL tree TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/attach.py)
# What is exported: the public headers and the linker maps agree, and so do the libraries.
set(libraries "")
if(NOT COX_SANITIZE)
    set(libraries $<TARGET_FILE:coxswain_shared> $<TARGET_FILE:coxswain_memory_shared> $<TARGET_FILE:coxswain_proto_shared>)
endif()
cox_command_test(NAME tree/symbols LABEL tree TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/symbols.py check ${libraries})
# How wide the lines of C are, and where the comments of fields stand.
cox_command_test(NAME tree/columns LABEL tree TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/columns.py)
# The fields of the messages that MindIE-LLM has too.
cox_command_test(NAME tree/contract LABEL tree TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/contract.py)
# The USDT probes of the programs, and the scripts that use them.
if(COX_BUILD_COMMANDS)
    cox_command_test(NAME tree/probes LABEL tree TIER all
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/probes.py $<TARGET_FILE:coxswain> $<TARGET_FILE:coxswain-worker>)
endif()
