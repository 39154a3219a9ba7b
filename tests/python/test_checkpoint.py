"""Activation checkpointing: captured, gradients and dropout masks as in eager, and computed again in backward."""

# ruff: noqa

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import magneto
from tests.python.gradients import P, compare
from tests.python.test_autograd_function import Exp

SAID: list[str] = []


def block(x, w):
    return F.gelu(x @ w).sin()


def plain(x, w):
    return checkpoint(block, x, w, use_reentrant=False) * 2


def reentrant(x, w):
    return checkpoint(block, x * 2, w, use_reentrant=True) * 2


def closure(x, w):
    scale = 3.0
    return checkpoint(lambda y: block(y, w) * scale + x, x, use_reentrant=False)


def reentrant_closure(x, w):
    return checkpoint(lambda y: block(y, w) + 1, x * 2, use_reentrant=True)


def dropout(x, w):
    y = F.dropout(x, 0.3)
    y = checkpoint(lambda v: F.dropout(block(v, w), 0.5), y, use_reentrant=False)
    return F.dropout(y, 0.2), torch.rand(2)


def dropout_reentrant(x, w):
    y = checkpoint(lambda v: F.dropout(block(v, w), 0.5), x, use_reentrant=True)
    return F.dropout(y, 0.2), torch.rand(2)


def several(x, w):
    def f(a, b, *, scale=1.0, extra=None, flags=()):
        return a @ b * scale, {"s": (a + extra[0]).sum(), "n": len(flags)}, None

    y, d, nothing = checkpoint(f, x, w, scale=2.0, extra=(x,), flags=("a", "b"), use_reentrant=False)
    return y, d["s"], d["n"], nothing


def nested(x, w):
    def outer(y):
        return checkpoint(block, y, w, use_reentrant=False).exp()

    return checkpoint(outer, x, use_reentrant=False)


def chain(x, w):
    for _ in range(4):
        x = checkpoint(block, x, w, use_reentrant=False)
    return x


def custom(x, w):
    return checkpoint(lambda y: Exp.apply(block(y, w)), x, use_reentrant=False)


def partial(x, w):
    run = functools.partial(checkpoint, use_reentrant=False)
    return run(functools.partial(block, w=w), x)


def without_gradients(x, w):
    with torch.no_grad():
        return checkpoint(block, x, w, use_reentrant=True)


def autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(block, x, w, use_reentrant=False).float()


CASES = [
    plain, reentrant, closure, reentrant_closure, dropout, dropout_reentrant, several, nested, chain, custom, partial, without_gradients, autocast,
]  # fmt: skip


@pytest.mark.parametrize("fn", CASES)
def test_captured(fn):
    compare(fn, P(4, 4), P(4, 4), graphs=1)


@pytest.mark.parametrize("fn", [chain, dropout])
def test_inductor(fn):
    compare(fn, P(4, 4), P(4, 4), graphs=1, backends=("inductor",))


def test_sequential():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.5)) for _ in range(4)])
    compare(lambda x, model: checkpoint_sequential(model, 2, x, use_reentrant=False), P(3, 4), model, graphs=1)


def says(x, w):
    def f(y):
        SAID.append("run")
        return block(y, w)

    return checkpoint(f, x, use_reentrant=False)


def no_gradient_through_arguments(x, w):
    return checkpoint(lambda y: y @ w, x.detach(), use_reentrant=False)


def drawn_again(x, w):
    return checkpoint(lambda y: F.dropout(y, 0.5) @ w, x, use_reentrant=False, preserve_rng_state=False)


def counts(x, w):
    total = torch.zeros(())

    def f(y):
        total.add_(1)
        return y @ w

    y = checkpoint(f, x, use_reentrant=False)
    return y, total


def reads_number(x, w):
    return checkpoint(lambda y: y * y.sum().item() @ w, x, use_reentrant=False)


def raises(x, w):
    def f(y):
        raise ValueError("inside")

    return checkpoint(f, x, use_reentrant=False)


@pytest.mark.parametrize(
    "fn, reason",
    [
        (says, "side effect"),
        (drawn_again, "drawn again"),
        (counts, "writes to tensors"),
        (reads_number, "item"),
        (raises, "it raises ValueError"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_breaks(fn, reason):
    compare(fn, P(4, 4), P(4, 4), graphs=None, breaks=reason, said=SAID)


def test_gradient_of_what_is_closed_over():
    compare(no_gradient_through_arguments, P(4, 4), P(4, 4), graphs=1)


def test_batch_norm_is_updated_as_in_eager():
    torch.manual_seed(0)
    x = torch.randn(8, 4, requires_grad=True)

    def fn(x, model):
        y = checkpoint(model, x, use_reentrant=False)
        return y

    import copy

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    ours = copy.deepcopy(model)
    fn(x, model).sum().backward()
    magneto.optimize("aot_eager")(fn)(x, ours).sum().backward()
    assert torch.equal(model[1].running_mean, ours[1].running_mean)
    assert model[1].num_batches_tracked == ours[1].num_batches_tracked


def kept_bytes(fn, *args):
    """Bytes of distinct memory that the result's history holds, besides the arguments'."""
    own = {arg.untyped_storage()._cdata for arg in args}
    held: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            held[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn(*args)
    return sum(held.values())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_little_is_kept(backend):
    """What a compiled step keeps is the input of each checkpointed body, not its insides."""

    def deep(v, w):
        for _ in range(3):
            v = torch.nn.functional.layer_norm((v @ w).exp(), (8,))
        return v

    def with_checkpoint(x, w):
        for _ in range(3):
            x = checkpoint(deep, x, w, use_reentrant=False)
        return x.sum()

    def without(x, w):
        for _ in range(3):
            x = deep(x, w)
        return x.sum()

    x, w = P(64, 8), P(8, 8)
    sizes = []
    for fn in (with_checkpoint, without):
        compiled = magneto.optimize(backend, nopython=True)(fn)
        compiled(x, w)  # saved-tensor hooks keep frames from being compiled
        sizes.append(_kept_by(compiled(x, w)))
    assert sizes[0] <= 2 * x.nbytes < sizes[1] / 3, sizes


def _kept_by(result):
    """Bytes of what a compiled graph keeps for backward that are no inputs."""
    fn = result.grad_fn
    while "CompiledGraph" not in type(fn).__name__:
        fn = fn.next_functions[0][0]
    own = [t for t in (*fn.saved_tensors, *fn.extras) if not t.is_leaf or not t.requires_grad]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in own}.values())
