cox_unit_test(NAME links SOURCES links_test.c LIBS coxswain_transfer)
