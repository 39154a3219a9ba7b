"""`torch.cond`, `torch.while_loop`, `map` and `scan`: followed as the Python that they stand for, with eager's results, gradients, layouts and errors."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from functorch.experimental.control_flow import map as over

import magneto
from magneto.dynamo.control_flow import STACKS_WHERE_IT_SLICES
from tests.compare import assert_equal

pytestmark = pytest.mark.slow  # eager traces at each call: two minutes and a half
BACKENDS = ("aot_eager", "inductor", "eager")
scan = sys.modules["torch._higher_order_ops.scan"].scan
STEP, BIAS = torch.nn.Parameter(torch.tensor(0.5)), torch.ones(3)


def _deep(x):
    return torch.cond(x.max() > 2, lambda y: torch.cond(y.max() > 3, torch.sin, torch.cos, (y,)), lambda y: y.exp(), (x,))


CAPTURED: dict[str, Any] = {
    "cond of a size": lambda x, w: torch.cond(x.shape[0] > 3, lambda y: y + 1, lambda y: y - w, (x * 2,)) * 3,
    "cond of a number": lambda x, w: torch.cond(x.dim(), true_fn=lambda: x + w, false_fn=lambda: x - w),
    "map": lambda x, w: over(lambda a, b: (a + b, a.sum() * b.sum()), x * 1, w),
    "map of a tree": lambda x, w: over(lambda d: [d["a"] * d["b"], {"c": d["a"] + 1 * d["b"]}], {"a": x, "b": x * w})[1]["c"],
    "map of a transposed": lambda x, w: over(lambda a: torch.outer(a, a).t() * 2, x.t()),
    "scan": lambda x, w: scan(lambda c, a: (c + a, c * a), w, x),
    "scan of columns": lambda x, w: scan(lambda c, a: (c * 0.5 + a, torch.outer(c, a)), x[:, 0] * 1, x, dim=-1, reverse=True),
    "scan of a tree": lambda x, w: scan(lambda c, a: ({"s": c["s"] + a[0]}, [a[1] * c["s"], a[0] + c["s"]]), {"s": w * 1}, (x, x * 2)),
}
DECIDED: dict[str, Any] = {
    "cond": lambda x, w: torch.cond(x.sum() > 0, lambda y: (y * w, y + 1 * w), lambda y: (y - w, y / w), (x * 2,))[1] * 3,
    "cond inside": lambda x, w: _deep(x * w) + 1,
    "cond of one of many": lambda x, w: torch.cond((x.sum() > 0).reshape(1), lambda d: d["a"] + w, lambda d: d["a"] * w, [{"a": x}]),
    "cond with a closure": lambda x, w: torch.cond(x.sum() > 0, lambda: x * w, lambda: x + w),
    "while": lambda x, w: torch.while_loop(lambda i, y: y.abs().sum() < 50, lambda i, y: (i + 1, y * 2 + w), (torch.tensor(0), x + 0.1))[1] * 2,
    "while without a turn": lambda x, w: torch.while_loop(lambda i, y: i < 0, lambda i, y: (i + 1, y * w), (torch.tensor(0), x))[1] + 1,
    "while of a number": lambda x, w: torch.while_loop(lambda i, y: i < 3, lambda i, y: [i + 1, y * w], (0, x)),
}  # fmt: skip
BY_TORCH: dict[str, Any] = {
    "learned by one branch": lambda x, w: torch.cond(x.sum() > 0, lambda y: y * STEP, lambda y: y * 2, (x,)),
    "an operand of one branch": lambda x, w: torch.cond(x.sum() > 0, lambda y, z: y * 2, lambda y, z: y * z, (x, w)),
    "a result that does not learn": lambda x, w: torch.cond(x.sum() > 0, lambda y: (y * w, y.detach() * 2), lambda y: (y * w, y - w), (x,)),
    "map of a constant": lambda x, w: over(lambda a, b: (a * 2, BIAS * 2), x, w),
    "many turns": lambda x, w: over(lambda a: a * 2, (x * w).flatten().repeat(20)),
    "a loop that learns by half": lambda x, w: torch.while_loop(lambda i, y, z: i < 2, lambda i, y, z: (i + 1, y * w, z * 2), (torch.tensor(0), x, BIAS)),
}  # fmt: skip
EAGER_FAILS = ("while without a turn", "while of a number")
WRONG: dict[str, Any] = {
    "none": lambda x: torch.cond(None, torch.sin, torch.cos, (x,)),
    "several": lambda x: torch.cond(torch.tensor([True, False]), torch.sin, torch.cos, (x,)),
    "no function": lambda x: torch.cond(x.sum() > 0, 3, torch.cos, (x,)),
    "no operands": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, x),
    "numbers": lambda x: torch.cond(x.sum() > 0, torch.add, torch.sub, (x, 3)),
    "too few": lambda x: torch.cond(True, torch.sin, lambda y, z: y, ()),
    "no loop": lambda x: torch.while_loop(3, torch.cos, (x,)),
    "map of nothing": lambda x: over(torch.sin, x[:0]),
    "map of numbers": lambda x: over(torch.sin, [1, 2]),
    "map of uneven": lambda x: over(lambda a: a[0] * 2, (x, x[:2])),
    "scan of nothing": lambda x: scan(lambda c, a: (c + a, c * a), x[0], x[:0]),
    "scan by a number": lambda x: scan(lambda c, a: (c + a, c * a), 0, x),
    "scan elsewhere": lambda x: scan(lambda c, a: (c + a, c * a), x[0], x, dim=5),
    "scan backwards": lambda x: scan(lambda c, a: (c + a, c * a), x[0], x, reverse=1),
    "scan by no function": lambda x: scan(3, x[0], x),
}


def _arguments(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.rand(4, 3, generator=generator) + 0.5, torch.rand(3, generator=generator) + 0.5
    return (x if seed % 2 else -x), w


def _outcome(fn: Any, args: Any, training: bool) -> Any:
    args = [arg.clone().requires_grad_(training) for arg in args]
    STEP.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fn(*args)
        parts = [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        if training and any(part.requires_grad for part in parts):
            sum(part.sum() * (i + 1) for i, part in enumerate(parts)).backward()
    return result, [part.stride() for part in parts], [arg.grad for arg in args], STEP.grad


@pytest.mark.parametrize("name", [*CAPTURED, *DECIDED, *BY_TORCH])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", (False, True), ids=("inference", "training"))
def test_same(name: str, backend: str, training: bool) -> None:
    if training and name in EAGER_FAILS:
        pytest.skip("eager has other gradients (those of one turn), or none")
    fn = {**CAPTURED, **DECIDED, **BY_TORCH}[name]
    compiled = magneto.optimize(backend, nopython=name in CAPTURED and (name != "scan of columns" or STACKS_WHERE_IT_SLICES))(fn)
    for seed in (1, 2, 3, 4, 1):
        args = _arguments(seed)
        assert_equal(_outcome(compiled, args, training), _outcome(fn, args, training), 1e-5, f"{name} {seed}")
    reasons = magneto.stats()["break_reasons"]
    if name in DECIDED and not training:
        assert all(reason.startswith("data-dependent branch") for reason in reasons), reasons
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_eager(name: str) -> None:
    found = []
    for form in (WRONG[name], magneto.optimize("aot_eager")(WRONG[name])):
        with warnings.catch_warnings(), pytest.raises((RuntimeError, IndexError, TypeError)) as raised:
            warnings.simplefilter("ignore")
            form(_arguments(1)[0])
        found.append((raised.type, str(raised.value)))
    assert found[0] == found[1]
