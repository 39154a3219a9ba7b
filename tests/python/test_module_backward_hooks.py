"""Full backward hooks and pre-hooks of modules: in whole steps they are in the region, where only the forward is optimised they break by name. Never does a graph run in eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import magneto

Make = Callable[[list[Any]], nn.Module]


@dataclass(frozen=True)
class Program:
    """`make(seen)` gives the module, whose hooks note what they see; `whole`: a whole step is one graph; `named`: where only the forward is optimised, all breaks are the hooks'."""

    make: Make
    whole: bool = True
    named: bool = True


PROGRAMS: dict[str, Program] = {}


def program(whole: bool = True, named: bool = True) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        PROGRAMS[make.__name__] = Program(make, whole, named)
        return make

    return register


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def note(seen: list[Any], label: str) -> Callable[..., None]:
    def hook(module: nn.Module, *gradients: Any) -> None:
        seen.append((label, type(module).__name__, *gradients))

    return hook


@program()
def a_hook(seen: list[Any]) -> nn.Module:
    n = net()
    n[1].register_full_backward_hook(note(seen, "hook"))
    return n


@program()
def a_pre_hook(seen: list[Any]) -> nn.Module:
    n = net()
    n[1].register_full_backward_pre_hook(note(seen, "pre"))
    return n


@program()
def hooks_of_all(seen: list[Any]) -> nn.Module:
    n = net()
    for m in n:
        m.register_full_backward_hook(note(seen, "hook"))
        m.register_full_backward_pre_hook(note(seen, "pre"))
    return n


@program()
def nested(seen: list[Any]) -> nn.Module:
    n = nn.Sequential(net(), nn.Softmax(-1))
    n[0].register_full_backward_hook(note(seen, "outer"))
    n[0][0].register_full_backward_hook(note(seen, "inner"))
    return n


@program()
def gradients_changed(seen: list[Any]) -> nn.Module:
    n = net()
    n[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2 + go[0],))
    n[1].register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-0.1, 0.1),))
    n[1].register_full_backward_hook(note(seen, "behind"))
    return n


@program()
def changed_twice(seen: list[Any]) -> nn.Module:
    n = net()
    for m in (n[1], n[2]):
        m.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        m.register_full_backward_hook(note(seen, "hook"))
    return n


@program()
def numbers_of_gradients(seen: list[Any]) -> nn.Module:
    n = net()
    n[2].register_full_backward_hook(lambda m, gi, go: seen.append((gi[0].norm().item(), go[0].abs().max().item())))
    return n


class Several(nn.Module):
    """Several tensors, of which some have no gradient, and other things."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, k: int, mask: torch.Tensor, *, bias: float) -> Any:
        y = self.body(x)
        return y * mask + k, "text", y.detach(), x.sum(1) + bias


class Caller(nn.Module):
    def __init__(self, which: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.several = Several()
        self.which = which

    def forward(self, x: torch.Tensor) -> Any:
        found = self.several(self.first(x), 2, (x[:, :3] > 0).float(), bias=0.5)
        return found[0] * found[3][:, None] if self.which < 0 else found[self.which]


def _several(which: int) -> Make:
    def make(seen: list[Any]) -> nn.Module:
        torch.manual_seed(0)
        n = Caller(which)
        n.several.register_full_backward_hook(note(seen, "hook"))
        n.several.register_full_backward_pre_hook(note(seen, "pre"))
        return n

    return make


for _which, _label in ((-1, "both"), (0, "first"), (3, "last")):
    PROGRAMS[f"several_results_{_label}"] = Program(_several(_which))


@program()
def several_results_changed(seen: list[Any]) -> nn.Module:
    torch.manual_seed(0)
    n = Caller(0)
    n.several.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2, None, gi[2]))
    n.several.register_full_backward_pre_hook(lambda m, go: (go[0] + 1, None, None, None))
    return n


class HooksOnTensors(nn.Module):
    """Hooks on the tensors that the module's hooks are set on, too."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        h.register_hook(lambda g: g * 2)
        h.retain_grad()
        h.register_hook(lambda g: self.seen.append(("tensor", g)))
        return self.two(h.tanh())


@program(named=False)
def hooks_on_tensors(seen: list[Any]) -> nn.Module:
    torch.manual_seed(0)
    n = HooksOnTensors(seen)
    n.one.register_full_backward_hook(note(seen, "hook"))
    return n


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).relu())


@program()
def called_twice(seen: list[Any]) -> nn.Module:
    torch.manual_seed(0)
    n = Twice()
    n.layer.register_full_backward_hook(note(seen, "hook"))
    return n


@program()
def no_input_requires_grad(seen: list[Any]) -> nn.Module:
    n = net()
    n[0].register_full_backward_hook(note(seen, "hook"))
    return n


@program()
def a_pre_hook_where_no_input_requires_grad(seen: list[Any]) -> nn.Module:
    n = net()
    n[0].register_full_backward_pre_hook(note(seen, "pre"))
    return n


@program(whole=False, named=False)
def a_hook_that_writes(seen: list[Any]) -> nn.Module:
    n = net()
    n[1].register_full_backward_hook(lambda m, gi, go: seen.append(gi[0].mul_(2)))
    return n


@program(whole=False, named=False)
def of_the_old_kind(seen: list[Any]) -> nn.Module:
    n = net()
    n[1].register_backward_hook(note(seen, "old"))
    return n


