"""The steps of `sh tools/gpu-check`, which says what they are for and what the arguments mean."""

import argparse
import glob
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests" / "python")]
import checkpoints  # noqa: E402
from supervised import supervise  # noqa: E402

PACK = ROOT / "build" / "gpu-pack"
SUMS = ROOT / "models" / "sums"
# In the build's folder.
COMMAND, PACKAGE = "bin/coxswain", "python/coxswain/_native*.so"
DOMAIN_TEST, STAND_IN = "tests/test_multi_domain_cuda", "lib/libfake_cuda.so"
TOLERANCE = 1e-3  # of logits, which are float32 and up to about 10
# The model of which steps are timed: small, so that launches and the channel weigh more than arithmetic.
MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
PROMPT = " ".join(str(3 + 7 * i % 500) for i in range(16))
TOKENS = 240
WARMUP = 30  # steps that are not timed: the first ones allocate, and load kernels
SUM_PROMPTS = [f"{a}+{b}=" for a in range(11, 100, 7) for b in range(10, 100, 10)]
WEIGHTS_MIB = {"cpu": 64, "cuda:0": 4096}
# Of domain_cuda_test, the tests with a second process.
BETWEEN_PROCESSES = (
    "h19_h28_another_process_imports_device_memory",
    "h20_h28_an_importer_that_is_killed_takes_nothing_along",
    "h6_h19_h28_a_message_is_copied_to_the_device_once_for_two_processes",
    "h5_h28_a_message_in_device_memory_is_taken_there_by_another_process",
    "h20_b37_h28_a_taker_that_is_killed_keeps_no_device_memory",
)


class Failed(Exception):
    """A step failed; the text is the detail."""


class NoDevice(Exception):
    """What the step needs is not on this machine, as a GPU is not."""


class Skipped(Exception):
    """What the step needs is missing for another reason."""


def last_lines(text, count=3):
    return " / ".join(line.strip() for line in text.strip().splitlines()[-count:]) or "no output"


