# Installs a build tree into an empty prefix: cmake -D BUILD_DIR=... -D PREFIX=... -P install_tree.cmake
file(REMOVE_RECURSE ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${PREFIX}
    COMMAND_ERROR_IS_FATAL ANY)
foreach(program coxswain coxswain-worker)
    if(NOT EXISTS ${PREFIX}/bin/${program})
        message(FATAL_ERROR "bin/${program} was not installed")
    endif()
endforeach()
