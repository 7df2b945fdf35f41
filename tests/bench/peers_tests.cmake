# Every peer that is here starts, answers rightly, and leaves nothing, killed or not; no time is looked at.
if(COX_BUILD_BENCH)
    set(peers
        bench-seqpacket bench-zmq bench-nng "bench-mpi" "bench-mpi yield" bench-iceoryx
        pickle_ring.py "pickle_ring.py --sequences 16" "python_subject.py --by pipe")
    cox_command_test(NAME bench/peers_smoke LABEL bench TIER all TIMEOUT 120 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${PROJECT_SOURCE_DIR}/tests/bench/peers/smoke.py
            --folder ${PROJECT_BINARY_DIR}/bin ${peers})
    # Its launcher ends seconds after it.
    cox_command_test(NAME bench/mpi4py_smoke LABEL bench TIER nightly TIMEOUT 120 PROCESSORS 2
        COMMAND ${COX_PYTHON} ${PROJECT_SOURCE_DIR}/tests/bench/peers/smoke.py
            --folder ${PROJECT_BINARY_DIR}/bin "python_subject.py --by mpi4py --what object"
            "python_subject.py --by mpi4py --what array")
endif()