@program(whole=False, named=False)
def hook_removed_later(seen: list[Any]) -> nn.Module:
    n = net()
    handle = n[1].register_full_backward_hook(note(seen, "hook"))
    n.handles = [None, handle, None]
    return n


@program()
def a_hook_that_raises(seen: list[Any]) -> nn.Module:
    n = net()

    def hook(m: nn.Module, gi: Any, go: Any) -> None:
        raise ValueError(f"stop {gi[0].shape}")

    n[1].register_full_backward_hook(hook)
    return n


@program(named=False)
def a_wrong_number_of_gradients(seen: list[Any]) -> nn.Module:
    n = net()
    n[1].register_full_backward_hook(lambda m, gi, go: (gi[0], gi[0]))
    return n


@program()
def gradients_kept_on_the_module(seen: list[Any]) -> nn.Module:
    n = net()
    n[1].register_full_backward_hook(lambda m, gi, go: seen.append(setattr(m, "last", go[0])))
    n[2].register_full_backward_hook(lambda m, gi, go: print(tuple(gi[0].shape)))
    return n


def stepping(n: nn.Module, forward: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    o = torch.optim.SGD(n.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor) -> Any:
        o.zero_grad()
        loss = forward(x).pow(2).sum()
        try:
            loss.backward()
        except (ValueError, RuntimeError) as error:
            return torch.tensor(len(str(error)) + 0.5 * torch.is_grad_enabled())
        o.step()
        return loss

    return step


def whole_step(n: nn.Module, backend: str | None) -> Callable[[torch.Tensor], Any]:
    return magneto.optimize(backend)(stepping(n, n)) if backend else stepping(n, n)


def only_forward(n: nn.Module, backend: str | None) -> Callable[[torch.Tensor], Any]:
    return stepping(n, magneto.optimize(backend)(n) if backend else n)


def run(p: Program, kind: Any, backend: str | None) -> list[Any]:
    seen: list[Any] = []
    n = p.make(seen)
    step = kind(n, backend)
    rows: list[Any] = []
    for number in range(3):
        torch.manual_seed(number)
        seen.clear()
        rows.append(step(torch.randn(5, 4)).detach())
        if (handles := getattr(n, "handles", None)) and (handle := handles.pop()):
            handle.remove()
        rows.append([row for row in seen])
        rows += [None if one is None else one.detach().clone() for p in n.parameters() for one in (p, p.grad)]
    return rows


def same(one: Any, two: Any, tolerance: float) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(two, torch.Tensor) and one.requires_grad == two.requires_grad and one.dtype == two.dtype
        torch.testing.assert_close(two, one, rtol=tolerance, atol=tolerance)
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(two) and len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            same(a, b, tolerance)
    elif isinstance(one, float):
        assert two == pytest.approx(one, rel=tolerance, abs=tolerance)
    else:
        assert one == two


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("kind", [whole_step, only_forward])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_hooks(name: str, kind: Any, backend: str) -> None:
    p = PROGRAMS[name]
    expected, found = run(p, kind, None), run(p, kind, backend)
    same(expected, found, 1e-5 if backend == "inductor" else 0)
    stats = magneto.stats()
    if kind is whole_step and p.whole:
        assert (stats["breaks"], stats["fallbacks"]) == (0, 0), stats["break_reasons"]
    if kind is only_forward and p.named:
        assert stats["fallbacks"] == 0
        assert all("BackwardHook.setup_" in reason for reason in stats["break_reasons"]), stats["break_reasons"]


def test_the_warning_is_where_eager_gives_it() -> None:
    places = []
    for backend in (None, "aot_eager"):
        step = whole_step(no_input_requires_grad([]), backend)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(torch.ones(5, 4))
        places.append([(w.filename, w.lineno, str(w.message)) for w in caught if "Full backward hook" in str(w.message)])
    assert places[0] == places[1] and places[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_write_to_a_hooked_modules_input_raises_as_in_eager(backend: str) -> None:
    n = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    n[1].register_full_backward_hook(lambda *a: None)
    x = torch.ones(2, 4)
    texts = []
    for fn in (n, magneto.optimize(backend)(n)):
        with pytest.raises(RuntimeError) as caught:
            fn(x)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_hooks_of_all_modules_and_what_backward_does_besides(backend: str) -> None:
    """A hook for all modules that the step registers and removes; two backwards through one hook; hooks past which torch.autograd.grad goes."""

    def step(n: nn.Module, seen: list[Any], x: torch.Tensor) -> Any:
        handle = nn.modules.module.register_module_full_backward_hook(note(seen, "every"))
        try:
            loss = n(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        finally:
            handle.remove()
        return loss.detach(), torch.autograd.grad(n(x).sum(), list(n.parameters()))

    rows = []
    for fn in (step, magneto.optimize(backend)(step)):
        seen: list[Any] = []
        n = a_hook(seen)
        rows.append([fn(n, seen, torch.ones(2, 4)), list(seen), [p.grad for p in n.parameters()]])
    same(rows[0], rows[1], 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_hook_of_a_parameter_that_raises_leaves_gradients_on(backend: str) -> None:
    n = net()

    def hook(g: torch.Tensor) -> None:
        raise ValueError("stop")

    n[0].weight.register_hook(hook)

    def step(x: torch.Tensor) -> bool:
        try:
            n(x).sum().backward()
        except ValueError:
            pass
        return torch.is_grad_enabled()

    assert magneto.optimize(backend)(step)(torch.ones(2, 4))
    assert torch.is_grad_enabled()
