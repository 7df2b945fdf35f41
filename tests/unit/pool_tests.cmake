# Pools of blocks (include/coxswain/memory/pool.h), all owners in one process.
foreach(name pool pool_slab pool_pin)
    cox_unit_test(NAME ${name} TIER quick
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}_test.c ${CMAKE_CURRENT_LIST_DIR}/pool_fixture.c
                ${CMAKE_CURRENT_LIST_DIR}/channel_fixture.c
        LIBS coxswain_memory)
endforeach()

# KV blocks of one writer (include/coxswain/kv.h).
cox_unit_test(NAME kv_blocks TIER quick SOURCES kv_blocks_test.c LIBS coxswain_channel)
