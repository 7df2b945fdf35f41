"""Builds the C library from the tree and puts it into the extension module, by CMake.

Of the checkout, `pip install ./python` needs a C compiler, protobuf-c and protoc-c (Debian:
libprotobuf-c-dev, protobuf-c-compiler). An sdist carries the C sources in source/.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
# Relative to the root of the tree: what the library is built from.
SOURCES = [
    "CMakeLists.txt",
    "LICENSE",
    "channel",
    "cmake",
    "coordinator",
    "include",
    "proto",
    "worker",
]


def tree() -> pathlib.Path:
    """The root of the C sources: those of an sdist, or the checkout's."""
    return HERE / "source" if (HERE / "source").is_dir() else HERE.parent


def scratch() -> pathlib.Path:
    folder = tree() / "build" / "python-package"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def version() -> str:
    text = (tree() / "CMakeLists.txt").read_text()
    found = re.search(r"project\(coxswain\s+VERSION (\S+)", text)
    assert found
    return found[1]


class BuildByCMake(build_ext):
    """Configures and builds the target coxswain_python."""

    def build_extension(self, ext: Extension) -> None:
        for command in ("cmake", "protoc-c"):
            if not shutil.which(command):
                sys.exit(
                    f"coxswain: building needs {command} (Debian: cmake, protobuf-c-compiler, "
                    "libprotobuf-c-dev)"
                )
        folder = pathlib.Path(self.build_temp).resolve()
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(
            [
                "cmake",
                "-S",
                str(tree()),
                "-B",
                str(folder),
                *generator,
                "-D",
                "CMAKE_BUILD_TYPE=RelWithDebInfo",
                "-D",
                "COX_BUILD_TESTS=OFF",
                "-D",
                "COX_BUILD_BENCH=OFF",
                "-D",
                "COX_BUILD_COMMANDS=OFF",
                "-D",
                "COX_BUILD_MAN=OFF",
                # a package of its own, which the extension opens when a group has nodes
                "-D",
                "COX_NODES=OFF",
                "-D",
                "COX_BUILD_PYTHON=ON",
                "-D",
                f"COX_PYTHON={sys.executable}",
                "-D",
                f"COX_PYTHON_SOURCE={HERE}",
            ],
            check=True,
        )
        subprocess.run(
            [
                "cmake",
                "--build",
                str(folder),
                "--target",
                "coxswain_python",
                "--parallel",
                str(os.cpu_count() or 1),
            ],
            check=True,
        )
        target = pathlib.Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / "python" / "coxswain" / "_native.abi3.so", target)
        subprocess.run(["strip", "--strip-unneeded", str(target)], check=False)


class SdistWithSources(sdist):
    """Adds the C sources."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name in [*SOURCES, "python"]:
            source, target = tree() / name, pathlib.Path(base_dir, "source", name)
            if name == "python":  # CMake's part of it
                source, target = HERE / "CMakeLists.txt", target / "CMakeLists.txt"
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(
                    source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy2(source, target)


class Platform(Distribution):
    """The wheel is of this platform, and of every CPython from 3.11 on."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    version=version(),
    packages=["coxswain"],
    package_data={"coxswain": ["py.typed", "*.pyi"]},
    ext_modules=[Extension("coxswain._native", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildByCMake, "sdist": SdistWithSources},
    distclass=Platform,
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        # Nothing is written beside the sources of a checkout.
        **(
            {}
            if tree() != HERE.parent
            else {"build": {"build_base": str(scratch())}, "egg_info": {"egg_base": str(scratch())}}
        ),
    },
)
