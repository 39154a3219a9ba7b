"""Backends by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto
from magneto.backends import backend_entries, list_backends, lookup_backend, register_backend, registry
from magneto.base.errors import MagnetoWarning, UserError
from tests.aot_autograd.capture import capture


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ y) + 1


@pytest.mark.parametrize("name", ["eager", "aot_eager", "torchscript", "ts", "ofi"])
def test_each_backend_computes_the_same(name: str) -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    gm, _ = capture(f, x, y)
    with torch.no_grad():
        compiled = lookup_backend(name)(gm, [x, y])
        for _ in range(3):
            torch.testing.assert_close(compiled(x, y)[0], f(x, y))


def test_names() -> None:
    assert {"eager", "aot_eager", "aot_eager_decomposed", "inductor", "torchscript", "ofi"} <= set(list_backends())
    assert "onnxrt" in list_backends(exclude_unavailable=False)
    own = [entry for entry in backend_entries() if entry.fn.__module__.startswith("magneto.")]  # other tests register theirs
    assert len(own) >= 6 and all(entry.help for entry in own)


def test_unknown_name_suggests() -> None:
    with pytest.raises(UserError, match="did you mean 'inductor'"):
        lookup_backend("inducter")
    with pytest.raises(UserError, match="backend name or a callable"):
        lookup_backend(3)  # type: ignore[arg-type]


def test_unavailable_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    register_backend("elsewhere", lambda gm, inputs: gm.forward, needs="no_such_package_anywhere")
    assert "elsewhere" not in list_backends()
    with pytest.raises(UserError, match="no_such_package_anywhere is not installed"):
        lookup_backend("elsewhere")


def test_callables_and_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @register_backend
    def mine(gm: Any, inputs: Any) -> Any:
        """My own."""
        return gm.forward

    @register_backend("other", aliases=("another",))
    def named(gm: Any, inputs: Any) -> Any:
        return gm.forward

    assert lookup_backend("mine") is mine and lookup_backend(mine) is mine
    assert lookup_backend("another") is lookup_backend("other") is named
    with pytest.raises(UserError):
        register_backend("bad", 3)


def test_suppress_errors_off_raises() -> None:
    from magneto.base.flags import config

    def g(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    x = torch.randn(4)
    gm, _ = capture(g, x)
    with pytest.warns(MagnetoWarning, match="W104"):
        assert torch.equal(lookup_backend("aot_eager")(gm, [x])(x)[0], g(x))
    with config.patch(suppress_errors=False), pytest.raises(Exception, match="depends on|numbers"):
        lookup_backend("aot_eager")(gm, [x])


def test_torch_compile_entry_point() -> None:
    from magneto.backends.torch_compile import magneto

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    gm, _ = capture(f, x, y)
    torch.testing.assert_close(magneto(gm, [x, y])(x, y)[0], f(x, y))


@pytest.mark.filterwarnings("ignore:.*runs in eager")
def test_a_graph_that_runs_in_eager_is_no_call_of_a_module(capfd):
    """Hooks on all modules are not told of it, and its error is not printed."""
    from torch.nn.modules.module import register_module_forward_hook

    def fails(x):
        y = x * 2
        x.view(-1).abs_()
        return y

    def scaled(x):
        return x * torch.ones(3, requires_grad=True)

    compiled, seen = magneto.optimize("aot_eager")(scaled), []
    compiled(torch.ones(3))
    handle = register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        assert magneto.optimize("aot_eager")(scaled)(torch.ones(3)).requires_grad
    finally:
        handle.remove()
    assert not seen
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        magneto.optimize("inductor")(fails)(torch.ones(3, requires_grad=True))
    assert "FX-traced" not in capfd.readouterr().err
