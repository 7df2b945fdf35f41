# Groups over several machines, which are network namespaces here; where those cannot be made, possible.sh skips the test.
if(COX_NODES)
    set(nodes_here ${CMAKE_CURRENT_LIST_DIR})
    set(where_possible sh ${nodes_here}/possible.sh)

    # What libcoxswain-nodes.so does not export is compiled once more.
    file(GLOB direct_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/nodes/direct/*.c)
    foreach(name direct direct_peers)
        cox_test_program(test_nodes_${name} SOURCES ${name}_test.c direct_world.c ${direct_sources}
            LIBS coxswain_node_links coxswain_channel PkgConfig::OPENSSL Threads::Threads)
        target_include_directories(test_nodes_${name} PRIVATE ${PROJECT_SOURCE_DIR}/include)
        add_dependencies(test_nodes_${name} coxswain_messages) # which generates a header
        cox_command_test(NAME nodes/${name} LABEL nodes TIER all TIMEOUT 120
            COMMAND test_nodes_${name})
    endforeach()

    cox_test_program(test_nodes_outbox
        SOURCES outbox_test.c ${PROJECT_SOURCE_DIR}/nodes/outbox.c ${direct_sources}
        LIBS coxswain_node_links coxswain_channel PkgConfig::OPENSSL Threads::Threads)
    target_include_directories(test_nodes_outbox PRIVATE ${PROJECT_SOURCE_DIR}/include)
    add_dependencies(test_nodes_outbox coxswain_messages)
    cox_command_test(NAME nodes/outbox LABEL nodes TIER all TIMEOUT 60
        COMMAND test_nodes_outbox)

    cox_test_program(test_nodes_message_limits
        SOURCES message_limits_test.c direct_world.c ${PROJECT_SOURCE_DIR}/nodes/message_limits.c
            ${PROJECT_SOURCE_DIR}/nodes/group_relay.c ${direct_sources}
        LIBS coxswain_node_links coxswain_worker_lib coxswain_channel PkgConfig::OPENSSL Threads::Threads)
    target_include_directories(test_nodes_message_limits PRIVATE ${PROJECT_SOURCE_DIR}/include)
    add_dependencies(test_nodes_message_limits coxswain_messages)
    cox_command_test(NAME nodes/message_limits LABEL nodes TIER all TIMEOUT 60
        COMMAND test_nodes_message_limits)

    cox_test_program(test_nodes_kv_relay
        SOURCES kv_relay_test.c ${PROJECT_SOURCE_DIR}/nodes/kv_relay.c ${direct_sources}
        LIBS coxswain_node_links coxswain_messages coxswain_channel PkgConfig::OPENSSL Threads::Threads)
    target_include_directories(test_nodes_kv_relay PRIVATE ${PROJECT_SOURCE_DIR}/include)
    cox_command_test(NAME nodes/kv_relay LABEL nodes TIER all TIMEOUT 60
        COMMAND test_nodes_kv_relay)

    cox_test_program(test_nodes_cluster
        SOURCES cluster_test.c ${PROJECT_SOURCE_DIR}/nodes/cluster.c
        LIBS coxswain_node_links coxswain_coordinator coxswain_channel PkgConfig::NATS ${JANSSON_LINK_LIBRARIES}
            Threads::Threads)
    target_include_directories(test_nodes_cluster PRIVATE ${PROJECT_SOURCE_DIR}/include)
    add_dependencies(test_nodes_cluster coxswain_messages)
    cox_command_test(NAME nodes/cluster LABEL nodes TIER all TIMEOUT 60
        COMMAND test_nodes_cluster)

    cox_command_test(NAME nodes/permissions LABEL nodes TIER all TIMEOUT 120
        COMMAND ${where_possible} sh ${nodes_here}/permissions.sh)

    if(COX_BUILD_COMMANDS)
        cox_command_test(NAME nodes/demo LABEL nodes TIER all TIMEOUT 120 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/demo.sh ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/texts LABEL nodes TIER nightly TIMEOUT 300 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/texts.sh ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/groups LABEL nodes TIER nightly TIMEOUT 120 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/groups.sh ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/settings LABEL nodes TIER nightly TIMEOUT 120 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/settings.sh ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/stillborn LABEL nodes TIER nightly TIMEOUT 120 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/stillborn.sh ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/mistakes LABEL nodes TIER nightly TIMEOUT 180 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/mistakes.sh ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/superseded LABEL nodes TIER nightly TIMEOUT 120 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/superseded.sh ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/hostile LABEL nodes TIER nightly TIMEOUT 180 PROCESSORS 2
            COMMAND ${where_possible} /usr/bin/python3 ${nodes_here}/hostile.py ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/trace LABEL nodes TIER nightly TIMEOUT 120 PROCESSORS 2
            COMMAND ${where_possible} sh ${nodes_here}/trace.sh ${PROJECT_BINARY_DIR})
        if(COX_BUILD_PYTHON)
            cox_command_test(NAME nodes/stacks LABEL nodes TIER nightly TIMEOUT 150 PROCESSORS 2
                COMMAND ${where_possible} /usr/bin/python3 ${nodes_here}/stacks.py ${PROJECT_BINARY_DIR})
            cox_command_test(NAME nodes/large LABEL nodes TIER nightly TIMEOUT 150 PROCESSORS 2
                COMMAND ${where_possible} /usr/bin/python3 ${nodes_here}/large.py ${PROJECT_BINARY_DIR})
        endif()
        cox_command_test(NAME nodes/pods LABEL nodes TIER nightly TIMEOUT 120 PROCESSORS 2
            COMMAND ${where_possible} /usr/bin/python3 ${nodes_here}/pods.py ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/faults LABEL nodes TIER nightly TIMEOUT 900 PROCESSORS 2
            COMMAND ${where_possible} /usr/bin/python3 ${nodes_here}/faults.py ${PROJECT_BINARY_DIR})
        cox_command_test(NAME nodes/soak LABEL nodes TIER nightly TIMEOUT 2400 PROCESSORS 2
            COMMAND ${where_possible} /usr/bin/python3 ${nodes_here}/soak.py ${PROJECT_BINARY_DIR} --minutes 30)
    endif()
endif()

# Also of a build that has no such library.
if(COX_BUILD_COMMANDS)
    cox_command_test(NAME nodes/without_library LABEL nodes TIER all TIMEOUT 60
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/without_library.sh ${PROJECT_BINARY_DIR})
endif()

# The protocol needs neither libnats nor a network.
foreach(part link link_leads frame)
    cox_test_program(test_nodes_${part} SOURCES ${part}_test.c link_world.c LIBS coxswain_node_links coxswain_channel)
    cox_command_test(NAME nodes/${part} LABEL nodes TIER all TIMEOUT 120
        COMMAND test_nodes_${part})
endforeach()
cox_test_program(test_nodes_mirror SOURCES mirror_test.c LIBS coxswain_testlib)
cox_command_test(NAME nodes/mirror LABEL nodes TIER all TIMEOUT 120
    COMMAND test_nodes_mirror)
add_executable(nodes_simulate ${CMAKE_CURRENT_LIST_DIR}/bench/simulate.c)
target_include_directories(nodes_simulate PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(nodes_simulate PRIVATE coxswain_node_links coxswain_channel coxswain_warnings)
