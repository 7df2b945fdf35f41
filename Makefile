# Short names for the scripts in tools/, which also work where make is not installed yet.

PREFIX ?= /usr/local

.PHONY: all demo test test-all nightly gcc clang asan tsan fuzz bench bench-ranks bench-deadlines bench-deaths bench-replace bench-pull bench-python format-check format docs install clean

all:
	@sh tools/compile release

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

# COXSWAIN_BENCH_PYTHON: an interpreter that has the peers, and numpy and cffi.
bench-python:
	@sh tools/compile bench coxswain-bench
	build/bench/bin/coxswain-bench --sections python

format-check:
	@sh tools/packages format
	find include channel proto engine worker coordinator program tests examples -name '*.[ch]' -exec clang-format --dry-run -Werror {} +

format:
	@sh tools/packages format
	find include channel proto engine worker coordinator program tests examples -name '*.[ch]' -exec clang-format -i {} +

docs:
	@sh tools/docs

install:
	@PREFIX='$(PREFIX)' sh tools/compile release
	cmake --install build/release

clean:
	rm -rf build
