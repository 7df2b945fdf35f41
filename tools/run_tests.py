"""Builds and runs tests. `sh tools/test` starts it, and says what its arguments are."""

import glob
import os
import re
import subprocess
import sys
import threading
import time

from supervised import ROOT, run, supervise

sys.path.insert(0, os.path.join(ROOT, "tests"))
import tiers  # noqa: E402

PRESETS = ("test", "gcc", "clang", "asan", "tsan")
# A build of another kind changes nothing about these.
OF_ONE_BUILD = ["-LE", "^(model|transformers)$"]
SKIPPED = 77
# Of a test that failed, shown once more at the end.
LINE_COUNT = 40
# Of tests/python: what builds without instruments, or needs torch.
NOT_INSTRUMENTED = ("test_packaging.py", "test_torch_worker.py")
BESIDE_LOOPS = """loops=
for _ in 1 2 3 4; do (while :; do :; done) & loops="$loops $!"; done
"$@"; status=$?
kill $loops; exit $status"""
# Of tests/fault.
SOAKS = (
    ("chaos.py", "--kills", "1000"),
    ("chaos.py", "--kills", "1000", "--attach", "sealed"),
    ("generate_chaos.py", "--minutes", "10"),
    ("recovery_soak.py", "--seconds", "600"),
)


def build(preset):
    # In the terminal's process group: sudo may ask for a password.
    return run(["sh", "tools/compile", preset], own_group=False)


def log_of(preset):
    return os.path.join(ROOT, "build", preset, "ctest.log")


def verdict_of(preset):
    try:
        with open(log_of(preset), errors="replace") as file:
            return ([line.strip() for line in file if "% tests passed" in line] or [""])[-1]
    except OSError:
        return ""


# A test has ended: how many of how many have.
ENDED = re.compile(r" *(\d+)/(\d+) Test +#\d+: ")


def show_progress(fd):
    """Reads what ctest prints; on the terminal is one line, and above it a line for each test that fails. (ctest has
    an option for that, but not together with a log.)"""
    begin = time.monotonic()
    with os.fdopen(fd, errors="replace") as lines:
        for line in lines:
            match = ENDED.match(line)
            if not match:
                continue
            if not re.search(r"   Passed |\*\*\*Skipped ", line):
                print("\r\x1b[K" + line.rstrip())
            done, total = map(int, match.groups())
            print("\r\x1b[K%d/%d tests, ETA %.0f s" %
                  (done, total, (time.monotonic() - begin) * (total - done) / done), end="", flush=True)
    print("\r\x1b[K", end="", flush=True)


def run_ctest(command):
    if not sys.stdout.isatty():
        return run(command)
    fd, stdout = os.pipe()
    reader = threading.Thread(target=show_progress, args=(fd,))
    reader.start()
    try:
        return run(command, stdout=stdout)
    finally:
        os.close(stdout)
        reader.join()


def run_tests(preset, title, options):
    """Builds, runs the tests of a preset that `options` select. Returns the exit status."""
    begin = time.monotonic()
    if os.path.exists(log_of(preset)):
        os.unlink(log_of(preset))
    status = build(preset)
    if status:
        return status
    folder = os.path.join("build", preset)
    tests = tiers.tests_of("ctest", folder, options)
    print("%s: %d tests, about %.0f minutes on 2 idle cores" % (
        title, len(tests), max(1, tiers.seconds_of(tests, tiers.record()) / 60)), flush=True)
    status = run_ctest(["ctest", "--preset", preset, "-j", str(os.cpu_count() or 1),
                        "--output-log", log_of(preset), *options])
    minutes = (time.monotonic() - begin) / 60
    limit = tiers.MINUTES.get(title)
    print("%s took %.1f minutes with the build" % (title, minutes))
    if limit and minutes > limit:
        times = tiers.passed_times(log_of(preset))
        print("That is more than the %d minutes of this tier on 2 idle cores. The longest tests:"
              % limit)
        print("\n".join(tiers.longest([test for test in tests if test.name in times], times, 10)))
    if os.path.exists(log_of(preset)):
        for name, lines in tiers.failures(log_of(preset), LINE_COUNT).items():
            print("\n---- %s failed; its last lines:\n%s" % (name, "\n".join(lines)))
    print(verdict_of(preset), flush=True)
    return status


def tier_options(tier):
    within = tiers.TIERS[:tiers.TIERS.index(tier) + 1]
    return ["-L", "^tier-(%s)$" % "|".join(within)]


