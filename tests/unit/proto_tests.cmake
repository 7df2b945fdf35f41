cox_unit_test(NAME wire SOURCES ${CMAKE_CURRENT_LIST_DIR}/wire_test.c LIBS coxswain_proto)
cox_unit_test(NAME step_wire SOURCES ${CMAKE_CURRENT_LIST_DIR}/step_wire_test.c LIBS coxswain_proto)
cox_unit_test(NAME utf8 SOURCES ${CMAKE_CURRENT_LIST_DIR}/utf8_test.c LIBS coxswain_proto)
