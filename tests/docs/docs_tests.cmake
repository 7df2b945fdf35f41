# The documentation: its code runs, its links lead somewhere, the site builds.
cox_command_test(NAME docs/links LABEL docs TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/links.py ${PROJECT_SOURCE_DIR})
cox_command_test(NAME docs/chart LABEL docs TIER quick
    COMMAND ${COX_PYTHON} ${PROJECT_SOURCE_DIR}/tests/bench/peers.py --check
            ${PROJECT_SOURCE_DIR}/docs/bench.json ${PROJECT_SOURCE_DIR}/docs/bench-peers.svg)
cox_command_test(NAME docs/results LABEL docs TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/results.py ${PROJECT_SOURCE_DIR})
cox_command_test(NAME docs/pictures LABEL docs TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/pictures.py ${PROJECT_SOURCE_DIR})
cox_command_test(NAME docs/options LABEL docs TIER quick
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/blocks.py --options
            ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR})

# Blocks of C are compiled against the installed tree, which a sanitized build does not have.
if(NOT COX_SANITIZE)
    set(pages_front_page README.md)
    set(pages_your_engine docs/your-engine.md)
    set(pages_pages
        docs/commands.md docs/embedding.md docs/lora.md docs/memory.md docs/operations.md
        docs/prefill-decode.md docs/recovery.md docs/versioning.md)
    foreach(name front_page your_engine pages)
        cox_command_test(NAME docs/${name} LABEL docs TIER all TIMEOUT 400
            COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/blocks.py
                    ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR}
                    ${PROJECT_BINARY_DIR}/tests/prefix ${pages_${name}})
        set_tests_properties(docs/${name} PROPERTIES FIXTURES_REQUIRED installed_tree)
    endforeach()

    cox_command_test(NAME docs/at_3am LABEL docs TIER nightly TIMEOUT 900 PROCESSORS 2
        COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/at_3am.sh ${PROJECT_BINARY_DIR})

    # Sphinx is Debian's: /usr/bin/python3. Without it the test is skipped.
    cox_command_test(NAME docs/site LABEL docs TIER all TIMEOUT 100
        COMMAND /usr/bin/python3 ${PROJECT_SOURCE_DIR}/tools/docs_site.py
                ${PROJECT_BINARY_DIR}/tests/site)
endif()
