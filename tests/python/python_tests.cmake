# The Python package: one test of CTest for each file, run by pytest.
if(COX_BUILD_PYTHON AND NOT COX_SANITIZE)
    # What takes longer: torch comes from PyPI, ready, misuse and group wait for ranks that hang or die
    # often, fork_server and objects for imports, core_dump for the end of a core. packaging compiles
    # the product, and the library once more.
    set(python_all ready torch_worker misuse group fork_server launch arguments objects output forked
        core_dump weights device_weights handle_command hello names)
    file(GLOB python_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/test_*.py)
    foreach(path IN LISTS python_tests)
        cmake_path(GET path STEM name)
        string(REPLACE "test_" "" name ${name})
        set(tier quick)
        if(name IN_LIST python_all)
            set(tier all)
        endif()
        set(timeout 200)
        if(name STREQUAL "packaging")
            set(tier nightly)
            set(timeout 1500)
        endif()
        if(name MATCHES "^(stacks|torch_recorder)$") # multi/stacks has part of it in all
            set(tier nightly)
        endif()
        cox_command_test(NAME python/${name} LABEL python TIER ${tier} TIMEOUT ${timeout} PROCESSORS 2
            ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python"
                        "PYTHONDONTWRITEBYTECODE=" "PYTHONPYCACHEPREFIX=${PROJECT_BINARY_DIR}/pycache"
                        "COX_BIN_DIR=${PROJECT_BINARY_DIR}/bin"
                        "COX_PYTHON=${COX_PYTHON}"
            COMMAND ${COX_PYTHON} -m pytest -q -p no:cacheprovider ${path})
    endforeach()
    # What a dump may not change is tried with each commit, and often enough at night.
    foreach(count 50 1000)
        set(tests under_load)
        set(tier nightly)
        if(count EQUAL 50)
            set(tests "sealed or killed")
            set(tier all)
        endif()
        cox_command_test(NAME python/stacks_${count} LABEL python TIER ${tier} TIMEOUT 1500 PROCESSORS 2
            ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python"
                        "PYTHONDONTWRITEBYTECODE=" "PYTHONPYCACHEPREFIX=${PROJECT_BINARY_DIR}/pycache"
                        "COX_BIN_DIR=${PROJECT_BINARY_DIR}/bin"
                        "COX_PYTHON=${COX_PYTHON}"
                        "COX_STACK_DUMPS=${count}"
            COMMAND ${COX_PYTHON} -m pytest -q -p no:cacheprovider -k ${tests}
                    ${CMAKE_CURRENT_LIST_DIR}/test_stacks.py)
    endforeach()
    # The command that tries a machine with a GPU, as far as it goes here. It has a CUDA domain to test and a torch to find.
    cox_command_test(NAME python/gpu_check LABEL python TIER nightly TIMEOUT 1000 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/gpu_check.py
                ${PROJECT_BINARY_DIR} ${CMAKE_CURRENT_BINARY_DIR}/gpu_check)
endif()
