add_executable(stack_target ${CMAKE_CURRENT_LIST_DIR}/stack_target.c)
set_target_properties(stack_target PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_link_libraries(stack_target PRIVATE coxswain_worker_lib coxswain_warnings)
# What takes little time; nightly has all of it.
cox_command_test(NAME multi/stacks LABEL multi TIER all TIMEOUT 200 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/stacks_test.py ${PROJECT_BINARY_DIR}/bin
        ${PROJECT_SOURCE_DIR} a_loop_runs a_lock_of_a_dead_thread a_stopped_process_stays_stopped
        frames_of_an_interpreter_come_first a_deep_recursion_is_cut a_thread_in_state_d
        without_ptrace_the_rank_copies_its_stacks_itself
        a_rank_says_nothing_to_another_process_of_the_user the_command_shows_all_ranks_or_one
        a_hang_tells_where_each_rank_stands what_the_flight_recorder_of_torch_has
        a_flight_recorder_that_does_not_answer_is_said a_helper_that_is_told_to_end_leaves_no_child)
cox_command_test(NAME multi/stacks_of_hangs LABEL multi TIER nightly TIMEOUT 300 PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/stacks_test.py ${PROJECT_BINARY_DIR}/bin
        ${PROJECT_SOURCE_DIR})