def step_test():
    run(["sh", "tools/torch"])  # without PyPI two tests are skipped, and this says so
    return run_tests("test", "test", [])


def step_anywhere():
    """The unit tests as an ordinary user, in containers, and beside other programs."""
    return build("test") or run(["sh", "tests/anywhere.sh", "all"])


def step_busy():
    """The tests of quick, $BUSY_RUNS times each, many at a time beside four busy loops: what depends on getting a
    processor in time fails here."""
    return build("test") or run(["sh", "-c", BESIDE_LOOPS, "sh",
                "ctest", "--preset", "test", "-j", str(8 * (os.cpu_count() or 1)), "--timeout", "900",
                "--repeat", "until-fail:" + os.environ.get("BUSY_RUNS", "10"), *tier_options("quick")])


def step_soaks():
    """What fault/chaos and the like do for some seconds, for longer."""
    status = build("test")
    if status:
        return status
    for script, *options in SOAKS:
        print(" ".join([script, *options]), flush=True)
        command = [sys.executable, "tests/fault/" + script, "build/test/bin", ".", *options]
        status = run(command) or status
    return status


def check_python():
    """ruff and mypy --strict over the package, in build/venv-lint. Without PyPI: a line that says so."""
    lint = os.path.join(ROOT, "build", "venv-lint")
    made = run([sys.executable, "-m", "venv", lint]) or run(
        [lint + "/bin/pip", "install", "--quiet", "-r", "python/requirements-lint.txt"])
    if made:
        print("ruff and mypy cannot be had from PyPI: not run", flush=True)
        return 0
    configuration = ["--config", "pyproject.toml", "python", "tests/python"]
    return (run([lint + "/bin/ruff", "check", *configuration])
            or run([lint + "/bin/ruff", "format", "--check", *configuration])
            or run([lint + "/bin/mypy", "--config-file", "pyproject.toml", "--strict",
                    "python/coxswain", "python/_coxswain_command.py", "tests/python/typed.py"]))


def step_python():
    """tests/python by a CPython that counts references, and with the library under ASan."""
    status = run(["sh", "tools/packages", "build", "test", "python-debug"], own_group=False)
    status = status or build("test")
    status = status or run(["cmake", "--preset", "asan", "-D", "COX_BUILD_PYTHON=ON"])
    status = status or run(["cmake", "--build", "--preset", "asan", "--target", "coxswain_python"])
    if status:
        return status
    tests = [path for path in sorted(glob.glob(os.path.join(ROOT, "tests", "python", "test_*.py")))
             if os.path.basename(path) not in NOT_INSTRUMENTED]
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    for python, preset in (("/usr/bin/python3-dbg", "test"), ("/usr/bin/python3", "asan")):
        print("%s with the library of the %s build" % (python, preset), flush=True)
        environment = {"PYTHONPATH": os.path.join(ROOT, "build", preset, "python"),
                       "COX_BIN_DIR": os.path.join(ROOT, "build", "test", "bin"),
                       "PYTHONDONTWRITEBYTECODE": "1"}
        if preset == "asan":
            library = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True,
                                     capture_output=True, text=True).stdout.strip()
            environment.update(LD_PRELOAD=library, PYTHONMALLOC="malloc",
                               ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="halt_on_error=1")
        status = run([python, *options], **environment) or status
    return check_python() or status


def step_vllm(options=(), kills=2):
    """tests/vllm with the vLLM of build/venv-vllm. kills: of each row of test_survive.py."""
    begin = time.monotonic()
    if run(["sh", "tools/vllm", "triton"]):
        return SKIPPED  # it has said why
    status = build("test")
    if status:
        return status
    chosen = any(os.path.exists(option.split("::")[0]) for option in options)
    folder = [] if chosen else [os.path.join(ROOT, "tests", "vllm")]
    status = run([os.path.join(ROOT, "build", "venv-vllm", "bin", "python"), "-m", "pytest", "-q",
                  "-p", "no:cacheprovider", *options, *folder],
                 PYTHONPATH=os.path.join(ROOT, "build", "test", "python"),
                 COX_BIN_DIR=os.path.join(ROOT, "build", "test", "bin"),
                 VLLM_TEST_KILLS=os.environ.get("VLLM_TEST_KILLS", str(kills)),
                 PYTHONDONTWRITEBYTECODE="1")
    print("vllm took %.1f minutes with the build" % ((time.monotonic() - begin) / 60))
    return status


