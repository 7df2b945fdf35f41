# The C forward pass against the numpy reference, for the shipped model and random ones.
cox_test_program(print_logits SOURCES print_logits.c LIBS coxswain_model)
cox_test_program(print_draws SOURCES print_draws.c LIBS coxswain_model)
cox_command_test(NAME model_reference/logits LABEL model_reference TIER all TIMEOUT 120
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/check_logits.py $<TARGET_FILE:print_logits>
        ${PROJECT_SOURCE_DIR}/tests/lib/reference_llama.py ${PROJECT_SOURCE_DIR}/models/sums)

# `coxswain generate` against transformers' LlamaForCausalLM, where tools/torch has installed it; skipped elsewhere.
set(COX_TORCH_PYTHON ${PROJECT_SOURCE_DIR}/build/venv-torch/bin/python CACHE FILEPATH
    "Python with torch and transformers, for tests/model_reference/check_transformers.py")
cox_command_test(NAME model_reference/transformers LABEL transformers TIER nightly TIMEOUT 600
    PROCESSORS 2
    COMMAND ${COX_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/check_transformers.py $<TARGET_FILE:coxswain>
        ${COX_TORCH_PYTHON})
