cox_unit_test(NAME wire SOURCES ${CMAKE_CURRENT_LIST_DIR}/wire_test.c LIBS coxswain_proto)
