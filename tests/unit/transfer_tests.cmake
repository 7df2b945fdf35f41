cox_unit_test(NAME links TIER quick SOURCES links_test.c LIBS coxswain_transfer)
