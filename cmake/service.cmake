# What is installed beside the commands: completion of shells, and the service of a group.
if(COX_BUILD_COMMANDS)
    install(FILES packaging/completion/coxswain.bash
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME coxswain)
    install(FILES packaging/completion/_coxswain DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
    # systemd looks in /usr/lib and /usr/local/lib, whatever the libraries' folder is called.
    configure_file(packaging/systemd/coxswain@.service.in ${PROJECT_BINARY_DIR}/coxswain@.service @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/coxswain@.service DESTINATION lib/systemd/system)
    install(FILES packaging/systemd/coxswain.tmpfiles.conf DESTINATION lib/tmpfiles.d RENAME coxswain.conf)
    install(FILES packaging/systemd/coxswain.sysusers.conf DESTINATION lib/sysusers.d RENAME coxswain.conf)
endif()
