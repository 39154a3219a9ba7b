"""Our dataclasses behave as the standard library's, and compile their methods only when they are called."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from magneto.base.dataclass import dataclass, field, fields, replace

OPTIONS = [{"frozen": f, "slots": s, "eq": e} for f in (False, True) for s in (False, True) for e in (False, True)]


def classes(**options: Any) -> list[Any]:
    """The same class twice: the standard library's and ours."""
    made = []
    for decorate in (dataclasses.dataclass, dataclass):

        @decorate(**options)
        class Row:
            a: int
            b: str = "b"
            hidden: tuple[int, ...] = field(default=(), compare=False, repr=False)
            rows: list[int] = field(default_factory=list, compare=False)
            later: int = field(init=False, default=7)
            named: int = field(kw_only=True, default=3)

            def __post_init__(self) -> None:
                object.__setattr__(self, "later", self.a + 1)

        made.append(Row)
    return made


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_as_the_standard_library(options: dict[str, bool]) -> None:
    for probe in (
        lambda c: repr(c(1, named=5)),
        lambda c: (c(1) == c(1), c(1) == c(2), c(1) == c(1, "b", (4,)), c(1) != c(1), c(1) == 1),
        lambda c: hash(c(1)) == hash(c(1, "b", (9,))) if options["eq"] else hash(c(1)) is not None,
        lambda c: setattr(c(1), "a", 2),
        lambda c: delattr(c(1), "a"),
        lambda c: c(),
        lambda c: c(1, "x", (), [], 5),
        lambda c: c(1, unknown=2),
        lambda c: repr(replace(c(1, "x"), a=5)),
        lambda c: [f.name for f in fields(c)],
        lambda c: c.__match_args__,
        lambda c: repr(copy.copy(c(4, "y"))),
        lambda c: c(1).rows is c(1).rows,
        lambda c: hasattr(c(1), "__dict__"),
        lambda c: (c.__hash__ is None, c.__init__.__name__ == "x"),
        lambda c: dataclasses.asdict(c(1)),
    ):
        wanted, got = (outcome(lambda cls=cls, probe=probe: probe(cls)) for cls in classes(**options))
        assert got == wanted


@dataclass(frozen=True, slots=True)
class Base:
    x: int


@dataclass(frozen=True, slots=True)
class Derived(Base):
    y: int = 2

    def __hash__(self) -> int:
        return 5


@dataclass
class Named:
    x: int

    def __repr__(self) -> str:
        return "named"

    def __eq__(self, other: object) -> bool:
        return True


def test_inherited_and_own_methods() -> None:
    assert repr(Derived(1)) == "Derived(x=1, y=2)" and hash(Derived(1)) == 5 and Derived(1) == Derived(1, 2)
    assert Derived(1) != Base(1) and hash(Base(1)) == hash((1,)) and pickle.loads(pickle.dumps(Derived(3, 4))) == Derived(3, 4)
    assert repr(Named(1)) == "named" and Named(1) == 3 and Named.__hash__ is None


def test_methods_are_made_when_they_are_called() -> None:
    (_, ours) = classes(frozen=True, slots=True)
    waiting = ours.__init__
    ours(1)
    assert ours.__init__ is not waiting and ours.__init__.__code__.co_filename == "<string>"
    again = ours.__hash__
    assert hash(ours(1)) == again(ours(1)) and ours.__hash__ is not again  # the one that waited still answers
