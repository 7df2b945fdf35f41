# cox_protocol(proto/executor): makes generated/proto/executor.pb-c.{c,h} of the build tree of proto/executor.proto, by
# protoc-c. An sdist brings both files, which serve where there is no protoc-c.
function(cox_protocol name)
    set(made ${PROJECT_BINARY_DIR}/generated/${name}.pb-c)
    set(brought ${PROJECT_SOURCE_DIR}/generated/${name}.pb-c)
    if(NOT PROTOC_C_EXECUTABLE)
        configure_file(${brought}.c ${made}.c COPYONLY)
        configure_file(${brought}.h ${made}.h COPYONLY)
        return()
    endif()
    cmake_path(GET made PARENT_PATH folder)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${made}.c ${made}.h
        COMMAND ${PROTOC_C_EXECUTABLE} --proto_path=${PROJECT_SOURCE_DIR} --c_out=${PROJECT_BINARY_DIR}/generated
            ${name}.proto
        DEPENDS ${PROJECT_SOURCE_DIR}/${name}.proto
        WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
        COMMENT "Generating ${name}.pb-c.{c,h}"
        VERBATIM)
endfunction()
