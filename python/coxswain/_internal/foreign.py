"""Finds the distribution `coxswain` of PyPI, another project, whose package has the name of ours.

pip puts both into one folder, and the `__init__.py` of the one that is installed last wins. If that
is theirs, importing a module of ours fails. If it is ours, a warning says that theirs is broken.
"""

import os
import sys
import warnings

_REMEDY = (
    "the project 'coxswain' of PyPI is another one than 'coxswain-executor', and both install the "
    "package coxswain: run 'pip uninstall -y coxswain', and then "
    "'pip install --force-reinstall --no-deps coxswain-executor'"
)


def check(package: str) -> None:
    """package: the file of one of our modules."""
    if not hasattr(sys.modules["coxswain"], "__distribution__"):
        raise ImportError(_REMEDY)
    try:
        names = os.listdir(os.path.dirname(os.path.dirname(package)))
    except OSError:  # a folder that may not be listed
        return
    if any(name.startswith("coxswain-") and name.endswith(".dist-info") for name in names):
        warnings.warn(_REMEDY, stacklevel=sys.maxsize)
