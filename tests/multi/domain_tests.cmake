cox_multi_test(NAME domain TIER all
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/domain_test.c ${CMAKE_CURRENT_LIST_DIR}/../unit/channel_fixture.c
            ${CMAKE_CURRENT_LIST_DIR}/../lib/inverted_domain.c
    LIBS coxswain_memory)

# CUDA memory: with the machine's driver, and with a stand-in for it that shows our side's calls alone.
add_library(fake_cuda MODULE ${CMAKE_CURRENT_LIST_DIR}/../lib/fake_cuda.c)
target_include_directories(fake_cuda PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(fake_cuda PRIVATE coxswain_warnings)
cox_test_program(test_multi_domain_cuda
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/domain_cuda_test.c ${CMAKE_CURRENT_LIST_DIR}/../unit/channel_fixture.c
            ${CMAKE_CURRENT_LIST_DIR}/../lib/inverted_domain.c
    LIBS coxswain_memory)
add_dependencies(test_multi_domain_cuda fake_cuda)
cox_command_test(NAME multi/domain_cuda LABEL multi TIER all
    COMMAND test_multi_domain_cuda libcuda.so.1)
cox_command_test(NAME multi/domain_cuda_stand_in LABEL multi TIER all
    COMMAND test_multi_domain_cuda $<TARGET_FILE:fake_cuda> stand-in)
