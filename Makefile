# Short names for the scripts in tools/, which also work where make is not installed yet.

PREFIX ?= /usr/local

# Nothing is installed unasked: tools/packages only says what is missing. `make packages` installs it.
export COXSWAIN_PACKAGES = check

.PHONY: all help packages demo test test-all nightly gcc clang asan tsan fuzz bench bench-quick bench-ranks bench-deadlines bench-deaths bench-replace bench-pull bench-python bench-vllm bench-weights bench-nodes bench-scale format-check format docs install uninstall clean

all:
	@sh tools/compile release

help:
	@echo 'make            builds the commands and libraries in build/release'
	@echo 'make install    the same, and installs them below PREFIX (default /usr/local)'
	@echo 'make demo       builds, and lets 4 worker processes add'
	@echo 'make packages   installs what building and testing need (Debian; as root or with sudo)'
	@echo 'make test       builds and tests what a change usually breaks: 5 minutes on 2 cores'
	@echo 'make test-all   what has to pass before a change lands: 30 minutes'
	@echo 'make nightly    everything: hours'
	@echo 'make gcc clang asan tsan   every test of one build'
	@echo 'make fuzz       libFuzzer on every parser of foreign bytes'
	@echo 'make bench      measures everything (docs/bench.md); bench-quick: the same rows in two'
	@echo '                minutes, with wider intervals; bench-ranks, bench-deadlines,'
	@echo '                bench-deaths, bench-replace, bench-pull, bench-python,'
	@echo '                bench-vllm, bench-weights, bench-nodes and bench-scale (as root): a part'
	@echo 'make format     formats the sources; format-check only looks'
	@echo 'make docs       builds the site of docs/'
	@echo 'make clean      removes build/'
	@echo 'Only make packages installs packages. sh tools/demo and sh tools/test install what they'
	@echo 'need. Without make: cmake -B build && cmake --build build -j'

packages:
	@COXSWAIN_PACKAGES= sh tools/packages build test

demo:
	@sh tools/demo

test:
	@sh tools/test

test-all:
	@sh tools/test all

nightly:
	@sh tools/test nightly

gcc clang asan tsan:
	@sh tools/test $@

fuzz:
	@sh tools/fuzz

# Peers that cannot be installed are left out; the rest is measured.
bench:
	@sh tools/packages bench || echo 'peers that are missing are not measured' >&2
	@sh tools/compile bench
	@mkdir -p docs
	@status=0; build/bench/bin/coxswain-bench --json docs/bench.json || status=$$?; \
	/usr/bin/python3 tests/bench/plot.py docs/bench.json docs || echo 'no figures without matplotlib' >&2; \
	/usr/bin/python3 tests/bench/peers.py docs/bench.json docs/bench-peers.svg; \
	exit $$status

# The same rows in at most two minutes, with wider intervals: docs/bench.json stays as it is.
bench-quick:
	@sh tools/packages bench || echo 'peers that are missing are not measured' >&2
	@sh tools/compile bench
	build/bench/bin/coxswain-bench --brief --json build/bench/bench-quick.json

bench-ranks:
	@sh tools/compile bench coxswain-ranks
	build/bench/bin/coxswain-ranks

bench-deadlines:
	@sh tools/compile bench coxswain-deadlines
	build/bench/bin/coxswain-deadlines

bench-deaths:
	@sh tools/compile bench coxswain-deaths
	build/bench/bin/coxswain-deaths

bench-replace:
	@sh tools/compile bench coxswain-replace
	build/bench/bin/coxswain-replace

bench-pull:
	@sh tools/compile bench coxswain-pull
	build/bench/bin/coxswain-pull

# COXSWAIN_BENCH_PYTHON: interpreters that have peers, and numpy and cffi, with colons between; vLLM's is made by make bench-vllm.
bench-python:
	@sh tools/compile bench coxswain-bench
	@sh tools/ray || echo 'Ray is not measured' >&2
	COXSWAIN_BENCH_PYTHON=$${COXSWAIN_BENCH_PYTHON-/usr/bin/python3:build/venv-ray/bin/python:build/venv-vllm/bin/python} \
	    build/bench/bin/coxswain-bench --sections python --json docs/bench-python.json
	/usr/bin/python3 tests/bench/plot.py docs/bench-python.json docs || echo 'no figure without matplotlib' >&2

# vLLM's own executor beside ours: 40 minutes, most of which are the starts of engines whose ranks are killed.
bench-vllm:
	@sh tools/vllm
	@sh tools/compile bench coxswain_python coxswain-worker
	PYTHONPATH=build/bench/python build/venv-vllm/bin/python tests/bench/vllm_figures.py --json docs/bench-vllm.json

# Weights that vLLM's ranks share beside private ones: 12 minutes.
bench-weights:
	@sh tools/vllm
	@sh tools/compile bench coxswain_python coxswain-worker coxswain
	PATH=$$PWD/build/bench/bin:$$PATH PYTHONPATH=build/bench/python build/venv-vllm/bin/python tests/bench/vllm_weights.py

# Transports between machines, which are network namespaces: as root. NODES_OPTIONS: of tests/nodes/bench/run.py.
bench-nodes:
	@sh tools/packages test bench || echo 'peers that are missing are not measured' >&2
	@cmake --preset bench -D COX_BUILD_BENCH_NODES=ON
	@sh tools/compile bench nodes-bench
	sh tests/nodes/bench/run.sh --folder build/bench/bin $(NODES_OPTIONS)

# A group of up to 32 nodes, which are network namespaces: as root. SCALE_OPTIONS: of tests/nodes/bench/scale.py.
bench-scale:
	@sh tools/packages test bench || echo 'bare NATS may be missing' >&2
	@cmake --preset bench -D COX_BUILD_BENCH_NODES=ON
	@sh tools/compile bench nodes-bench
	sh tests/nodes/bench/run.sh scale --folder build/bench/bin --json docs/bench-nodes.json --page docs/nodes-protocol.md $(SCALE_OPTIONS)
	/usr/bin/python3 tests/bench/plot.py docs/bench-nodes.json docs || echo 'no figure without matplotlib' >&2

format-check:
	@sh tools/packages format
	find include channel memory proto engine worker coordinator nodes program tests examples -name '*.[ch]' -exec clang-format --dry-run -Werror {} +

format:
	@sh tools/packages format
	find include channel memory proto engine worker coordinator nodes program tests examples -name '*.[ch]' -exec clang-format -i {} +

docs:
	@sh tools/docs

install:
	@PREFIX='$(PREFIX)' sh tools/compile release
	DESTDIR='$(DESTDIR)' cmake --install build/release

# With the DESTDIR of the install, if that had one.
uninstall:
	DESTDIR='$(DESTDIR)' cmake -D BUILD_DIR=build/release -P cmake/uninstall.cmake

clean:
	rm -rf build
