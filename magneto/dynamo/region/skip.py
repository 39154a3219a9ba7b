"""Which code is never an entry point: Python itself, torch's own Python, this package, generated code. (It may still be inlined.)"""

from __future__ import annotations

import os
import sysconfig
from types import CodeType

import torch

from magneto.base.flags import config

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_NEVER = ("numpy", "scipy", "pytest", "_pytest", "pluggy", "hypothesis", "torch_magneto", "IPython", "tqdm", "rich")
_TORCH_ENTRY = (os.path.join("nn", "modules") + os.sep,)
_MODULE_MACHINERY = {"_call_impl", "_wrapped_call_impl", "__setattr__", "__getattr__", "__delattr__"}
_TORCH_USER = ("torch/optim/", "torch/distributions/")


def skip_reason(code: CodeType) -> str | None:
    """Why frames of this code are left to CPython, or None."""
    file = code.co_filename
    if file.startswith("<") and not file.startswith(("<stdin", "<string", "<ipython", "<input", "<doctest")):
        return "generated code"
    if file.startswith(_OURS):
        return "magneto's own code"
    if file.startswith(_TORCH):
        inside = file[len(_TORCH) :]
        if inside.startswith(_TORCH_ENTRY) and code.co_name not in _MODULE_MACHINERY:
            return None
        return "torch's own code"
    for mark in _SITE:
        if mark in file:
            package = file.split(mark, 1)[1].split(os.sep, 1)[0]
            return f"library {package}" if package in _NEVER else _configured(file)
    if file.startswith(_STDLIB):
        return "standard library"
    return _configured(file)


def _configured(file: str) -> str | None:
    for part in filter(None, (part.strip() for part in config.skip_files.split(","))):
        if part in file:
            return f"skip_files: {part}"
    return None
