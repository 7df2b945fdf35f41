# Pools of blocks (channel/memory/pool.h), all owners in one process.
foreach(name pool pool_slab pool_renew)
    cox_unit_test(NAME ${name}
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c ${CMAKE_CURRENT_LIST_DIR}/pool_fixture.c
                ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c
        LIBS coxswain_channel)
endforeach()
