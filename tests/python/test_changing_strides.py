"""Strides of inputs that differ from call to call while no size does (the last tokens of sequences that grow): from the third layout on there is one region for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import magneto
from magneto.base.events import counters
from magneto.graph.resize import Form, Resizer, form_of, gaps
from tests.compare import assert_equal, outcome

BACKENDS = ["eager", "aot_eager", "inductor"]
LAST = range(5, 25)

CASES: dict[str, Callable[[int], torch.Tensor]] = {
    "tokens": lambda n: torch.arange(4 * n).remainder(50).view(4, n)[:, -1],
    "one_token": lambda n: torch.arange(n).remainder(50).view(1, n)[:, -1],
    "one_token_with_its_dimension": lambda n: torch.arange(n).remainder(50).view(1, n)[:, -1:],
    "column": lambda n: torch.linspace(-1, 1, 6 * n).view(6, n)[:, 2],
    "window": lambda n: torch.linspace(-1, 1, 6 * n).view(6, n)[:, 1:5],
    "transposed_window": lambda n: torch.linspace(-1, 1, 6 * n).view(6, n)[:, 1:5].t(),
    "place": lambda n: torch.linspace(-1, 1, 16 * n).view(2, n, 8)[:, -1],
    "one_place": lambda n: torch.linspace(-1, 1, 8 * n).view(1, n, 8)[:, 1:2],
    "two_strides": lambda n: torch.linspace(-1, 1, 24 * n).view(2, 3, n, 4)[:, :, :5],
    "crop": lambda n: torch.linspace(-1, 1, 6 * n * (n + 3)).view(2, 3, n, n + 3)[..., 1:5, 2:5],
    "channels_last": lambda n: torch.linspace(-1, 1, 18 * n).view(2, n, 3, 3).to(memory_format=torch.channels_last)[:, :4],
}
"""Views of tensors that grow: of the same sizes, but for what a token is."""


def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return y, x.flatten() + 1, x.unsqueeze(0).transpose(0, -1) * y.sum(), torch.cat([x, x]).cumsum(0), x.contiguous().float().sin()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str, backend: str) -> None:
    compiled = magneto.optimize(backend)(program)
    for n in LAST:
        x = CASES[name](n)
        assert_equal(compiled(x), program(x), 1e-5)
    stats = magneto.stats()
    assert stats["graphs"] <= 3 and stats["recompiles"] == stats["graphs"] - 1 and not stats["fallbacks"]


def grown(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 6 * n + 12).view(6, n + 2)[:, 2:6]


def written(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1
    return x.mul_(0.5) + 1


def made_and_written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.contiguous()
    y += 1
    z = x.reshape(-1)
    z *= 3
    z[0] = 7
    return y, x + 0, z * 2


def put_into_a_copy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.contiguous()
    y[0] = 7
    return y * 2, x + 0


def handed_out(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[1:], x.t(), x.detach(), x * 2


def asked(x: torch.Tensor) -> tuple[object, ...]:
    return x * x.stride(0), x.stride(), x.is_contiguous(), x.t().is_contiguous(), torch.empty_like(x).stride(), (x + 1).stride()


def decides(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.stride(0) > 10 else x + 1


def viewed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.view(3, 2, 2, 2) * 2, x.view(torch.int32) + 1, x.unfold(1, 2, 1).sum(-1), x.as_strided((2, 2), (3, 1)) + 1


def no_view(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1) * 2


def wider(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.unflatten(1, (2, 2))).abs()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fn", "most"),
    [
        (written, 3),
        (made_and_written, 3),
        (put_into_a_copy, 3),
        (handed_out, 3),
        (asked, 3),
        (decides, 4),
        (viewed, 3),
        (no_view, 8),
        (wider, 4),
    ],
)
def test_what_the_program_can_tell(fn: Callable[[torch.Tensor], object], most: int, backend: str) -> None:
    """Results, what shares memory with the argument, and what has been written."""
    compiled = magneto.optimize(backend)(fn)
    for n in range(6, 36, 2):
        found = []
        for call in (fn, compiled):
            x = grown(n)
            result, error = outcome(call, ((x,), {}))
            parts = result if isinstance(result, tuple) else (result,)
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            shared = [t.data_ptr() - x.data_ptr() for t in tensors if t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()]
            found.append((parts, [t.stride() for t in tensors], shared, x._base, str(error)))
        assert_equal(found[1], found[0], 1e-5)
    assert magneto.stats()["graphs"] <= most


@pytest.mark.filterwarnings("ignore:.*inputs that share memory are written")
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_argument_that_shares_memory_with_a_written_one(backend: str) -> None:
    def step(memory: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        memory.add_(1)
        return last * 2

    compiled = magneto.optimize(backend)(step)
    for n in range(4, 20):
        for apart in (False, True):
            found = []
            for call in (step, compiled):
                memory = torch.arange(4.0 * n).view(4, n)
                found.append(call(memory, memory.clone()[:, -1] if apart else memory[:, -1]))
            assert_equal(found[1], found[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leaf", [False, True])
def test_gradients(leaf: bool, backend: str) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    compiled = magneto.optimize(backend)(net)
    for n in LAST:
        found = []
        for call in (net, compiled):
            net.zero_grad()
            whole = torch.linspace(-1, 1, 24 * n).view(3, n, 8).requires_grad_(not leaf)
            x = whole[:, 1].requires_grad_()
            y = call(x)
            y.square().sum().backward()
            grads = [p.grad for p in net.parameters()]
            found.append((y, x.grad if leaf else whole.grad, grads))
        assert_equal(found[1], found[0], 1e-4)
    stats = magneto.stats()
    assert stats["graphs"] == 3 and not stats["fallbacks"]
    if backend == "inductor":
        assert counters().get("families_refused", 0) == counters().get("sizes_compiled", 0) == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inputs_that_are_only_read_are_compiled_once(backend: str) -> None:
    table = torch.linspace(-1, 1, 400).view(50, 8)
    compiled = magneto.optimize(backend)(lambda tokens: table[tokens] * 2)
    for n in LAST:
        tokens = CASES["tokens"](n)
        assert_equal(compiled(tokens), table[tokens] * 2)
    assert magneto.stats()["graphs"] == 3
    assert not counters().get("sizes_compiled") and not counters().get("families") and not counters().get("sizes_in_eager")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_buffer_with_another_layout_and_other_contents(backend: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale.exp().sum(0)

    net = Scaled()
    compiled = magneto.optimize(backend)(net)
    with torch.no_grad():
        for n in LAST:
            net.scale = grown(n)
            for _ in range(2):
                net.scale += 0.25
                x = torch.arange(4.0)
                assert_equal(compiled(x), net(x), 1e-5)


def test_many_layouts_that_differ() -> None:
    """More than can be told apart are constants."""
    compiled = magneto.optimize("inductor")(lambda *xs: sum(x * 2 for x in xs))
    for n in range(4):
        xs = [torch.ones(3, 6 + n * (k + 1))[:, :5] for k in range(12)]
        assert_equal(compiled(*xs), torch.full((3, 5), 24.0))


def test_strides_are_propagated_by_their_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    run = Resizer.run
    monkeypatch.setattr(Resizer, "run", lambda self, sizes: (asked.append(sizes), run(self, sizes))[1])
    compiled = magneto.optimize("eager")(program)
    for n in (70, 71, 72, 73):
        compiled(CASES["window"](n))
    known = len(asked)
    for n in (136, 137, 72 + 640, 73 + 6400):
        compiled(CASES["window"](n))
    assert len(asked) == known
    assert magneto.stats()["graphs"] == 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return x + self.out(y.transpose(1, 2).flatten(2)), (k, v)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(50, 16), nn.Embedding(64, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(
        self, ids: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        start = 0 if past is None else past[0][0].shape[2]
        x, new = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1])), []
        for k, layer in enumerate(self.layers):
            x, kept = layer(x, None if past is None else past[k])
            new.append(kept)
        return self.head(x[:, -1]), new


def without_cache(model: Callable[..., tuple[torch.Tensor, object]], ids: torch.Tensor) -> Iterator[torch.Tensor]:
    while True:
        logits, _ = model(ids)
        ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
        yield ids[:, -1]


def with_cache(model: Callable[..., tuple[torch.Tensor, object]], ids: torch.Tensor) -> Iterator[torch.Tensor]:
    logits, past = model(ids)
    while True:
        ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
        yield ids[:, -1]
        logits, past = model(ids[:, -1:], past)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("decode", [without_cache, with_cache])
def test_greedy_decoding_by_hand(decode: Callable[..., Iterator[torch.Tensor]], batch: int, backend: str) -> None:
    model = Decoder().eval()
    compiled = magneto.optimize(backend)(model)
    ids = torch.arange(5 * batch).view(batch, 5)
    with torch.inference_mode():
        for _, ours, plain in zip(range(40), decode(compiled, ids), decode(model, ids), strict=False):
            assert torch.equal(ours, plain)
    assert magneto.stats()["graphs"] <= 4


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sizes_that_vary_inside_of_inference_mode(backend: str) -> None:
    layer = nn.Linear(8, 8)

    @torch.inference_mode()
    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x).relu().sum(1)

    compiled = magneto.optimize(backend)(step)
    for n in range(3, 20):
        x = torch.linspace(-1, 1, 16 * n).view(2, n, 8)
        torch.testing.assert_close(compiled(x), step(x))
    assert magneto.stats()["graphs"] == 3 and not magneto.stats()["fallbacks"]


def test_which_strides_may_vary() -> None:
    assert gaps((4,), (9,), [0]) == [(0, ())]
    assert gaps((4, 3), (9, 1), [0, 1]) == [(0, (1,))]
    assert gaps((2, 3, 5, 4), (96, 32, 4, 1), [0, 1]) == [(1, (3, 2))]  # the outermost follows from it
    assert gaps((4, 3), (3, 1), [0, 1]) == []  # dense
    assert gaps((2, 4, 3), (50, 9, 1), [1]) == []  # within a stride that does not vary
    assert gaps((4, 3), (2, 1), [0]) == []  # overlapping
    form = form_of((2, 3, 5, 4), (96, 32, 4, 1), {2: (0, 0)}, {1: (1, (3, 2))})
    assert form == Form(((2, ()), (3, ()), (1, ((0, 0),)), (4, ())), ((3, ((1, 0),)), (1, ((1, 0),)), (4, ()), (1, ())), ((1, (3, 2)),))
    assert form.symbols == ((2, 0, 0), (5, 1, 0)) and list(form.rows(7)) == [(7, 2, 0, 0), (7, ~1, 1, 0)]
    assert form.reaches((5, 32)) == [20]
