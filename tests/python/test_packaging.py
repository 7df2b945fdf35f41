"""The wheel and the sdist: built, installed into an empty environment, and used there."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GLIBC_MAX = (2, 35)  # Ubuntu 22.04
PROGRAM = """
import coxswain, sys
assert coxswain.__file__.startswith(sys.prefix), coxswain.__file__

def worker():
    coxswain.serve(lambda data: bytes(data).upper())

if __name__ == "__main__":
    with coxswain.Group(worker, ranks=2) as group:
        print(group.call(b"hello", timeout=30))
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", name="builder")
def make_builder(tmp_path_factory):
    """Builds without an index: what pyproject.toml requires comes from Debian's packages."""
    folder = tmp_path_factory.mktemp("dist")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def build(kind, source, to):
        run(
            sys.executable,
            "-c",
            f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(to)!r}))",
            cwd=source,
            env=environment,
        )
        (made,) = (path for path in to.iterdir() if path.is_file())
        return made

    return folder, build


@pytest.fixture(scope="module", name="wheel")
def make_wheel(builder):
    folder, build = builder
    (folder / "wheel").mkdir()
    return build("wheel", ROOT / "python", folder / "wheel")


def use(wheel, folder):
    """Installs a wheel into an empty environment, and runs a group there."""
    venv.create(folder / "env", with_pip=False)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    import _cffi_backend
    import cffi

    for module in (_cffi_backend.__file__, os.path.dirname(cffi.__file__)):
        (site / os.path.basename(module)).symlink_to(module)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert (
        run(folder / "env" / "bin" / "python", program, env=environment, cwd=folder)
        == "[b'HELLO', b'HELLO']\n"
    )


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    assert re.fullmatch(r"coxswain-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    use(wheel, tmp_path)


def test_the_wheel_needs_nothing_of_ours_and_no_new_glibc(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        module = archive.extract("coxswain/_native.abi3.so", tmp_path)
    assert "coxswain/py.typed" in names and "coxswain/_native.pyi" in names
    needed = re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", module))
    assert all(re.match(r"lib(c|pthread|rt|dl)\.so|ld-linux", name) for name in needed), needed
    symbols = run("objdump", "-T", module)
    versions = {
        tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_(\d[\d.]*)", symbols)
    }
    assert max(versions) <= GLIBC_MAX, versions
    exported = re.findall(r"^\S+ g .*\.text\s+\S+\s+(?:\S+\s+)?(\S+)$", symbols, re.M)
    assert exported == ["PyInit__native"], exported


def test_the_sdist_builds_without_the_checkout(builder, tmp_path):
    folder, build = builder
    (folder / "sdist").mkdir()
    sdist = build("sdist", ROOT / "python", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (tmp_path / "made").mkdir()
    use(build("wheel", source, tmp_path / "made"), tmp_path)
