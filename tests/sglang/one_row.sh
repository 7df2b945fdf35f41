#!/bin/sh
# An engine whose schedulers are killed, stopped, and diverge. Skipped (77) without an SGLang.
set -eu

cd "$(dirname "$0")/../.."
python=build/venv-sglang/bin/python
[ -f build/venv-sglang/installed.txt ] || { echo "no SGLang: sh tools/sglang installs it"; exit 77; }
exec "$python" -m pytest -q -p no:cacheprovider "tests/sglang/test_engine.py::test_requests_outlive_schedulers[overlap]"
