cox_unit_test(NAME wire TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/wire_corrupt_test.c
    LIBS coxswain_proto)
cox_unit_test(NAME step_wire TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/step_wire_test.c
    LIBS coxswain_proto)
cox_unit_test(NAME utf8 TIER quick SOURCES ${CMAKE_CURRENT_LIST_DIR}/utf8_test.c
    LIBS coxswain_proto)
