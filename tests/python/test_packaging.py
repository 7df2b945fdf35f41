"""The distribution as pip installs it: from the checkout, from the sdist, from the wheel.

All is built and used by a user who may not write into the checkout, where the tests run as root.
The wheel of a release, and bare Debian 12 and 13, are the matter of tools/release.
"""

import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GLIBC_MAX = (2, 34)
NOBODY = {"user": 65534, "group": 65534, "extra_groups": ()} if os.getuid() == 0 else {}
PROGRAM = """
import coxswain, sys

def worker():
    coxswain.serve(lambda data: bytes(data).upper())

if __name__ == "__main__":
    with coxswain.Group(worker, ranks=2) as group:
        assert group.call(b"hello", timeout=60) == [b"HELLO", b"HELLO"]
    print(coxswain.__file__)
"""
OTHER = '"""The package of another project."""\n'


def attempt(*command, path=None, **options):
    """As that user, with nothing of this process's environment but what pip's registry needs."""
    environment = {
        name: os.environ[name] for name in os.environ if re.match(r"(?i)PIP_|\w+_proxy$", name)
    }
    environment.update(
        PATH=path or "/usr/bin:/bin",
        HOME="/nonexistent",
        PIP_NO_CACHE_DIR="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PYTHONDONTWRITEBYTECODE="1",
    )
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        **{"cwd": "/", **NOBODY, **options},
    )


def run(*command, **options):
    done = attempt(*command, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class Environment:
    """A virtual environment, whose path has a space."""

    def __init__(self, folder, name):
        self.path = folder / f"{name} environment"
        run(sys.executable, "-m", "venv", self.path)
        (self.site,) = self.path.glob("lib/python*/site-packages")
        self.package = self.site / "coxswain"
        self.program = folder / "program.py"

    def bin(self, name):
        return self.path / "bin" / name

    def pip(self, *arguments, **options):
        return run(self.bin("pip"), *arguments, **options)

    def works(self):
        """The commands, and a group; returns the file of the package."""
        assert "27+58=85" in run(self.bin("coxswain"), "generate", "--quiet", "-n", "4", "27+58=")
        assert "--socket" in run(self.bin("coxswain-worker"), "--help")
        assert "coxswain-nats.conf" in run(self.bin("coxswain-certificates"), "--help")
        version = run(self.bin("coxswain"), "--version")
        assert run(self.bin("python"), "-m", "coxswain", "--version") == version
        return pathlib.Path(run(self.bin("python"), self.program).strip())


@pytest.fixture(scope="module", name="folder")
def make_folder():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="coxswain packaging "))
    (folder / "program.py").write_text(PROGRAM)
    if NOBODY:
        os.chown(folder, NOBODY["user"], NOBODY["group"])
        if attempt("test", "-r", ROOT / "pyproject.toml").returncode:
            print(f"{ROOT} cannot be read by another user: what follows is done as this one")
            NOBODY.clear()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", name="environment")
def make_environment(folder):
    """With what builds, so that all builds here can have one build folder."""
    environment = Environment(folder, "building")
    project = (ROOT / "pyproject.toml").read_text()
    requires = re.findall(r'"([^"]+)"', re.search(r"^requires = \[(.*)\]", project, re.M)[1])
    got = attempt(environment.bin("pip"), "install", "-q", *requires)
    if got.returncode:
        pytest.skip(f"PyPI is not reached: {got.stderr.strip().splitlines()[-1]}")
    environment.options = (
        "-q",
        "--no-build-isolation",
        "--config-settings",
        f"build-dir={folder}/build",
    )
    return environment


@pytest.fixture(scope="module", name="wheel")
def make_wheel(folder, environment):
    def files():
        return {
            path
            for path in ROOT.rglob("*")
            if path.relative_to(ROOT).parts[0] not in ("build", ".git")
        }

    before = files()
    environment.pip("wheel", *environment.options, "--no-deps", "-w", folder / "wheel", ROOT)
    assert files() <= before, "the build writes into the checkout"
    (wheel,) = (folder / "wheel").iterdir()
    return wheel


