"""The dispatch table is complete: every method of the built-in containers and every built-in function has a row, folds, or is listed as a break."""

from __future__ import annotations

import builtins
import collections
import itertools
import operator
import types

import pytest
import torch

from magneto.dynamo.trackers.dispatch import PURE, TABLE
from magneto.dynamo.trackers.torch_calls import is_graph_callable

CONTAINERS = (list, tuple, dict, collections.OrderedDict, set, frozenset, collections.deque)

# Methods that break, with the reason.
METHODS_THAT_BREAK = {
    "__class_getitem__": "a generic alias is a class-level matter",
    "__sizeof__": "an address-level question",
    "__reversed__": "reached through reversed()",
    "rotate": "rare",
    "extendleft": "rare",
}
BUILTINS_THAT_BREAK = {
    **dict.fromkeys(
        ("eval", "exec", "compile", "open", "input", "breakpoint", "__import__", "__build_class__", "help"),
        "they do what only Python can do",
    ),
    **dict.fromkeys(("memoryview", "bytearray", "aiter", "anext", "copyright", "credits", "license", "exit", "quit"), "no part of a model"),
    **dict.fromkeys(("classmethod", "staticmethod", "property", "object"), "classes handled where they are met"),
}


@pytest.mark.parametrize("cls", CONTAINERS, ids=lambda cls: cls.__name__)
def test_every_method_of_a_container_is_known(cls: type) -> None:
    kinds = (types.MethodDescriptorType, types.ClassMethodDescriptorType)
    unknown = [
        name
        for name, raw in vars(cls).items()
        if isinstance(raw, kinds) and raw not in TABLE and raw not in PURE and getattr(cls, name) not in TABLE and not name.startswith("__")
    ]
    assert set(unknown) <= set(METHODS_THAT_BREAK), unknown


def test_every_builtin_function_is_known() -> None:
    unknown = []
    for name, fn in vars(builtins).items():
        if not callable(fn) or name.startswith("_") or (isinstance(fn, type) and issubclass(fn, BaseException)):
            continue
        if fn not in TABLE and fn not in PURE and name not in BUILTINS_THAT_BREAK:
            unknown.append(name)
    assert not unknown


def test_every_operator_is_known() -> None:
    names = [name for name in operator.__all__ if name not in ("concat", "iconcat", "countOf", "indexOf", "length_hint", "call")]
    assert not [name for name in names if getattr(operator, name) not in TABLE and getattr(operator, name) not in PURE]


def test_the_itertools_are_known() -> None:
    public = [name for name, fn in vars(itertools).items() if isinstance(fn, type) and not name.startswith("_")]
    assert not [name for name in public if getattr(itertools, name) not in TABLE and name != "batched"]


def test_functions_of_torch_are_nodes() -> None:
    names = ["relu", "add", "matmul", "einsum", "split", "cat", "zeros", "arange", "rand", "nn.functional.dropout", "nn.functional.linear"]
    names += [
        "nn.functional.max_pool2d",
        "nn.functional.scaled_dot_product_attention",
        "nn.functional.layer_norm",
        "linalg.norm",
        "fft.fft",
    ]
    for name in names:
        fn: object = torch
        for part in name.split("."):
            fn = getattr(fn, part)
        assert is_graph_callable(fn), name
    for fn in (torch.nn.Linear.forward, torch.nn.init.zeros_, len, torch.compile, torch._C._set_grad_enabled):
        assert not is_graph_callable(fn), fn


def test_keyword_names_never_collide_with_rules() -> None:
    """A rule's own parameter names must not catch the program's keywords (dict(m=1))."""
    import magneto

    def program(x: torch.Tensor) -> object:
        d = dict(m=1, v=2, fn=3, self=4, args=5)
        d.update(m=6, v=7)
        return x * d["m"], d, "{m}{v}".format(m=1, v=2), "{self}".format(self=3)

    x = torch.ones(2)
    result = magneto.optimize("eager", nopython=True)(program)(x)
    assert result[1:] == program(x)[1:]
