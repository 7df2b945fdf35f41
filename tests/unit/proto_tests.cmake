# The messages of MindIE-LLM, their bytes, bytes that are none, and what all take.
foreach(part messages corrupt memory)
    cox_unit_test(NAME wire_${part} TIER quick
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/wire_${part}_test.c
                ${CMAKE_CURRENT_LIST_DIR}/wire_fixture.c
        LIBS coxswain_proto)
endforeach()
cox_unit_test(NAME step_wire TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/step_wire_test.c
    LIBS coxswain_proto)
cox_unit_test(NAME utf8 TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/utf8_test.c
    LIBS coxswain_proto)
