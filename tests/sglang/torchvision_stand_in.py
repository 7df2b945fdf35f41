"""A stand-in for torchvision, of which PyPI has no build that fits torch for CPUs; tools/sglang
installs it. Names are there, and do nothing: SGLang and Transformers import them for images."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0"


class _Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _named
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
__getattr__ = _named
