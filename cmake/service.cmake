# What is installed beside the commands: completion of shells, and the services of groups and of weights.
if(COX_BUILD_COMMANDS)
    set(shell_datadir ${CMAKE_INSTALL_DATADIR})
    if(SKBUILD)
        set(shell_datadir ${SKBUILD_DATA_DIR}/share)
    endif()
    install(FILES packaging/completion/coxswain.bash
        DESTINATION ${shell_datadir}/bash-completion/completions RENAME coxswain)
    install(FILES packaging/completion/_coxswain DESTINATION ${shell_datadir}/zsh/site-functions)
endif()
if(COX_BUILD_COMMANDS AND NOT SKBUILD)
    # systemd looks in /usr/lib and /usr/local/lib, whatever the libraries' folder is called.
    # The service names the program below the prefix of the install, which may be another than that of the build.
    install(CODE "
get_filename_component(COX_BINDIR \"${CMAKE_INSTALL_BINDIR}\" ABSOLUTE BASE_DIR \"\${CMAKE_INSTALL_PREFIX}\")
foreach(service coxswain@ coxswain-weights)
    configure_file(\"${PROJECT_SOURCE_DIR}/packaging/systemd/\${service}.service.in\"
        \"${PROJECT_BINARY_DIR}/\${service}.service\" @ONLY)
endforeach()")
    install(FILES ${PROJECT_BINARY_DIR}/coxswain@.service ${PROJECT_BINARY_DIR}/coxswain-weights.service
        DESTINATION lib/systemd/system)
    install(FILES packaging/systemd/coxswain.tmpfiles.conf DESTINATION lib/tmpfiles.d RENAME coxswain.conf)
    install(FILES packaging/systemd/coxswain.sysusers.conf DESTINATION lib/sysusers.d RENAME coxswain.conf)
endif()
