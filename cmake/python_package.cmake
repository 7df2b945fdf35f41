# What differs where scikit-build-core builds (pyproject.toml): pip install, a wheel, an sdist. The prefix is the folder
# coxswain/ of the package; man pages and completion go where pip puts such files, into share/ beside its bin/.
set(COX_BUILD_PYTHON ON)
set(COX_PYTHON ${Python_EXECUTABLE})
# A wheel has no links: a library has one name.
set(COX_LIBRARY_VERSION ${COX_SOVERSION})
set(CMAKE_INSTALL_LIBDIR lib)
set(CMAKE_INSTALL_MANDIR ${SKBUILD_DATA_DIR}/share/man)
# The folder of a build is another one each time. Assertions name files, and the build's run path would be in the build id.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
add_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}/= -ffile-prefix-map=${PROJECT_BINARY_DIR}/=)

# An sdist brings the C sources of the messages, for machines without protoc-c.
if(SKBUILD_STATE STREQUAL "sdist")
    find_program(PROTOC_C_EXECUTABLE protoc-c)
    if(NOT PROTOC_C_EXECUTABLE)
        message(FATAL_ERROR "An sdist is made with protoc-c (Debian: protobuf-c-compiler)")
    endif()
    file(REMOVE_RECURSE ${PROJECT_SOURCE_DIR}/generated)
    file(MAKE_DIRECTORY ${PROJECT_SOURCE_DIR}/generated)
    file(GLOB protocols RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/proto/*.proto ${PROJECT_SOURCE_DIR}/nodes/*.proto)
    execute_process(COMMAND ${PROTOC_C_EXECUTABLE} --proto_path=. --c_out=generated ${protocols}
        WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} COMMAND_ERROR_IS_FATAL ANY)
endif()

# Licences of the libraries that a wheel brings.
set(COX_LICENCES "" CACHE PATH "A folder whose files go into the licences of the package's metadata")
if(COX_LICENCES)
    install(DIRECTORY ${COX_LICENCES}/ DESTINATION ${SKBUILD_METADATA_DIR}/licenses)
endif()
