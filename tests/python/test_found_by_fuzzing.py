"""What the fuzzer of whole programs found, each as the smallest program that shows it."""

from __future__ import annotations

import collections
import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import magneto

ARRAY = np.ones((3, 4), dtype=np.float32)
KEPT = torch.zeros(4)


class Counted(torch.Tensor):
    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, kinds, args, kwargs or {})


def outcome(fn: Any, *args: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return repr(fn(*args))
        except Exception as error:
            return repr(error)


def twice(fn: Any, *args: Any) -> None:
    magneto.reset()
    optimised = magneto.optimize("eager")(fn)
    for _ in range(2):
        plain = [arg.clone() if type(arg) is torch.Tensor else arg for arg in args]
        given = [arg.clone() if type(arg) is torch.Tensor else arg for arg in args]
        assert outcome(optimised, *given) == outcome(fn, *plain)
        assert repr(given) == repr(plain)


def test_out_may_be_resized() -> None:
    def one(x: torch.Tensor, out: torch.Tensor) -> Any:
        torch.mul(x, 2, out=out)
        return out.shape, out + 1, out.stride()

    def global_one(x: torch.Tensor) -> Any:
        global KEPT
        KEPT = torch.zeros(4)
        torch.add(x[:1], 1, out=KEPT)
        torch.add(x[:2], 1, out=KEPT)
        return KEPT.shape[0], KEPT

    def several(x: torch.Tensor) -> Any:
        values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.max(x, 1, out=(values, places))
        return values.shape, values + 1, places

    for start in (torch.empty(0), torch.ones(3, 4), torch.ones(5)):
        twice(one, torch.ones(3, 4), start)
        twice(one, torch.ones(4, 3).t(), start)
    twice(global_one, torch.ones(3, 4))
    twice(several, torch.ones(3, 4))


def test_a_list_of_a_tensor_of_a_class_asks_its_length() -> None:
    def fn(x: torch.Tensor) -> Any:
        return [row.sum().item() for row in [*list(x), *x]], Counted.asked

    def run(call: Any) -> Any:
        Counted.asked = 0
        return call(torch.arange(12.0).reshape(3, 4).as_subclass(Counted))  # type: ignore[arg-type]

    expected = run(fn)
    assert run(magneto.optimize("eager")(fn)) == expected


def test_numpy_inside_a_transform() -> None:
    def fn(x: torch.Tensor) -> Any:
        return torch.func.grad(lambda z: ARRAY.sum())(x)

    twice(fn, torch.ones(3, 4))


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("value", [5, [(1, 2)], "ab", (1, 2), {"a": 1}, np.float32(1), np.ones(2), torch.ones(())], ids=repr)
def test_stars_take_what_they_take(value: Any, breaks: bool) -> None:
    def table(x: torch.Tensor, given: Any) -> Any:
        if breaks:
            magneto.graph_break()
        return {"first": 0, **given}, x + 1

    def row(x: torch.Tensor, given: Any) -> Any:
        if breaks:
            magneto.graph_break()
        return [0, *given], x + 1

    def call(x: torch.Tensor, given: Any) -> Any:
        return dict(**given), x + 1

    if isinstance(value, np.generic):
        twice(table, torch.ones(2), value)
        return
    for fn in (table, row, call):
        twice(fn, torch.ones(2), value)


def test_classes_have_their_names_in_errors() -> None:
    import collections

    def attribute(x: torch.Tensor, given: Any) -> Any:
        return given.nothing, x + 1

    def called(x: torch.Tensor, given: Any) -> Any:
        return given(x)

    def key(x: torch.Tensor, given: Any) -> Any:
        return {given: x}

    def missing(x: torch.Tensor) -> Any:
        return {1: x}[x.argmax()]

    for value in (collections.deque([1]), np.ones(2), collections.OrderedDict(), 3, torch.Size([1]), range(2)):
        for fn in (attribute, called, key):
            twice(fn, torch.ones(2), value)
    twice(missing, torch.ones(2))


def test_reversed_asks_when_it_is_stepped() -> None:
    class Rows:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            self.asked.append(index)
            if index == 0:
                raise KeyError(index)
            return index

    def fn(x: torch.Tensor, steps: int, leave: bool) -> Any:
        rows = Rows()
        found: list[Any] = []
        it = reversed(rows)  # type: ignore[call-overload]
        try:
            for _ in range(steps):
                found.append(next(it))
            if leave:
                magneto.graph_break()
                found.append(next(it, "end"))
        except KeyError as error:
            found.append(str(error))
        return found, rows.asked, type(it), x + 1

    for steps in range(4):
        for leave in (False, True):
            twice(fn, torch.ones(2), steps, leave)


def test_reduce_steps_its_iterator_between_calls() -> None:
    def fn(x: torch.Tensor) -> Any:
        log: list[str] = []

        def items() -> Any:
            for k in range(3):
                log.append(f"item {k}")
                yield k

        def add(a: Any, b: Any) -> Any:
            log.append(f"add {b}")
            return a + b

        return functools.reduce(add, items(), x), functools.reduce(add, items()), log

    def refused(x: torch.Tensor, value: Any) -> Any:
        return functools.reduce(lambda a, b: a, value), x + 1

    def of_size(x: torch.Tensor) -> Any:
        return torch.zeros_like(x.shape)  # type: ignore[arg-type]

    def named(x: torch.Tensor, value: Any) -> Any:
        return vars(value), x + 1

    def history(x: torch.Tensor) -> Any:
        return (x.clone().requires_grad_() * 2).grad_fn(x)  # type: ignore[misc]

    twice(fn, torch.ones(2))
    for value in (3, [], (), "abc", torch.float32):
        twice(refused, torch.ones(2), value)
        twice(named, torch.ones(2), value)
    twice(of_size, torch.ones(2))
    twice(history, torch.ones(2))


def test_deque_repeated_in_place() -> None:
    class Queue(collections.deque):  # type: ignore[type-arg]
        pass

    def fn(x: torch.Tensor, queue: Any, times: Any) -> Any:
        alias, steps = queue, iter(queue)
        log: list[Any] = [next(steps)]
        try:
            queue *= times
            log.append(alias is queue)
            log.append(next(steps))
        except Exception as error:
            log.append(repr(error))
        return list(alias), list(queue), log, x + 1

    def made(x: torch.Tensor, times: Any) -> Any:
        return fn(x, collections.deque([x, 2, 3], 4), times)

    for times in (0, 1, 2, 3, -1, True, "a", 1.5):
        twice(made, torch.ones(2), times)
        for kind in (collections.deque, Queue):
            for bound in (None, 2, 4):
                magneto.reset()
                ours = kind([1, 2, 3], bound)
                expected = fn(torch.ones(2), kind([1, 2, 3], bound), times)
                found = magneto.optimize("eager")(fn)(torch.ones(2), ours, times)
                assert repr(found) == repr(expected)
                assert list(ours) == expected[0] and type(ours) is kind


def test_mapping_whose_keys_are_its_own() -> None:
    class Passed:
        def __init__(self, inner: dict[str, Any]) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __getitem__(self, key: str) -> Any:
            return self.inner[key]

    class Own:
        def __init__(self) -> None:
            self.keys = lambda: ["a"]

        def __getitem__(self, key: str) -> Any:
            return key + "!"

    def fn(x: torch.Tensor, value: Any) -> Any:
        try:
            return {"z": 1, **value}, dict(**value), x + 1
        except TypeError as error:
            return str(error), x - 1

    for value in (Passed({"a": 1}), Own(), {"b": 2}, collections.ChainMap({"c": 3}), 3, [("a", 1)], object):
        twice(fn, torch.ones(2), value)


class Countdown:
    def __init__(self, left: Any) -> None:
        self.left = left

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> Any:
        if self.left <= 0:
            raise StopIteration
        self.left = self.left - 1
        return self.left


class Done(Exception):
    pass


def _steps(left: Any) -> int:
    count = 0
    try:
        while True:
            if left <= 0:
                raise Done
            left = left - 1
            count += 1
    except Done:
        return count


def test_an_iterator_that_data_ends() -> None:
    """What ends a loop is no error that a region may assume not to happen: capture went on for ever."""

    def fn(x: torch.Tensor, left: Any) -> torch.Tensor:
        return x * sum(1 for _ in Countdown(left + 1))

    for left in (2, torch.tensor(2), torch.tensor(4), torch.tensor(-1)):
        twice(fn, torch.ones(3), left)


def test_a_loop_that_an_exception_ends() -> None:
    def fn(x: torch.Tensor, left: Any) -> torch.Tensor:
        return x * _steps(left)

    for left in (2, torch.tensor(2), torch.tensor(5)):
        twice(fn, torch.ones(3), left)