def step_sglang(options=(), kills=2):
    """tests/sglang with the SGLang of build/venv-sglang. kills: of each engine of test_engine.py."""
    begin = time.monotonic()
    if run(["sh", "tools/sglang"]):
        return SKIPPED  # it has said why
    status = build("test")
    if status:
        return status
    chosen = any(os.path.exists(option.split("::")[0]) for option in options)
    folder = [] if chosen else [os.path.join(ROOT, "tests", "sglang")]
    status = run([os.path.join(ROOT, "build", "venv-sglang", "bin", "python"), "-m", "pytest", "-q",
                  "-p", "no:cacheprovider", *options, *folder],
                 PYTHONPATH=os.path.join(ROOT, "build", "test", "python"),
                 COX_BIN_DIR=os.path.join(ROOT, "build", "test", "bin"),
                 SGLANG_TEST_KILLS=os.environ.get("SGLANG_TEST_KILLS", str(kills)),
                 PYTHONDONTWRITEBYTECODE="1")
    print("sglang took %.1f minutes with the build" % ((time.monotonic() - begin) / 60))
    return status


STEPS = {
    "test": step_test,
    "gcc": lambda: run_tests("gcc", "gcc", OF_ONE_BUILD),
    "clang": lambda: run_tests("clang", "clang", OF_ONE_BUILD),
    "asan": lambda: run_tests("asan", "asan", OF_ONE_BUILD),
    "tsan": lambda: run_tests("tsan", "tsan", OF_ONE_BUILD),
    "fuzz": lambda: run(["sh", "tools/fuzz"], FUZZ_SECONDS=os.environ.get("FUZZ_SECONDS", "30")),
    "python": step_python,
    "vllm": lambda: step_vllm(kills=10),
    "sglang": lambda: step_sglang(kills=20),
    "soaks": step_soaks,
    "busy": step_busy,
    "anywhere": step_anywhere,
    "demo": lambda: run(["sh", "tools/demo"]),
    "debian": lambda: run(["sh", "tools/fresh"]),
    "packages": lambda: run(["sh", "tests/packages/packages.sh"]),
    "release": lambda: run(["sh", "tools/release"]),
    "service": lambda: run(["sh", "tests/service/vm.sh"]),
    "container": lambda: run(["sh", "tests/container/image.sh"]),
    "arm64": lambda: run(["sh", "tests/arm64/machine.sh"]),
    "transcript": lambda: run(["sh", "tests/install/transcript.sh"]),
}


def nightly(names):
    """Runs the steps, each to its end, and prints one line for each. Returns the exit status."""
    rows, failed = [], False
    for name in names or STEPS:
        print("== nightly: %s" % name, flush=True)
        begin = time.monotonic()
        status = STEPS[name]()
        verdict = {0: "passed", SKIPPED: "skipped"}.get(status, "FAILED")
        failed = failed or verdict == "FAILED"
        note = verdict_of(name) if name in PRESETS else ""
        rows.append((name, verdict, (time.monotonic() - begin) / 60, note))
    print("\n%-10s %-8s %7s" % ("step", "verdict", "minutes"))
    for row in rows:
        print(("%-10s %-8s %7.1f  %s" % row).rstrip())
    print("nightly: %s" % ("FAILED" if failed else "passed"), flush=True)
    return 1 if failed else 0


def main(arguments):
    first = arguments[0] if arguments and not arguments[0].startswith("-") else None
    options = arguments[1:] if first else arguments
    first = first or "quick"
    if first == "nightly" and all(name in STEPS for name in options):
        return nightly(options)
    if first == "all":
        run(["sh", "tools/torch"])  # without PyPI what needs torch is skipped, and this says so
        run(["sh", "tools/vllm"])  # likewise
    if first == "vllm":
        return step_vllm(options)
    if first == "sglang":
        return step_sglang(options)
    if first in tiers.LIMITS:
        return run_tests("test", first, [*tier_options(first), *options])
    if first in PRESETS:
        return run_tests(first, first, options)
    print("usage: sh tools/test [quick|all|%s [ctest option...]]\n"
          "       sh tools/test vllm|sglang [pytest option...]\n"
          "       sh tools/test nightly [%s]..." % ("|".join(PRESETS), "|".join(STEPS)),
          file=sys.stderr)
    return 2


if __name__ == "__main__":
    supervise(lambda: main(sys.argv[1:]))
