"""Calls of equal modules are replayed from the first one's capture; nearly equal ones are captured. Each program is run plain, captured whole, and with replay: the
results are eager's, and replay gives the graphs and the guards that capture gives."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.base import events
from magneto.dynamo.guards.text import show_row
from tests.compare import assert_equal


class Block(nn.Module):
    """Submodules, a constant, a dictionary, a buffer: enough to differ in."""

    def __init__(self, number: int = 0, width: int = 8) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(0.5)
        self.scale = 0.5
        self.options = {"bias": 1.0}
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        y = self.inner(self.norm(x)) * self.scale * self.mask + self.options["bias"]
        if shift is not None:
            y = y + shift
        return x + self.drop(y)


class Stack(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Block, n: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block(k) for k in range(n))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


X = torch.linspace(-1, 1, 24).reshape(3, 8)


def captured(model: Any, replay: bool, args: tuple[Any, ...]) -> tuple[Any, Any, int, Any]:
    """(results, graphs and guards, replayed calls, the optimised model)."""
    magneto.reset()
    events.reset()
    texts: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        texts.append([(node.format_node(), str(node.meta["val"]), node.meta["stack"]) for node in gm.graph.nodes if node.op != "output"])
        return gm.forward

    compiled = magneto.optimize(backend)(model)
    with magneto.config.patch(replay_equal_modules=replay):
        results = [compiled(*args), compiled(*args)]
    for entry in magneto.inspect(compiled):
        texts.append({re.sub("0x[0-9a-f]+", "", f"{show_row(row)} {row.user_line} {row.inside}") for row in entry.guards})
    return results, texts, sum(event.calls for event in events.events("replay")), compiled


def check(make: Callable[[], nn.Module], calls: int, *args: Any, gradients: bool = True, shared: bool = False) -> None:
    """`calls`: how many are replayed. `shared`: where layers share parts, replay guards these by its own paths, not as the same ones."""
    args = args or (X,)
    found = {}
    for how in ("plain", "whole", "replayed"):
        torch.manual_seed(1)
        random.seed(1)
        model = make()
        torch.manual_seed(2)
        if how == "plain":
            results, texts, replayed = [model(*args), model(*args)], None, 0
        else:
            results, texts, replayed, _ = captured(model, how == "replayed", args)
        assert how != "replayed" or replayed == calls, replayed
        last = results[-1][-1] if isinstance(results[-1], tuple) else results[-1]
        if gradients:
            last.sum().backward()
        found[how] = results, [p.grad for p in model.parameters()], [*model.buffers()], random.random(), torch.rand(3), texts
    for how in ("whole", "replayed"):
        assert_equal(found[how][:5], found["plain"][:5], where=how)
    for whole, replayed in zip(found["whole"][5], found["replayed"][5], strict=True):
        assert whole == replayed or (shared and isinstance(whole, set))


def altered(change: Callable[[nn.ModuleList], Any], block: Any = Block) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack(block)
        torch.utils.hooks.RemovableHandle.next_id = 0
        change(model.blocks)
        return model

    return make


def stepping(block: Any, step: Callable[[int, Any, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """Makes stacks that take a step of the caller's for each block."""

    class Stepping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for k, each in enumerate(self.blocks):
                x = step(k, each, x)
            return x

    return lambda: Stepping(block)


def test_equal_layers_are_replayed() -> None:
    check(Stack, 4)
    check(lambda: Stack().eval(), 4)
    with torch.no_grad():
        check(Stack, 4, gradients=False)


def test_the_flag_switches_it_off() -> None:
    with magneto.config.patch(replay_equal_modules=False):
        assert captured(Stack(), False, (X,))[2] == 0


def set_constant(blocks: Any) -> None:
    blocks[2].scale = 3.0


def set_sign_of_zero(blocks: Any) -> None:
    for block in blocks:
        block.scale = 0.0
    blocks[2].scale = -0.0


def set_item(blocks: Any) -> None:
    blocks[2].options["bias"] = 3.0


def set_type(blocks: Any) -> None:
    blocks[2].mask = torch.ones(8, dtype=torch.int64)


def set_layout(blocks: Any) -> None:
    blocks[2].inner[0].weight = nn.Parameter(torch.randn(8, 16).t())


