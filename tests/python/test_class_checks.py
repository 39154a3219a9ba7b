"""isinstance and issubclass of objects that stand for classes, and modules with a `__getattr__`: the program's own Python, run where the program asks."""

from __future__ import annotations

import collections
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import magneto
from tests.python.programs import Programs, check

programs = Programs()
Pair = collections.namedtuple("Pair", "first second")


class Multiples:
    """Stands for the numbers that a number divides; notes what it is asked."""

    def __init__(self, of: int) -> None:
        self.of = of
        self.log: list[Any] = []

    def __instancecheck__(self, obj: Any) -> Any:
        self.log.append(obj)
        return not obj % self.of

    def __subclasscheck__(self, cls: type) -> Any:
        self.log.append(cls.__name__)
        return cls is int


class Refusing:
    def __instancecheck__(self, obj: Any) -> bool:
        raise LookupError(f"{obj} is not to be asked for")


@programs.add(torch.ones(3), 4, Multiples(2))
@programs.add(torch.ones(3), 4, Multiples(3))
def an_object_stands_for_a_class(x, n, multiples):
    found = [
        isinstance(n, multiples),
        isinstance(n, (str, multiples)),
        isinstance(n, (int, multiples)),
        isinstance(n, (float, (str, (multiples,)))),
        isinstance(n, Pair(str, multiples)),
        issubclass(int, multiples),
        issubclass(bool, (str, multiples)),
    ]
    return x + sum(found), found, list(multiples.log)


@programs.add()
def an_object_made_here_stands_for_a_class(x):
    multiples = Multiples(3)
    return x + isinstance(6, multiples), isinstance(7, multiples), issubclass(str, multiples), multiples.log


@programs.add()
def what_the_check_raises(x):
    try:
        isinstance(3, (str, Refusing()))
    except LookupError as error:
        return x + 1, error.args
    return x, None


@programs.add()
def aliases_of_typing_stand_for_classes(x):
    found = [
        isinstance([], typing.List),  # noqa: UP006
        isinstance((1,), typing.Sequence),  # noqa: UP006
        isinstance(len, typing.Callable),  # noqa: UP006
        isinstance(3, typing.Union[int, str]),  # noqa: UP007
        isinstance("a", typing.Optional[int]),  # noqa: UP045
        isinstance(3, int | str),
        issubclass(list, typing.Sequence),  # noqa: UP006
        issubclass(int, typing.Hashable),  # noqa: UP006
    ]
    return x + sum(found), found


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_programs(program):
    check(program)


CHECKS = [
    *(
        (3, info)
        for info in (list[int], (int, 4), ("a", int), typing.Any, typing.List[int], typing.Union, typing.TypeVar("T"), typing.Optional[int])
    ),  # noqa: UP006, UP045
    *((obj, info) for info in (None, (str, (int,)), ((),), typing.Literal[3], typing.Callable) for obj in (3, None, len)),
    *(([], info) for info in (list[int], typing.List, typing.Tuple[int], [list])),  # noqa: UP006
]


def _answer(ask: Callable[..., Any], obj: Any, info: Any) -> Any:
    try:
        return ask(obj, info)
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("ask", [isinstance, issubclass])
def test_what_a_check_refuses_does_not_depend_on_the_first_call(ask: Callable[..., Any]) -> None:
    """An error, too, holds for the types of the arguments it came from."""
    compiled = magneto.optimize("eager")(_answer)
    with magneto.config.patch(recompile_limit=200):
        for first, info in CHECKS:
            for obj in (first, type(first), "text", str, first):
                assert compiled(ask, obj, info) == _answer(ask, obj, info), (obj, info)


# -- modules with a __getattr__

NAMES: list[str] = []


def _attribute_of_the_module(name: str) -> Any:
    NAMES.append(name)
    if name == "double":
        return lambda x: x * 2
    if name == "kept":
        sys.modules["magneto_test_asked"].kept = 7  # type: ignore[attr-defined]
        return 7
    if name == "old":
        warnings.warn("old is gone", DeprecationWarning, stacklevel=2)
        return 5
    raise AttributeError(f"no {name} here")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("magneto_test_asked")
    module.here = 1  # type: ignore[attr-defined]
    module.__getattr__ = _attribute_of_the_module  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    NAMES.clear()
    yield module


def _ask(module: Any, x: torch.Tensor) -> Any:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y = module.double(x) + module.kept + module.old + getattr(module, "missing", 3)
    try:
        module.missing
    except AttributeError as error:
        refused = error.args, error.name, error.obj is module
    places = [(str(warning.message), warning.filename, warning.lineno) for warning in said]
    return y.tolist(), refused, hasattr(module, "gone"), hasattr(module, "here"), places


def test_a_module_is_asked_at_each_call(asked: types.ModuleType) -> None:
    """Not once while capturing: what it does is the program's business, and the warning names the program's line."""
    results = []
    for fn in (_ask, magneto.optimize("eager")(_ask)):
        vars(asked).pop("kept", None)
        for _ in range(3):
            NAMES.clear()
            results.append((fn(asked, torch.ones(2)), list(NAMES)))
    assert results[:3] == results[3:]


def test_a_name_that_the_module_gets_later_is_seen(asked: types.ModuleType) -> None:
    def fn(x):
        return x * getattr(asked, "factor", 2)

    compiled = magneto.optimize("eager", nopython=True)(fn)
    found = [compiled(torch.ones(())).item()]
    asked.factor = 5  # type: ignore[attr-defined]
    found.append(compiled(torch.ones(())).item())
    del asked.factor
    found.append(compiled(torch.ones(())).item())
    assert found == [2.0, 5.0, 2.0]
