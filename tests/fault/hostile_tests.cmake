# A process that writes what it can reach, and single words. Each program is its own worker and its own meddler.
foreach(part writers words)
    cox_test_program(test_fault_hostile_${part}
        SOURCES hostile_${part}_test.c hostile_fixture.c checked_worker.c LIBS coxswain_testlib)
    cox_command_test(NAME fault/hostile_${part} LABEL fault TIER all TIMEOUT 300 PROCESSORS 2
        COMMAND test_fault_hostile_${part})
endforeach()
target_sources(test_fault_hostile_writers PRIVATE ${CMAKE_CURRENT_LIST_DIR}/meddler.c)
# A rank of a sealed group, which reaches its own memory and the hints.
cox_test_program(test_fault_hostile_sealed SOURCES hostile_sealed_test.c LIBS coxswain_testlib)
cox_command_test(NAME fault/hostile_sealed LABEL fault TIER all TIMEOUT 120 PROCESSORS 2
    COMMAND test_fault_hostile_sealed)
# The same of the rank group: its words and values, and the hints.
cox_test_program(test_fault_hostile_group SOURCES hostile_group_test.c LIBS coxswain_testlib)
cox_command_test(NAME fault/hostile_group LABEL fault TIER all TIMEOUT 240 PROCESSORS 2
    COMMAND test_fault_hostile_group)
# A rank of a sealed group that attacks all it can reach, as a library preloaded into the reference worker. No sanitizer:
# theirs has to be loaded first.
if(NOT COX_SANITIZE)
    add_library(adversary MODULE ${CMAKE_CURRENT_LIST_DIR}/adversary.c)
    target_link_libraries(adversary PRIVATE Threads::Threads coxswain_warnings)
    set_target_properties(adversary PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    cox_command_test(NAME fault/adversary LABEL fault TIER all TIMEOUT 600 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/adversary_test.py ${PROJECT_BINARY_DIR}/bin
                ${PROJECT_SOURCE_DIR} $<TARGET_FILE:adversary>)
endif()