def set_hook(blocks: Any) -> None:
    blocks[2].register_forward_hook(lambda module, args, result: result * 2)


def set_inner_hook(blocks: Any) -> None:
    blocks[2].inner[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def set_training(blocks: Any) -> None:
    blocks[2].drop.eval()


def set_forward(blocks: Any) -> None:
    blocks[2].forward = lambda x: x * 2


def set_method(blocks: Any) -> None:
    blocks[2].inner.forward = types.MethodType(lambda self, x: x * 2, blocks[2].inner)


def set_width(blocks: Any) -> None:
    blocks[2].inner = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8))


def set_activation(blocks: Any) -> None:
    blocks[2].inner[1] = nn.Tanh()


def set_length(blocks: Any) -> None:
    blocks[2].inner.append(nn.Tanh())


def set_frozen(blocks: Any) -> None:
    blocks[2].inner[0].weight.requires_grad_(False)


def set_class(blocks: Any) -> None:
    class Special(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    blocks[2].__class__ = Special


def set_nothing_bias(blocks: Any) -> None:
    blocks[2].inner[2].bias = None


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (set_constant, 4),  # of the changed block, the inner sequence
        (set_sign_of_zero, 4),
        (set_item, 4),
        (set_type, 4),
        (set_layout, 3),
        (set_hook, 4),
        (set_inner_hook, 3),
        (set_training, 4),
        (set_forward, 3),
        (set_method, 3),
        (set_width, 3),
        (set_activation, 3),
        (set_length, 3),
        (set_frozen, 3),
        (set_class, 4),
        (set_nothing_bias, 3),
    ],
)
def test_a_layer_that_differs_is_captured(change: Callable[[Any], None], calls: int) -> None:
    check(altered(change), calls)


def test_parts_that_layers_share() -> None:
    def share(blocks: Any) -> None:
        blocks[3].inner[0].weight = blocks[1].inner[0].weight
        blocks[2].drop = blocks[4].drop = blocks[0].drop
        blocks[4].mask = blocks[3].mask

    check(altered(share), 4, shared=True)


def test_numbers_that_nobody_reads_may_differ() -> None:
    check(altered(lambda blocks: None), 4)


