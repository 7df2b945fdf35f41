# The installed tree, as its users meet it. A sanitized build is not one to install.
if(NOT COX_SANITIZE)
    set(prefix ${PROJECT_BINARY_DIR}/tests/prefix)
    list(JOIN release_commands " " command_names)
    cox_command_test(NAME install/tree LABEL install TIER quick TIMEOUT 60
        COMMAND ${CMAKE_COMMAND}
            -D BUILD_DIR=${PROJECT_BINARY_DIR} -D PREFIX=${prefix} -D COMMANDS=${command_names}
            -P ${CMAKE_CURRENT_LIST_DIR}/install_tree.cmake)
    set_tests_properties(install/tree PROPERTIES FIXTURES_SETUP installed_tree)

    cox_command_test(NAME install/configure LABEL install TIER all TIMEOUT 300
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/configure_test.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}
            ${CMAKE_COMMAND} ${CMAKE_C_COMPILER})

    # After install/tree, since both write the build tree's list of files.
    cox_command_test(NAME install/uninstall LABEL install TIER all TIMEOUT 60
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/uninstall_test.sh ${CMAKE_COMMAND} ${PROJECT_SOURCE_DIR}
            ${PROJECT_BINARY_DIR})
    set_tests_properties(install/uninstall PROPERTIES FIXTURES_REQUIRED installed_tree)

    foreach(name headers tiers symbols alone pkg_config find_package engine man)
        set(tier quick)
        if(name STREQUAL "man")
            set(tier all)
        endif()
        cox_command_test(NAME install/${name} LABEL install TIER ${tier} TIMEOUT 300
            COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/install_test.sh ${name})
        set_tests_properties(install/${name} PROPERTIES FIXTURES_REQUIRED installed_tree)
        set_property(TEST install/${name} APPEND PROPERTY ENVIRONMENT
            "CC=${CMAKE_C_COMPILER}"
            "CMAKE=${CMAKE_COMMAND}"
            "PREFIX=${prefix}"
            "LIBDIR=${prefix}/${CMAKE_INSTALL_LIBDIR}"
            "SOURCE=${PROJECT_SOURCE_DIR}"
            "VERSION=${PROJECT_VERSION}"
            "SOVERSION=${COX_SOVERSION}"
            "PYTHON=${COX_PYTHON}"
            "MODEL=${prefix}/${CMAKE_INSTALL_DATADIR}/coxswain/models/sums")
    endforeach()
endif()