class Check:
    def __init__(self, options):
        self.out = options.out
        self.build = options.build
        self.scale = options.minutes / 8
        self.end = time.monotonic() + options.minutes * 60 - 15
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = open(self.out / "log.txt", "w", encoding="utf-8", buffering=1)
        self.rows, self.texts, self.records = [], {}, {}
        self.until = self.end
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="coxswain-gpu-"))
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith("COXSWAIN_")
        }
        self.environment["COXSWAIN_RUNTIME_DIR"] = str(self.scratch)
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"

    # ---- steps and commands ----

    def step(self, name, seconds, function, *arguments):
        """Runs a step within its limit, and adds its row."""
        print(f"{name} ...", flush=True)
        self.log.write(f"\n==== {name}\n")
        begin = time.monotonic()
        self.until = min(begin + seconds * self.scale, self.end)
        try:
            result, detail = "passed", function(*arguments)
        except Failed as failure:
            result, detail = "FAILED", str(failure)
        except NoDevice as reason:
            result, detail = "no device", str(reason)
        except Skipped as reason:
            result, detail = "skipped", str(reason)
        except Exception as error:  # a step that breaks does not stop the others
            result, detail = "FAILED", f"{type(error).__name__}: {error}"
        taken = time.monotonic() - begin
        detail = " ".join(detail.replace("|", "/").split())
        self.rows.append((name, result, taken, detail))
        print(f"    {result}, {taken:.1f} s: {detail}", flush=True)
        self.log.write(f"---- {result}, {taken:.1f} s: {detail}\n")

    def left(self):
        if time.monotonic() >= self.until:
            raise Failed("the step's time is over")
        return self.until - time.monotonic()

    def run(self, command, statuses=(0,), stdin="", **environment):
        """Runs a command to its end, or kills its process group at the step's. Returns status and output."""
        command = [str(word) for word in command]
        self.log.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**self.environment, **environment},
            cwd=ROOT,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(stdin, timeout=self.left())
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
                self.log.write(output + errors)
                raise Failed(f"took too long: {' '.join(command[:3])}: {last_lines(output + errors)}") from None
        self.log.write(output + errors)
        if process.returncode not in statuses:
            raise Failed(f"{pathlib.Path(command[0]).name}: exit status {process.returncode}: "
                         f"{last_lines(errors or output)}")
        return process.returncode, output

    # ---- build ----

    def add_wheels(self):
        """Python packages of the pack, where this Python has none of its own."""
        site = self.out / "site"
        shutil.rmtree(site, ignore_errors=True)
        version = f"cp{sys.version_info.major}{sys.version_info.minor}"
        missing = []
        for module, pattern in (("cffi", f"cffi-*-{version}-*"), ("pycparser", "pycparser-*"),
                                ("safetensors", "safetensors-*")):
            if importlib.util.find_spec(module):
                continue
            found = glob.glob(str(PACK / "wheels" / pattern))
            if found:
                zipfile.ZipFile(found[0]).extractall(site)
            else:
                missing.append(module)
        if missing:
            raise Failed(f"{sys.executable} has no {', '.join(missing)}, nor has {PACK} for {version}: "
                         "sh tools/gpu-check pack")
        if site.exists():
            sys.path.append(str(site))
            self.add_path(site)

    def add_path(self, folder):
        """Python of later commands finds packages there, too."""
        before = self.environment.get("PYTHONPATH")
        self.environment["PYTHONPATH"] = f"{folder}:{before}" if before else str(folder)

    def compile(self):
        self.add_wheels()
        if self.build:
            self.check_built()
            return f"as it is in {self.build}"
        self.build = self.out / "build"
        options = ["COX_BUILD_TESTS=ON", "COX_BUILD_PYTHON=ON", "COX_BUILD_MAN=OFF", "COX_NODES=OFF",
                   "CMAKE_BUILD_TYPE=RelWithDebInfo", f"COX_PYTHON={sys.executable}"]
        packages = "the system's packages"
        if PACK.exists():
            packages = "the packages of build/gpu-pack"
            # DT_RPATH in place of DT_RUNPATH: the libraries of the pack load others of it.
            options += [f"COX_GPU_PACK={PACK}", f"CMAKE_MODULE_PATH={HERE}", f"CMAKE_BUILD_RPATH={PACK}/lib",
                        f"PROTOC_C_EXECUTABLE={PACK}/bin/protoc-c", "COX_PROBES=OFF"]
            options += [f"CMAKE_{kind}_LINKER_FLAGS=-L{PACK}/lib -Wl,--disable-new-dtags -Wl,-rpath-link,{PACK}/lib"
                        for kind in ("EXE", "SHARED", "MODULE")]
            _, has_headers = self.run([sys.executable, "-c", "import os, sysconfig; "
                                       "print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"])
            if has_headers.strip() != "True":
                options.append(f"COX_PYTHON_INCLUDE={PACK}/include/python")
                packages += ", with its Python.h"
        ninja = shutil.which("ninja")
        generator = "Ninja" if ninja else "Unix Makefiles"
        jobs = len(os.sched_getaffinity(0))
        shutil.rmtree(self.build, ignore_errors=True)
        self.run(["cmake", "-S", ROOT, "-B", self.build, "-G", generator, *(f"-D{option}" for option in options)])
        # A program that cannot be built leaves the others.
        _, output = self.run(["cmake", "--build", self.build, "-j", jobs, "--target", "coxswain", "coxswain_python",
                              "test_multi_domain_cuda", "fake_cuda", "--", *(["-k", "0"] if ninja else ["-k"])],
                             statuses=range(256))
        self.check_built(last_lines("\n".join(re.findall(r".*error: .*", output))))
        return f"{packages}, {generator}, {jobs} jobs"

    def built(self, name):
        return self.build is not None and any(self.build.glob(name))

    def check_built(self, why=""):
        self.add_path(self.build / "python")
        missing = [name for name in (COMMAND, PACKAGE, DOMAIN_TEST, STAND_IN) if not self.built(name)]
        if missing:
            raise Failed(f"{self.build} has no {', '.join(missing)}{why and ': '}{why}")

    # ---- the CUDA domain ----

    def domain_test(self, library, *arguments):
        """The names of the tests that passed; and of those that failed, with the reason."""
        if not self.built(DOMAIN_TEST):
            raise Skipped("it was not built")
        status, output = self.run([self.build / DOMAIN_TEST, library, *arguments],
                                  statuses=range(-64, 256), CMOCKA_MESSAGE_OUTPUT="TAP")
        if status == 77:
            raise NoDevice(last_lines(output, 1).removeprefix("skipped: "))
        passed = re.findall(r"^ok \d+ - (\w+)", output, re.MULTILINE)
        failed = re.findall(r"^not ok \d+ - (\w+)(?:\n#? *(.*))?", output, re.MULTILINE)
        if not passed or (status and not failed):
            raise Failed(f"exit status {status}: {last_lines(output)}")
        return passed, failed

    def domain_row(self, choose, library, *arguments):
        passed, failed = self.domain_test(library, *arguments)
        passed = [name for name in passed if choose(name)]
        failed = [(name, why) for name, why in failed if choose(name)]
        count = f"{len(passed)} of {len(passed) + len(failed)} tests"
        if failed or not passed:
            raise Failed(f"{count}; not: {'; '.join(f'{name}: {why}' for name, why in failed)}")
        return count

    def stand_in(self):
        return self.domain_row(lambda name: True, self.build / STAND_IN, "stand-in") + ", no driver"

    # ---- the PyTorch worker ----

    def need_torch(self, device):
        if not importlib.util.find_spec("torch"):
            raise Skipped(f"{sys.executable} has no torch; $PYTHON names another Python")
        if not self.built(COMMAND) or not self.built(PACKAGE):
            raise Skipped("it was not built")
        import torch
        if device != "cpu" and not torch.cuda.is_available():
            raise NoDevice(f"torch {torch.__version__} sees no GPU")
        return torch

    def options_of(self, device, ranks, weights="private"):
        # Rank by rank on the same GPU: NCCL would refuse that; ranks gather through shared memory.
        return ["-n", ranks, "--worker", f"{sys.executable} {HERE}/worker.py --device {device} --weights {weights}"]

    def make_model(self):
        folder = self.scratch / "model"
        if not folder.exists():
            checkpoints.write(folder, 5, **MODEL)
        return folder

    def generate(self, device, ranks):
        """Texts of the shipped model, then one long text of a random one, whose steps are recorded."""
        torch = self.need_torch(device)
        group = self.options_of(device, ranks)
        _, text = self.run([self.build / COMMAND, "generate", "--quiet", *group, "--model", SUMS, "-"],
                           stdin="\n".join(SUM_PROMPTS[:64]) + "\n")
        path = self.scratch / f"{device}-{ranks}.pt"
        _, tokens = self.run([self.build / COMMAND, "generate", "--quiet", *group, "--model", self.make_model(),
                              "--tokens", "--max-tokens", TOKENS, PROMPT], COX_GPU_RECORD=str(path))
        self.texts[device, ranks] = text
        steps = torch.load(path)
        tokens = [int(token) for token in tokens.split()][-TOKENS:]
        self.records[device, ranks] = tokens, torch.stack([logits[-1] for _, _, logits in steps])
        begins = [begin for begin, _, _ in steps]
        times = sorted(1e3 * (after - before) for before, after in zip(begins[WARMUP:], begins[WARMUP + 1:]))
        forward = statistics.median(1e3 * (end - begin) for begin, end, _ in steps[WARMUP:])
        return (self.compare(torch, device, ranks) +
                f"; a step takes {statistics.median(times):.2f} ms, p99 {times[int(len(times) * 0.99)]:.2f} ms "
                f"({len(times)} decode steps of one sequence), of which the model {forward:.2f} ms")

    def compare(self, torch, device, ranks):
        """With one rank on the CPU: texts and tokens are equal, logits nearly."""
        if (device, ranks) == ("cpu", 1):
            return f"{len(SUM_PROMPTS[:64])} texts and {TOKENS} tokens for the others to match"
        if ("cpu", 1) not in self.records:
            raise Skipped("there is nothing to compare with")
        if self.texts[device, ranks] != self.texts["cpu", 1]:
            ours, theirs = (self.texts[key].splitlines() for key in ((device, ranks), ("cpu", 1)))
            raise Failed(f"texts differ: {next(pair for pair in zip(ours, theirs) if pair[0] != pair[1])}")
        (own, logits), (tokens, expected) = self.records[device, ranks], self.records["cpu", 1]
        same = next((i for i, pair in enumerate(zip(own, tokens)) if pair[0] != pair[1]), len(tokens))
        # The step that draws the first token that differs had the same input.
        difference = (logits[:same + 1] - expected[:same + 1]).abs().max().item()
        if difference > TOLERANCE:
            raise Failed(f"logits differ by {difference:.2g}; the tolerance is {TOLERANCE:g}")
        equal = f"texts and {len(tokens)} tokens are equal"
        if same < len(tokens):
            equal = f"texts are equal, tokens up to {same}, where two are equally likely within the tolerance"
        return f"{equal}; logits differ by {difference:.2g} at most (tolerance {TOLERANCE:g}, of {expected.abs().max():.0f})"

    def weights(self, device):
        """Weights in the device's memory, which outlive the process that has loaded them."""
        self.need_torch(device)
        _, output = self.run([sys.executable, HERE / "weights.py", device, WEIGHTS_MIB[device]],
                             PATH=f"{self.build / 'bin'}:{os.environ['PATH']}")
        return last_lines(output, 1)

    def replace(self, device, weights):
        """Kills a rank with kill -9 under prompts, whose texts stay right."""
        self.need_torch(device)
        if ("cpu", 1) not in self.texts:
            raise Skipped("there is nothing to compare with")
        name = f"gpu-check-{os.getpid()}"
        command = [str(word) for word in (self.build / COMMAND, "run", "--name", name,
                                          *self.options_of(device, 2, weights), "--start-timeout",
                                          int(90 * self.scale), "--model", SUMS, "--on-death", "restart")]
        self.log.write(f"$ {' '.join(command)}\n")
        prompts = "\n".join(SUM_PROMPTS) + "\n"
        # Its own output goes to the log; lines "rank N pid P" are for us.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True,
                              env={**self.environment, "PATH": f"{self.build / 'bin'}:{os.environ['PATH']}"},
                              cwd=ROOT) as group:
            watchdog = threading.Timer(self.left(), group.kill)
            watchdog.start()
            try:
                pids = {}
                for line in group.stdout:
                    self.log.write(line)
                    found = re.match(r"rank (\d+) pid (\d+)", line)
                    if found:
                        pids[int(found[1])] = int(found[2])
                    if len(pids) == 2:
                        break
                if len(pids) != 2:
                    raise Failed("the group has not started")
                return self.kill_one(name, pids, prompts)
            finally:
                watchdog.cancel()
                group.terminate()
                try:
                    group.wait(20)
                except subprocess.TimeoutExpired:
                    group.kill()

    def kill_one(self, name, pids, prompts):
        generate = [self.build / COMMAND, "generate", "--quiet", "--name", name, "--sequences", "1"]
        _, expected = self.run([*generate, "-"], stdin=prompts)
        if not expected.startswith(self.texts["cpu", 1].splitlines()[0]):
            raise Failed("the text is wrong before the death")
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as stdin:
            stdin.write(prompts)
            stdin.seek(0)
            with subprocess.Popen([*generate, "-"], stdin=stdin, stdout=output, stderr=self.log,
                                  env=self.environment, cwd=ROOT) as prompting:
                try:
                    before = self.state(name)["sequence"]
                    self.wait_for(name, prompting, lambda state: state["sequence"] > before + 10)
                    os.kill(pids[1], signal.SIGKILL)
                    begin = time.monotonic()
                    at_death = self.state(name)["sequence"]
                    self.wait_for(name, prompting,
                                  lambda state: state["restarts"] == [0, 1] and state["sequence"] > at_death + 10)
                    pause = time.monotonic() - begin
                    if prompting.wait(self.left()):
                        raise Failed(f"the prompts failed: exit status {prompting.returncode}")
                finally:
                    prompting.kill()
            output.seek(0)
            if output.read() != expected:
                raise Failed("the texts differ from those without a death")
        return f"{len(SUM_PROMPTS)} texts are equal; 10 steps after the death were done {pause:.1f} s after it"

    def state(self, name):
        # 4: a rank is dead, or being replaced.
        _, text = self.run([self.build / COMMAND, "status", "--json", "--name", name], statuses=(0, 4))
        ranks = json.loads(text)["ranks"]
        return {"restarts": [rank["restarts"] for rank in ranks],
                "sequence": min(rank["channels"]["execute"]["sequence"] for rank in ranks)}

    def wait_for(self, name, process, condition):
        while not condition(self.state(name)):
            if process.poll() is not None:
                raise Failed("the prompts ended before the rank was replaced")

    # ---- the whole ----

    def machine(self):
        """Lines about this machine."""
        def first(*command):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
                lines = (done.stdout or done.stderr).strip().splitlines()
                return lines if done.returncode == 0 and lines else ["none"]
            except (OSError, subprocess.TimeoutExpired):
                return ["none"]

        model = re.search(r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        gpu = first("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        if importlib.util.find_spec("torch"):
            import torch
            torch_version = f"{torch.__version__}, sees {torch.cuda.device_count()} GPUs"
        else:
            torch_version = "none"
        commit = first("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")[0]
        return [f"date: {time.strftime('%Y-%m-%d')}", f"commit: {commit}",
                f"GPU, driver, memory: {'; '.join(gpu)}",
                f"kernel: {platform.release()}, glibc {platform.libc_ver()[1]}",
                f"processor: {model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
                f"Python {platform.python_version()}, torch {torch_version}",
                f"gcc: {first('gcc', '-dumpfullversion')[0]}, CMake: {first('cmake', '--version')[0].split()[-1]}, "
                f"nvcc: {first('nvcc', '--version')[-1]}"]

    def write(self, machine):
        failed = [row[0] for row in self.rows if row[1] == "FAILED"]
        lines = ["# GPU check", "", *(f"- {line}" for line in machine), "",
                 "| step | result | seconds | detail |", "|---|---|---:|---|",
                 *(f"| {name} | {result} | {taken:.1f} | {detail} |" for name, result, taken, detail in self.rows)]
        (self.out / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{self.out}/results.md: {'failed: ' + ', '.join(failed) if failed else 'nothing failed'}", flush=True)
        return 1 if failed else 0

    def main(self):
        machine = self.machine()
        print("\n".join(machine), flush=True)
        try:
            self.step("build", 200, self.compile)
            self.step("CUDA domain, stand-in for the driver", 30, self.stand_in)
            for name, among in (("one process", False), ("two processes", True)):
                self.step(f"device memory, {name}", 60, self.domain_row,
                          lambda test, among=among: (test in BETWEEN_PROCESSES) == among, "libcuda.so.1")
            for device in "cpu", "cuda:0":
                for ranks in 1, 2:
                    self.step(f"PyTorch worker, {device}, {ranks} rank{'s' * (ranks > 1)}", 90, self.generate,
                              device, ranks)
                for weights in "private", "shared":
                    self.step(f"a rank killed and replaced, {device}, {weights} weights", 90, self.replace, device,
                              weights)
                self.step(f"weights outlive their process, {device}", 90, self.weights, device)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
            status = self.write(machine)
        return status


def main():
    parser = argparse.ArgumentParser(prog="sh tools/gpu-check", allow_abbrev=False)
    parser.add_argument("--build", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--out", type=lambda path: pathlib.Path(path).resolve(), default=ROOT / "build" / "gpu-check")
    parser.add_argument("--minutes", type=float, default=8)
    return Check(parser.parse_args()).main()


if __name__ == "__main__":
    supervise(main)