class Numbered(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.number


def test_numbers_that_somebody_reads() -> None:
    check(lambda: Stack(Numbered), 4)  # super().forward


def test_one_module_many_times() -> None:
    class Same(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(4):
                x = self.blocks[0](x)
            return x

    check(Same, 3)


class Holder:
    """What modules can look themselves up in."""

    one: Any = None
    some: Any = ()
    numbers: Any = {}
    x: Any = None


HOLDER = Holder()


class Asking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 2 if self.chosen() else x


def is_one(self: Any) -> bool:
    return self is HOLDER.one


def is_not_one(self: Any) -> bool:
    return self.inner is not HOLDER.one.inner


def is_among(self: Any) -> bool:
    return self in HOLDER.some


def is_key(self: Any) -> bool:
    return HOLDER.numbers.get(self, 1) == 2


def has_id(self: Any) -> bool:
    return id(self) == id(HOLDER.one)


def has_hash(self: Any) -> bool:
    return hash(self.inner) == hash(HOLDER.one.inner)


def equals(self: Any) -> bool:
    return self == HOLDER.one


def parameter_is(self: Any) -> bool:
    return self.norm.weight is HOLDER.one.norm.weight


def dictionary_is(self: Any) -> bool:
    return self.options is HOLDER.one.options


def made_key(self: Any) -> bool:
    return self.norm in {HOLDER.one.norm: 1}


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [is_one, is_not_one, is_among, is_key, has_id, has_hash, equals, parameter_is, dictionary_is, made_key],
    ids=lambda fn: fn.__name__,
)
def test_a_module_that_asks_who_it_is(chosen: Callable[[Any], bool], read_before: bool) -> None:
    class Chosen(Asking):
        pass

    Chosen.chosen = chosen  # type: ignore[attr-defined]

    class Reading(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if read_before and (HOLDER.one is None or HOLDER.one.options is None or HOLDER.one.norm.weight is None or 7 in HOLDER.some):
                return x
            return super().forward(x)

    for number in (0, 2):

        def make(number: int = number) -> nn.Module:
            model = Reading(Chosen)
            HOLDER.one, HOLDER.some, HOLDER.numbers = model.blocks[number], [model.blocks[number]], {model.blocks[number]: 2}
            return model

        torch.manual_seed(1)
        plain = make()
        torch.manual_seed(2)
        wanted = plain(X)
        torch.manual_seed(1)
        ours = make()
        torch.manual_seed(2)
        assert_equal(captured(ours, True, (X,))[0][0], wanted)


def changing(name: str) -> type[Block]:
    """Blocks whose forward leaves something behind."""

    class Leaving(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.calls = 0
            self.cache: dict[Any, Any] = {}
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if name == "counter":
                self.calls += 1
                x = x * self.calls
            elif name == "cache":
                if "scale" not in self.cache:
                    self.cache["scale"] = 1.0 + len(self.cache)
                x = x * self.cache["scale"]
            elif name == "buffer":
                self.mask = self.mask * 2
            elif name == "in place":
                self.mask.add_(1)
            elif name == "argument":
                x = x.mul_(2)
            elif name == "shared":
                HOLDER.numbers["calls"] = HOLDER.numbers.get("calls", 0) + 1
                x = x * HOLDER.numbers["calls"]
            elif name == "class":
                type(self).total = getattr(type(self), "total", 0) + 1  # type: ignore[attr-defined]
                x = x * type(self).total  # type: ignore[attr-defined]
            elif name == "random":
                x = x * random.random()
            elif name == "tensor":
                HOLDER.x = x
            elif name == "first tensor":
                if HOLDER.x is None:
                    HOLDER.x = x
                x = x + HOLDER.x
            elif name == "grad mode":
                torch.set_grad_enabled(not torch.is_grad_enabled())
            return super().forward(x)

    return Leaving


@pytest.mark.parametrize(
    "name", ["counter", "cache", "buffer", "in place", "argument", "shared", "class", "random", "tensor", "first tensor", "grad mode"]
)
def test_a_call_that_leaves_something_behind(name: str) -> None:
    results = []
    for replay in (None, False, True):
        HOLDER.numbers, HOLDER.x = {}, None
        torch.manual_seed(1)
        random.seed(1)
        block = changing(name)
        model = Stack(block, 3)
        torch.manual_seed(2)
        with torch.enable_grad():
            found = [model(X), model(X)] if replay is None else captured(model, replay, (X,))[0]
        left = [(b.calls, b.cache, b.mask, getattr(block, "total", 0)) for b in model.blocks]
        results.append((found, left, dict(HOLDER.numbers), random.random(), HOLDER.x))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


class Written(Stack):
    """What the caller does between calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == 2:
                block.scale = 2.0
                block.options["bias"] = 5.0
            x = block(x)
        return x


def test_a_module_that_was_written_before_its_call() -> None:
    check(Written, 1 + 1 + 1)  # block 1, the inner sequence of block 3, block 4


def test_kept_between() -> None:
    class Keeping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            kept: dict[str, Any] = {"first": x}
            HOLDER.x = kept
            for block in self.blocks:
                x = block(x)
            return x

    class Reader(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + HOLDER.x["first"]

    check(lambda: Keeping(Reader), 4)


def test_containers_as_arguments() -> None:
    class Passing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            context: dict[str, Any] = {"first": x, "all": []}
            for block in self.blocks:
                x = block(x, context)
            return x + len(context["all"])

    class Reader(Block):
        def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
            return super().forward(x) + context["first"]

    class Writer(Block):
        def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
            context["all"].append(x)
            return super().forward(x) * len(context["all"])

    check(lambda: Passing(Reader), 4)
    check(lambda: Passing(Writer), 4)  # only super().forward


def test_closures_differ() -> None:
    class Calling(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.function = scaled_by(1 + number // 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(super().forward(x))

    check(lambda: Stack(Calling), 4)


def scaled_by(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def test_a_cell_that_the_caller_writes() -> None:
    state: Any = None

    class Reader(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + state

    class Writer(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal state
            state = x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    check(lambda: Writer(Reader), 4)


def test_numbers_of_made_tensors_decide() -> None:
    class Deciding(Block):
        def forward(self, x: torch.Tensor, number: Any = None) -> torch.Tensor:
            x = super().forward(x)
            return x * 2 if number.sum() > 3 else x

    check(stepping(Deciding, lambda k, block, x: block(x, torch.full((2,), float(k)))), 4)


def test_results_of_all_kinds() -> None:
    class Many(Block):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, None, [x, 3, (y * 2, "text")], {"x": x}

    def step(k: int, block: Any, x: torch.Tensor) -> torch.Tensor:
        x, nothing, (old, three, (twice, text)), table = block(x)
        assert nothing is None and three == 3 and text == "text" and table["x"] is old
        return x + old + twice

    check(stepping(Many, step), 4)


def test_views_as_results() -> None:
    class Viewing(Block):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, y.view(-1), x.t()

    def step(k: int, block: Any, x: torch.Tensor) -> torch.Tensor:
        x, flat, turned = block(x)
        flat.mul_(2)
        return x + turned.t()

    check(stepping(Viewing, step), 0)  # something has been written in place in between


def test_modes_around_and_inside() -> None:
    class Inside(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x * 2
            with torch.autocast("cpu", torch.bfloat16):
                z = self.inner(y)
            return super().forward(x) + z.float()

    class Around(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                with torch.set_grad_enabled(number != 2):
                    x = block(x)
            return x * self.first.bias

    check(lambda: Stack(Inside), 4)
    check(lambda: Around(Block), 0)  # each has a context manager of its own around it


def test_arguments_differ() -> None:
    class Mixed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                x = block(x, x if number == 1 else None) if number < 3 else block(x, shift=X * number)
            return self.blocks[0](x[:2])

    check(Mixed, 2 + 2)  # blocks 2 and 4, inner sequences of 1 and 3


def test_breaks_and_raises_stay_in_their_place() -> None:
    class Breaking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if self.number == 3:
                magneto.graph_break()
            if self.number == 4:
                try:
                    raise ValueError
                except ValueError:
                    x = x + 1
            return x

    torch.manual_seed(1)
    model = Stack(Breaking)
    torch.manual_seed(2)
    wanted = model(X)
    torch.manual_seed(2)
    assert_equal(captured(model, True, (X,))[0][0], wanted)


def test_a_change_after_capture_is_seen() -> None:
    model = Stack().eval()
    compiled = captured(model, True, (X,))[3]
    for change in (set_constant, set_item, set_hook, set_inner_hook, set_method, set_activation):
        change(model.blocks)
        with magneto.config.patch(replay_equal_modules=True):
            assert_equal(compiled(X), model(X), where=change.__name__)


def counting() -> Any:
    for number in range(100):
        yield 1.0 + number


@pytest.mark.parametrize("of", ["module", "holder"])
@pytest.mark.parametrize(
    "make", [lambda: iter([1.0, 2.0, 3.0, 4.0] * 9), counting, lambda: itertools.count(1.0), lambda: enumerate([1.0] * 36)]
)
def test_what_steps_from_call_to_call(make: Callable[[], Any], of: str) -> None:
    class Stepping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            step = next(HOLDER.x if of == "holder" else self.steps)
            return super().forward(x) * (step[0] if isinstance(step, tuple) else step)

    results = []
    for replay in (None, True):
        HOLDER.x = make()
        torch.manual_seed(1)
        model = Stack(Stepping, 3).eval()
        for block in model.blocks:
            block.steps = HOLDER.x
        results.append([model(X), model(X)] if replay is None else captured(model, replay, (X,))[0])
    assert_equal(results[1], results[0])


def test_what_the_caller_hands_on_by_the_program_s_objects() -> None:
    """The first module's own things, given to all: they are not replaced by the others'."""

    class Handing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            weight = {"weight": self.blocks[0].norm.weight}
            HOLDER.x = weight
            for block in self.blocks:
                x = block(x, weight, self.blocks[0].mask)
            return x

    class Given(Block):
        def forward(self, x: torch.Tensor, weight: Any, mask: Any) -> torch.Tensor:
            return super().forward(x) * weight["weight"] * HOLDER.x["weight"] + mask + (self.mask is mask)

    def make() -> nn.Module:
        model = Handing(Given)
        for number, block in enumerate(model.blocks):
            block.mask.fill_(number + 1)
            nn.init.constant_(block.norm.weight, number + 1)
        return model

    check(make, 4)


def test_a_written_table_that_becomes_another_modules() -> None:
    """What a region writes must not be what a replayed call has read."""
    model = Stack(Block, 4).eval()

    def run(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
        model.blocks[1].options["bias"] = model.blocks[1].options["bias"] + 1
        return x + model.blocks[3].options["bias"]

    def outcomes(fn: Any) -> list[Any]:
        for block in model.blocks:
            block.options = {"bias": 1.0}
        found = [fn(X), fn(X)]
        model.blocks[3].options = model.blocks[1].options = {"bias": 1.0}
        return [*found, fn(X), fn(X)]

    wanted = outcomes(run)
    with magneto.config.patch(replay_equal_modules=True):
        assert_equal(outcomes(magneto.optimize("eager")(run)), wanted)


def test_parameters_exchanged_for_a_call() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Stack().blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = Plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = {"blocks.1.norm.weight": x[0], "blocks.3.mask": x[1]}
            return torch.func.functional_call(self.plain, given, (x,)) + self.plain(x * 2)

    check(Around, 4)


def test_nested_equal_modules() -> None:
    class Outer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Block(k) for k in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x) + x
            return x

    def differs() -> nn.Module:
        model = Stack(Outer, 3)
        model.blocks[2].parts[1].scale = 4.0
        return model

    check(lambda: Stack(Outer, 3), 2 + 2)
    check(differs, 2 + 1 + 1 + 2)


def test_the_event_counts_calls() -> None:
    captured(Stack(), True, (X,))
    assert [(event.function, event.calls) for event in events.events("replay")] == [("Stack.forward", 4)]


def test_a_written_buffer_begins_to_require_gradients() -> None:
    """Between two calls of one module: it has been written before, so that no number of written tensors tells."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()
            self.mask = torch.ones(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.mask * (3 if self.mask.requires_grad else 5)

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.weight = Asking(), nn.Parameter(torch.full((8,), 2.0))

        def forward(self, x: torch.Tensor) -> Any:
            mask, found = self.block.mask, []
            for factor in (2, 3, self.weight, 4):
                mask.mul_(factor)
                found.append(self.block(x))
            return [one.requires_grad for one in found], sum(found)

    plain, ours = Written(), Written()
    wanted, (found, _, calls, _) = plain(X), captured(ours, True, (X,))
    assert calls == 2 + 3  # the third captured anew; in the second call, the mask requires gradients from the start
    assert_equal(found[0], wanted)


class Plain:
    """An object that nobody compares but by identity."""

    value = 1.0


def own(block: Any, k: int, value: Any) -> None:
    block.own = value


def sibling_of(block: Any, k: int) -> None:
    HOLDER.some = [*(HOLDER.some if k else ()), block]
    object.__setattr__(block, "own", HOLDER.some[max(0, k - 1)])


@functools.lru_cache(None)
def remembered(key: Any) -> float:
    return next(ANSWERS)


ANSWERS = itertools.count(1.0)
OBSERVED: dict[str, tuple[Callable[[Any, int], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "argument": (lambda b, k: own(b, k, X if k == 3 else X * 2), lambda b, x: 2 if b.own is X else 1),
    "order of keys": (
        lambda b, k: own(b, k, {"a": 2.0, "b": 3.0} if k != 2 else {"b": 3.0, "a": 2.0}),
        lambda b, x: next(iter(b.own.values())),
    ),
    "order of a set": (lambda b, k: own(b, k, {0, 8} if k != 2 else {8, 0}), lambda b, x: 1 + next(iter(b.own))),
    "kind of a key": (lambda b, k: own(b, k, {1: 1} if k != 2 else {True: 1}), lambda b, x: 1 + (type(next(iter(b.own))) is bool)),
    "factory": (
        lambda b, k: own(b, k, collections.defaultdict((int, float)[k % 2])),
        lambda b, x: 1 + isinstance(b.own.default_factory(), int),
    ),
    "partial": (lambda b, k: own(b, k, functools.partial(scaled_by, 1 + k // 2)), lambda b, x: b.own()(1)),
    "weak": (lambda b, k: own(b, k, weakref.ref(b.norm if k != 3 else b.inner)), lambda b, x: b.own()(x)),
    "weak keys": (
        lambda b, k: setattr(HOLDER, "x", weakref.WeakKeyDictionary({b.norm: 3.0} if k == 2 else HOLDER.x or {})),
        lambda b, x: HOLDER.x.get(b.norm, 1.0),
    ),
    "gradient": (
        lambda b, k: setattr(b.norm.weight, "grad", torch.ones(8) if k == 2 else None),
        lambda b, x: 1 if b.norm.weight.grad is None else 2,
    ),
    "stride": (
        lambda b, k: own(b, k, torch.ones(4, 4) if k != 2 else torch.ones(4, 4).t()),
        lambda b, x: b.own.sum() * b.own.is_contiguous(),
    ),
    "one tensor twice": (
        lambda b, k: own(b, k, [torch.ones(8)] * 2 if k == 2 else [torch.ones(8), torch.ones(8)]),
        lambda b, x: b.own[0] * (2 if b.own[0] is b.own[1] else 1),
    ),
    "default equality": (
        lambda b, k: (own(b, k, Plain()), k == 2 and setattr(HOLDER, "one", b.own)),
        lambda b, x: b.own.value * (2 if b.own == HOLDER.one else 1),
    ),
    "key by identity": (
        lambda b, k: (own(b, k, Plain()), k == 2 and setattr(HOLDER, "numbers", {(b.own, 1): 5.0})),
        lambda b, x: HOLDER.numbers.get((b.own, 1), 1.0),
    ),
    "cached": (lambda b, k: remembered(b), lambda b, x: remembered(b)),
    "sibling": (sibling_of, lambda b, x: b.own.norm(x)),
    "classes of one name": (lambda b, k: own(b, k, type("Made", (Plain,), {"value": 1.0 + k // 2})()), lambda b, x: b.own.value),
    "text": (lambda b, k: own(b, k, nn.Identity() if k != 2 else nn.ReLU()), lambda b, x: len(str(b))),
    "walk": (lambda b, k: own(b, k, b.norm if k == 2 else nn.LayerNorm(8)), lambda b, x: len(list(b.named_modules()))),
    "call of its own": (lambda b, k: setattr(b.norm, "_call_impl", torch.sin) if k == 2 else None, lambda b, x: 1),
    "dead attribute": (lambda b, k: own(b, k, 1.0) if k != 2 else None, lambda b, x: getattr(b, "own", 7.0)),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_what_a_call_observes(name: str) -> None:
    """Equal but for what one expression sees of each block."""
    equip, observe = OBSERVED[name]

    class Observing(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            equip(self, number)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * observe(self, x)

    HOLDER.one, HOLDER.some, HOLDER.numbers, HOLDER.x = None, (), {}, None
    torch.manual_seed(1)
    model = nn.Sequential(*map(Observing, range(5))).eval()
    wanted = [model(X), model(X)]
    assert_equal(captured(model, True, (X,))[0], wanted)


@pytest.mark.parametrize("of", ["tensor", "global", "cell", "default"])
def test_what_the_caller_changes_between_equal_calls(of: str) -> None:
    log: list[float] = [1.0]

    class Told(Block):
        def forward(self, x: torch.Tensor, log: Any = log) -> torch.Tensor:
            told = x.log if of == "tensor" else HOLDER.some if of == "global" else log  # type: ignore[attr-defined]
            return super().forward(x) * len(told)

    def step(k: int, block: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal log
        log = [1.0] if k == 0 and of != "default" else log
        if of == "tensor":
            x = x * 1
            x.log = log  # type: ignore[attr-defined]
        HOLDER.some = log
        x = block(x, log) if of == "cell" else block(x)
        log.append(1.0)
        return x

    HOLDER.some, found = (), []
    for replay in (None, True):
        del log[1:]
        torch.manual_seed(1)
        model = stepping(Told, step)().eval()
        found.append([model(X), model(X)] if replay is None else captured(model, replay, (X,))[0])
    assert_equal(found[1], found[0])
