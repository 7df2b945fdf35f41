# The man pages, in man/ of the build tree: of the headers, and of the commands where this machine can execute them. Without a
# Python there are none, and the rest is built all the same.
if(COX_BUILD_MAN AND NOT COX_SANITIZE AND EXISTS ${COX_PYTHON})
    set(man_folder ${PROJECT_BINARY_DIR}/man)
    set(man_script ${PROJECT_SOURCE_DIR}/docs/man/man.py)
    string(TIMESTAMP man_date "%Y-%m-%d" UTC) # of SOURCE_DATE_EPOCH, where that is set
    set(man_programs "")
    if(COX_BUILD_COMMANDS AND NOT CMAKE_CROSSCOMPILING)
        set(man_programs $<TARGET_FILE:coxswain> $<TARGET_FILE:coxswain-worker>)
    endif()
    list(TRANSFORM public_headers PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE man_headers)
    add_custom_command(OUTPUT ${man_folder}/stamp
        COMMAND ${CMAKE_COMMAND} -E rm -rf ${man_folder}
        COMMAND ${COX_PYTHON} ${man_script} ${man_folder} ${PROJECT_VERSION} ${man_date}
            ${PROJECT_SOURCE_DIR} ${man_programs}
        COMMAND ${CMAKE_COMMAND} -E touch ${man_folder}/stamp
        DEPENDS ${man_script} ${PROJECT_SOURCE_DIR}/docs/man/coxswain.1.in ${man_headers} ${man_programs}
            ${PROJECT_SOURCE_DIR}/packaging/nats/coxswain-certificates
        COMMENT "Writing the man pages"
        VERBATIM)
    add_custom_target(man ALL DEPENDS ${man_folder}/stamp)
    set(man_without "")
    if(NOT COX_NODES)
        set(man_without PATTERN coxswain-certificates.1 EXCLUDE)
    endif()
    set(man_sections 13)
    if(SKBUILD)
        set(man_sections 1)
    endif()
    install(DIRECTORY ${man_folder}/ DESTINATION ${CMAKE_INSTALL_MANDIR}
        FILES_MATCHING PATTERN "*.[${man_sections}]" ${man_without})
elseif(COX_BUILD_MAN AND NOT COX_SANITIZE)
    message(STATUS "Without man pages: no ${COX_PYTHON}")
endif()
