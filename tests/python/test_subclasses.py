"""Tensors of a program's own classes, and other objects with `__torch_function__`: what the class says, in one graph on plain data."""

# ruff: noqa

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import magneto
from tests.compare import Capturing, assert_equal
from tests.python.programs import X

LOG: list[str] = []


class Named(torch.Tensor):
    @property
    def twice(self):
        return self * 2

    def scale(self, k):
        return self * k


class Tagged(torch.Tensor):
    @staticmethod
    def __new__(cls, data, tag=None):
        made = torch.Tensor._make_subclass(cls, data)
        made.tag = tag
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.tag = next((a.tag for a in args if isinstance(a, cls) and hasattr(a, "tag")), "none")
        return result


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        LOG.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Off(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class Duck:
    def __init__(self, t):
        self.t = t

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return Duck(func(*[a.t if isinstance(a, Duck) else a for a in args], **(kwargs or {})))


class Own(torch.Tensor):
    """Operators of its own, some by way of Tensor's."""

    def __add__(self, other):
        return super().__add__(other) + 10 if isinstance(other, Own) else "add"

    def __rsub__(self, other):
        return "rsub"

    def __getitem__(self, index):
        return super().__getitem__(index) * 2

    def __iter__(self):
        yield from (self[0], self[1])

    def __lt__(self, other):
        return "lt"

    def __iadd__(self, other):
        return self.mul_(other)


class Later(Own):
    def __radd__(self, other):
        return "radd", type(other).__name__


class Pair(Duck):
    def __add__(self, other):
        return "pair"

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 2


def operators_of_the_class(x, y):
    later = x.as_subclass(Later)
    found = [x + x, x + 1, y - x, x[1], list(x), x < y, y > x, x + later, y + later, later + x, x - 1, x * 2]
    x += 3
    return found, x


def operators_of_a_duck(x, y):
    d = Pair(x)
    return d + x, (x + d).t, d[3], len(d), d == 1, (x * d).t, torch.add(d, x).t


def operations(x, y):
    return (
        *(x + 1, x.sum(), x[0], torch.relu(x), x.T, x.shape, x.twice, F.relu(x), 2 - x, x @ x.T, x.mean(dim=1)),
        *(x.split(2, dim=1), torch.cat([x, x]), x + y, y + x, torch.add(y, x), len(x), -x, x > 0),
    )


def methods(x, y):
    return x.scale(3), x.scale(2).twice, isinstance(x, Named), type(x).__name__


def in_place(x, y):
    x.add_(1)
    x[0] = 3
    x += 2
    return x


def tags(x, y):
    made = Tagged(y * 2, "made")
    z = x + 1
    return z, z.tag, (z * 2).tag, torch.relu(x).tag, made + 1, made.tag, (made + 1).tag


def logged(x, y):
    LOG.clear()
    z = torch.relu(x + 1).sum()
    return z, list(LOG), type(z).__name__


def ducks(x, y):
    d = Duck(y)
    return torch.relu(d).t, torch.add(d, 1).t


def made_here(x, y):
    z = y.as_subclass(Named)
    return z * 2, type(z), isinstance(z, Named)


def switched_off(x, y):
    with torch._C.DisableTorchFunctionSubclass():
        z = x + 1
    return z, x + 1


CASES = [
    (operations, lambda: X.clone().as_subclass(Named)),
    (methods, lambda: X.clone().as_subclass(Named)),
    (in_place, lambda: X.clone().as_subclass(Named)),
    (tags, lambda: Tagged(X.clone(), "given")),
    (logged, lambda: X.clone().as_subclass(Logged)),
    (switched_off, lambda: X.clone().as_subclass(Off)),
    (ducks, lambda: X.clone()),
    (operators_of_the_class, lambda: X.clone().as_subclass(Own)),
    (operators_of_a_duck, lambda: X.clone()),
    (made_here, lambda: X.clone()),
    (switched_off, lambda: X.clone().as_subclass(Named)),
]


@pytest.mark.parametrize("backend", [Capturing(), "aot_eager"])
@pytest.mark.parametrize("fn, make", CASES, ids=[f"{fn.__name__}{i}" for i, (fn, _) in enumerate(CASES)])
def test_program(fn, make, backend):
    x, ours = make(), make()
    assert_equal(magneto.optimize(backend, nopython=True)(fn)(ours, X), fn(x, X))
    assert_equal(ours.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor))


@pytest.mark.parametrize("backend", [Capturing(), "aot_eager"])
def test_gradients_of_a_subclass(backend):
    def fn(w):
        return (w * 2).exp().sum(dim=1)

    gradients = []
    for call in (fn, magneto.optimize(backend, nopython=True)(fn)):
        w = X.clone().as_subclass(Named).requires_grad_()
        call(w).sum().backward()
        gradients.append(w.grad)
    assert_equal(gradients[1], gradients[0])


def test_attributes_of_what_is_not_followed():
    """A class with __torch_dispatch__ runs in eager; its attributes are seen."""

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            plain = [a.inner if isinstance(a, Wrapped) else a for a in args]
            result = func(*plain, **(kwargs or {}))
            return Wrapped(result) if isinstance(result, torch.Tensor) else result

    def fn(x):
        return (x + 1).inner, (x * 2).inner.sum(), hasattr(x, "inner"), hasattr(x, "other")

    assert_equal(magneto.optimize(Capturing())(fn)(Wrapped(X)), fn(Wrapped(X)))
