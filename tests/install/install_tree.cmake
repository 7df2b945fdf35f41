# Installs a build tree into an empty prefix, and compares its programs with a list:
#   cmake -D BUILD_DIR=... -D PREFIX=... -D "COMMANDS=coxswain coxswain-worker" -P install_tree.cmake
file(REMOVE_RECURSE ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${PREFIX}
    COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(expected UNIX_COMMAND "${COMMANDS}")
file(GLOB installed RELATIVE ${PREFIX}/bin ${PREFIX}/bin/*)
list(SORT expected)
list(SORT installed)
if(NOT installed STREQUAL expected)
    message(FATAL_ERROR "bin/ has ${installed}; the commands of a release are ${expected}")
endif()
