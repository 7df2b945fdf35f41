# What `cmake --install` puts where. coxswain.pc and the CMake package find everything relative to themselves, so the
# tree may be installed under any prefix and moved.
include(CMakePackageConfigHelpers)

# The interface.
install(DIRECTORY include/coxswain DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
install(FILES ${generated}/coxswain/version.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/coxswain)
install(FILES ${generated}/proto/executor.pb-c.h proto/executor.proto
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/coxswain/proto)

# The commands of a release: every program of the product's folders. A program that is added to one of
# them has to be added here, and `sh tools/compile release`, which names no target, builds it.
set(release_commands "")
if(COX_BUILD_COMMANDS)
    set(release_commands coxswain coxswain-worker)
    install(TARGETS ${release_commands} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
elseif(SKBUILD)
    install(FILES ${PROJECT_BINARY_DIR}/missing DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# Fails if a program below `folder` is not installed, or is left out of a build that names no target.
function(cox_check_commands folder)
    get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        get_target_property(type ${target} TYPE)
        get_target_property(left_out ${target} EXCLUDE_FROM_ALL)
        if(type STREQUAL "EXECUTABLE" AND (left_out OR NOT target IN_LIST release_commands))
            message(FATAL_ERROR "${target} is no command of a release: install it (cmake/install.cmake), "
                "and let a build without a target build it")
        endif()
    endforeach()
    get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
    foreach(below IN LISTS folders)
        cox_check_commands(${below})
    endforeach()
endfunction()
cox_check_commands(${PROJECT_SOURCE_DIR})
install(TARGETS coxswain_shared coxswain_static coxswain_memory_shared coxswain_memory_static
    coxswain_proto_shared coxswain_proto_static
    EXPORT coxswain_targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})

# Groups over several machines. Nothing is linked with that library, which programs open: it is installed without the
# name for the linker. The script looks for its template in ../share.
if(COX_NODES)
    install(TARGETS coxswain_nodes
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
    install(PROGRAMS packaging/nats/coxswain-certificates DESTINATION ${CMAKE_INSTALL_BINDIR})
    install(FILES packaging/nats/coxswain-nats.conf DESTINATION ${CMAKE_INSTALL_DATADIR}/coxswain/nats)
    list(APPEND release_commands coxswain-certificates) # as tests/install/install_tests.cmake lists bin/
endif()

install(DIRECTORY models/sums DESTINATION ${CMAKE_INSTALL_DATADIR}/coxswain/models)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/coxswain)
install(EXPORT coxswain_targets
    FILE coxswain-targets.cmake NAMESPACE coxswain:: DESTINATION ${package_dir})
configure_package_config_file(cmake/coxswain-config.cmake.in
    ${PROJECT_BINARY_DIR}/coxswain-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/coxswain-config-version.cmake
    COMPATIBILITY SameMinorVersion)
install(FILES
    ${PROJECT_BINARY_DIR}/coxswain-config.cmake
    ${PROJECT_BINARY_DIR}/coxswain-config-version.cmake
    DESTINATION ${package_dir})

file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
file(RELATIVE_PATH pc_includedir ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
# A wheel has no links, so also not the libraries' names for the linker.
if(SKBUILD)
    set(pc_before :lib)
    set(pc_after .so.${COX_SOVERSION})
else()
    set(pc_requires "Requires.private: coxswain-proto = ${PROJECT_VERSION}\n")
endif()
foreach(package coxswain coxswain-memory coxswain-proto)
    configure_file(cmake/${package}.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

# The loader finds a new library only when its cache has it.
install(CODE "
if(\"\$ENV{DESTDIR}\" STREQUAL \"\" AND NOT \"${SKBUILD}\")
    message(STATUS \"Run ldconfig as root, so that programs find libcoxswain.so in ${CMAKE_INSTALL_FULL_LIBDIR}; \"
        \"where /etc/ld.so.conf does not list that folder, set LD_LIBRARY_PATH\")
endif()")