def changed(wheel, folder, **texts):
    """A wheel of an older version, with other files."""
    older = folder / wheel.name.replace("0.1.0", "0.0.9")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(older, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            info.filename = info.filename.replace(
                "coxswain_executor-0.1.0", "coxswain_executor-0.0.9"
            )
            if info.filename.endswith("METADATA"):
                data = data.replace(b"Version: 0.1.0", b"Version: 0.0.9")
            if info.filename.endswith("RECORD"):
                data = data.replace(b"executor-0.1.0", b"executor-0.0.9")
                data += "".join(f"coxswain/{name}.py,,\n" for name in texts).encode()
            target.writestr(info, data)
        for name, text in texts.items():
            target.writestr(f"coxswain/{name}.py", text)
    return older


def test_the_wheel_is_for_every_cpython_and_no_new_glibc(wheel, tmp_path):
    assert re.fullmatch(r"coxswain_executor-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert "License-Expression: Apache-2.0\n" in metadata and "\nLicense: " not in metadata
    data = next(tmp_path.glob("*.data/data"))
    assert (data / "share/man/man1/coxswain.1").exists()
    assert (data / "share/bash-completion/completions/coxswain").exists()
    assert {"coxswain/py.typed", "coxswain/include/coxswain/coxswain.h"} <= set(names)
    binaries = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.open("rb").read(4) == b"\x7fELF"
    ]
    assert {
        "_native.abi3.so",
        "coxswain",
        "coxswain-worker",
        "libcoxswain.so.0",
        "libcoxswain-memory.so.0",
    } <= {path.name for path in binaries}
    for path in binaries:
        symbols = run("objdump", "-T", path, **({} if not NOBODY else {"user": 0, "group": 0}))
        versions = re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)
        assert max((int(major), int(minor)) for major, minor in versions) <= GLIBC_MAX, path
    module = tmp_path / "coxswain" / "_native.abi3.so"
    needed = re.findall(
        r"NEEDED.*\[(.+)\]", subprocess.check_output(["readelf", "-d", module], text=True)
    )
    assert all(re.match(r"lib(c|pthread|rt|dl)\.so|ld-linux", name) for name in needed), needed
    symbols = subprocess.check_output(["objdump", "-T", module], text=True)
    exported = re.findall(r"^\S+ g .*\.text\s+\S+\s+(?:\S+\s+)?(\S+)$", symbols, re.M)
    assert sorted(exported) == ["PyInit__native", "PyInit__plain"], exported


def test_the_checkout_is_installed_again_and_again(environment, wheel):
    for _ in range(2):
        environment.pip("install", *environment.options, ROOT)
        assert environment.works() == environment.package / "__init__.py"


def test_an_editable_install_has_the_files_of_the_checkout(environment, wheel):
    environment.pip("install", *environment.options, "-e", ROOT)
    assert environment.works() == ROOT / "python" / "coxswain" / "__init__.py"
    environment.pip("uninstall", "-q", "-y", "coxswain-executor")
    assert not environment.package.exists() and not environment.bin("coxswain").exists()


def test_the_wheel_is_installed_over_an_older_one_and_cannot_be_written(folder, wheel, environment):
    used = Environment(folder, "used")
    used.pip("install", "-q", changed(wheel, folder, gone="", _group="raise SystemExit(1)\n"))
    assert (used.package / "gone.py").exists()
    used.pip("install", "-q", "--upgrade", wheel)
    assert not (used.package / "gone.py").exists()
    run("chmod", "-R", "a-w", used.path)
    try:
        assert attempt("touch", used.site / "new").returncode
        assert used.works() == used.package / "__init__.py"
    finally:
        run("chmod", "-R", "u+w", used.path)


