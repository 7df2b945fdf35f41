#!/bin/sh
# Sync and async scheduling with all kinds of requests, each with two kills. Skipped (77) without a vLLM.
set -eu

cd "$(dirname "$0")/../.."
python=build/venv-vllm/bin/python
[ -f build/venv-vllm/installed.txt ] || { echo "no vLLM: sh tools/vllm installs it"; exit 77; }
exec "$python" -m pytest -q -p no:cacheprovider "tests/vllm/test_survive.py::test_outputs_are_those_of_ranks_that_live[sync]" \
    "tests/vllm/test_survive.py::test_outputs_are_those_of_ranks_that_live[async]"
