"""Class attributes that a forward pass writes, and hooks that it puts on modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import magneto
from tests.compare import Capturing

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Counting(nn.Module):
    calls = 0
    mode = "a"
    limit: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        Counting.calls += 1
        type(self).mode = "b" if self.mode == "a" else "a"
        y = self.linear(x)
        if self.limit is not None:
            y = y.clamp(max=self.limit)
        return y, Counting.calls, self.calls, self.mode, getattr(type(self), "calls")


class Own(Counting):
    mode = "c"


def test_counters_cost_no_recompile() -> None:
    for cls in (Counting, Own):
        plain, ours = cls(), cls()
        ours.load_state_dict(plain.state_dict())
        backend = Capturing()
        compiled = magneto.optimize(backend, nopython=True)(ours)
        for k in range(6):
            state = Counting.calls, cls.mode, cls.limit
            wanted = plain(X)
            after = Counting.calls, cls.mode, cls.limit
            Counting.calls, cls.mode, cls.limit = state
            found = compiled(X)
            assert torch.equal(found[0], wanted[0]) and found[1:] == wanted[1:]
            assert (Counting.calls, cls.mode, cls.limit) == after
            if k == 3:
                cls.limit = 0  # not written by the program: still a part of the class
        assert len(backend.graphs) <= 5
        cls.limit = None


def test_readers_elsewhere_see_what_is_written() -> None:
    def reader(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return x * Counting.calls + (model.mode == "a")  # type: ignore[no-any-return]

    model = Counting()
    writer = magneto.optimize("eager")(model)
    compiled = magneto.optimize("eager")(reader)
    for _ in range(4):
        assert torch.equal(compiled(X, model), reader(X, model))
        writer(X)
    Counting.calls = 100
    assert torch.equal(compiled(X, model), reader(X, model))
    model.mode = "a"
    assert torch.equal(compiled(X, model), reader(X, model))


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def for_a_while(x: torch.Tensor, layer: nn.Module) -> Any:
    before = layer(x)
    handle = layer.register_forward_hook(doubled)
    during = layer(x)
    handle.remove()
    return before, during, layer(x), len(layer._forward_hooks)


def once(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = layer(x)
    if not hasattr(layer, "hooked"):
        layer.hooked = True  # type: ignore[assignment]
        layer.register_forward_hook(doubled)
        layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,), prepend=True)
    return y + layer(x)  # type: ignore[no-any-return]


def test_hooks_put_on_in_the_region() -> None:
    for fn in (for_a_while, once):
        magneto.reset()
        layers = [nn.Linear(3, 3) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        backend = Capturing()
        compiled = magneto.optimize(backend)(fn)
        for k in range(3):
            wanted, found = fn(X, layers[0]), compiled(X, layers[1])
            assert str(wanted) == str(found)
            assert torch.equal(layers[0](X), layers[1](X))
            if not k:
                assert len(backend.graphs) == 1 and not magneto.stats()["breaks"]