@pytest.mark.parametrize("last", ["ours", "theirs"])
def test_the_other_project_of_that_name_is_told_of(folder, wheel, environment, last):
    used = Environment(folder, last)
    other = folder / "coxswain-0.28.0-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("coxswain/__init__.py", OTHER)
        named = "coxswain-0.28.0.dist-info/"
        archive.writestr(
            named + "METADATA", "Metadata-Version: 2.1\nName: coxswain\nVersion: 0.28.0\n"
        )
        archive.writestr(
            named + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            named + "RECORD",
            f"coxswain/__init__.py,,\n{named}METADATA,,\n{named}WHEEL,,\n{named}RECORD,,\n",
        )
    for each in (other, wheel) if last == "ours" else (wheel, other):
        used.pip("install", "-q", each)
    module = "coxswain" if last == "ours" else "coxswain._internal.group"
    said = attempt(used.bin("python"), "-c", f"import {module}")
    assert said.returncode == (0 if last == "ours" else 1)
    (line,) = (line for line in said.stderr.splitlines() if "pip uninstall -y coxswain" in line)
    assert "another one than 'coxswain-executor'" in line
    used.pip("uninstall", "-q", "-y", "coxswain")
    used.pip("install", "-q", "--force-reinstall", "--no-deps", wheel)
    assert run(used.bin("python"), "-W", "error", "-c", "import coxswain; coxswain.Group") == ""


def test_the_sdist_needs_a_compiler_alone(folder, environment):
    """Without protoc-c, pkg-config and the libraries of the commands. They say what is missing."""
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (
        "channel",
        "cmake",
        "coordinator",
        "docs",
        "engine",
        "include",
        "memory",
        "models",
        "nodes",
    ):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("packaging", "program", "proto", "python", "worker"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("CMakeLists.txt", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    if NOBODY:
        subprocess.check_call(["chown", "-R", str(NOBODY["user"]), copy])
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    run(environment.bin("python"), "-c", code, cwd=copy)
    (sdist,) = folder.glob("coxswain_executor-*.tar.gz")
    tools = folder / "tools"
    tools.mkdir()
    compiler = sysconfig.get_config_var("CC").split()[0]
    for tool in (compiler, "as", "ld", "ar", "ranlib", "strip", "cmake", "ninja", "sh", "uname"):
        (tools / tool).symlink_to(shutil.which(tool, path="/usr/bin"))
    used = Environment(folder, "compiled")
    used.pip("install", "-q", "scikit-build-core", "cffi")
    # CMake looks beside PATH, too.
    hidden = ("--config-settings", "cmake.define.CMAKE_IGNORE_PATH=/usr/bin;/bin")
    used.pip("install", "-q", "--no-build-isolation", *hidden, sdist, path=str(tools))
    assert run(used.bin("python"), used.program)
    said = attempt(used.bin("coxswain"), "--version")
    assert said.returncode == 1 and "apt-get install pkg-config" in said.stderr, said.stderr


@pytest.mark.parametrize("minor", [12, 13, 14])
def test_another_cpython(folder, wheel, environment, minor):
    """One abi3 wheel for all. Of pyenv, or in PATH."""
    found = shutil.which(f"python3.{minor}", path="/usr/bin:/usr/local/bin")
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = found or next(iter(glob.glob(f"{pyenv}/versions/3.{minor}*/bin/python3")), None)
    if not found:
        pytest.skip(f"no CPython 3.{minor} here, and Debian 12 has none (tools/release tries 3.13)")
    site = folder / f"site{minor}"
    as_this_user = {"user": None, "group": None, "extra_groups": None}
    target = ("--target", site, "--only-binary", ":all:", "--python-version", f"3.{minor}")
    run(environment.bin("pip"), "install", "-q", *target, wheel, **as_this_user)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    (folder / f"program{minor}.py").write_text(code + PROGRAM)
    assert str(site) in run(found, folder / f"program{minor}.py", **as_this_user)
