"""Recurrent layers of every kind, trained: separate halves and whole steps, with eager's numbers, gradients and dropout masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.graph.layout import Untried
from magneto.graph.meta import TensorMeta
from magneto.graph.rules_recurrent import LAYER, mkldnn_rnn_layer
from tests.compare import assert_equal

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 5),
    "lstm_deep": lambda: nn.LSTM(4, 5, 2, bidirectional=True, dropout=0.5, batch_first=True),
    "lstm_without_bias": lambda: nn.LSTM(4, 5, bias=False),
    "lstm_projected": lambda: nn.LSTM(4, 5, proj_size=3),
    "lstm_in_eval": lambda: nn.LSTM(4, 5, 2, dropout=0.5).eval(),
    "lstm_bfloat16": lambda: nn.LSTM(4, 5).bfloat16(),
    "gru": lambda: nn.GRU(4, 5),
    "gru_deep": lambda: nn.GRU(4, 5, 2, bidirectional=True, dropout=0.5),
    "rnn_tanh": lambda: nn.RNN(4, 5, batch_first=True),
    "rnn_relu": lambda: nn.RNN(4, 5, 2, nonlinearity="relu"),
}
CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm_cell": lambda: nn.LSTMCell(4, 5),
    "gru_cell": lambda: nn.GRUCell(4, 5),
    "rnn_cell": lambda: nn.RNNCell(4, 5),
}


def trained(module: nn.Module, call: Callable[..., object], x: torch.Tensor, last: bool) -> list[torch.Tensor]:
    """The result of the second call, and the gradients of parameters and input. `last`: of the final state too."""
    for _ in range(2):
        module.zero_grad()
        torch.manual_seed(3)
        x = x.detach().clone().requires_grad_()
        found = call(x)
        out, state = found if isinstance(found, tuple) else (found, found)
        state = state[0] if isinstance(state, tuple) else state
        loss = out.float().square().sum() + (state.float().sum() if last else 0)
        loss.backward()
    return [out.detach(), *(p.grad for p in module.parameters()), x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_gradients_are_eagers(name: str, backend: str) -> None:
    torch.manual_seed(0)
    module = (LAYERS.get(name) or CELLS[name])()
    x = torch.randn(3, 4) if name in CELLS else torch.randn(6, 3, 4)
    x = x.to(next(module.parameters()).dtype)
    for last in (False, True):
        expected = trained(module, module, x, last)
        magneto.reset()
        found = trained(module, magneto.optimize(backend, nopython=True)(module), x, last)
        assert magneto.stats()["fallbacks"] == 0
        exact = backend == "aot_eager" and not last
        for a, b in zip(expected, found, strict=True):
            half = a.dtype is torch.bfloat16
            torch.testing.assert_close(b, a, atol=0 if exact else 0.1 if half else 1e-5, rtol=0 if exact else 0.05 if half else 1e-4)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


def step(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimiser.step()
    return loss.detach()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_whole_step_is_one_graph(backend: str) -> None:
    torch.manual_seed(0)
    plain = Tagger()
    net = copy.deepcopy(plain)
    x, y = torch.randn(2, 5, 4), torch.tensor([0, 2])
    magneto.reset()
    losses = []
    for model, run in ((plain, step), (net, magneto.optimize(backend, nopython=True)(step))):
        optimiser = torch.optim.Adam(model.parameters(), 1e-2)
        torch.manual_seed(1)
        losses.append(torch.stack([run(model, optimiser, x, y) for _ in range(4)]))
    assert magneto.stats()["fallbacks"] == 0
    torch.testing.assert_close(losses[1], losses[0], atol=0 if backend == "aot_eager" else 1e-5, rtol=0 if backend == "aot_eager" else 1e-4)


@pytest.mark.filterwarnings("ignore::magneto.base.errors.MagnetoWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_packed_sequences_are_eagers(backend: str) -> None:
    """They break and run partly in eager: the sizes of their steps are data."""
    torch.manual_seed(0)
    layer = nn.LSTM(4, 5)

    def f(x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 2])
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0]

    x = torch.randn(6, 3, 4)
    expected = trained(layer, f, x, False)
    found = trained(layer, magneto.optimize(backend)(f), x, False)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.skipif(LAYER is None, reason="this torch has no layer of oneDNN")
def test_states_of_other_sizes_are_not_read() -> None:
    """With varying sizes the layer is described by made-up ones; the library checks nothing and would read beyond memory."""

    def meta(*shape: int) -> TensorMeta:
        return TensorMeta.contiguous(shape, torch.float32, torch.device("cpu"))

    def layer(*state: int, features: int = 3) -> object:
        weights = meta(16, 3), meta(16, 4), meta(16), meta(16)
        return mkldnn_rnn_layer(meta(5, 2, features), *weights, meta(*state), meta(*state), False, [], 2, 4, 1, True, False, True, False)

    assert layer(2, 4)
    for wrong in (lambda: layer(2, 400_000), lambda: layer(300_000, 4), lambda: layer(2, 4, features=400_000)):
        with pytest.raises(Untried, match="do not fit"):
            wrong()


def test_states_handed_on_with_varying_sizes() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4, batch_first=True)
            self.cell = nn.LSTMCell(3, 4)

        def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[object, ...]:
            y, state = self.layer(x, state)
            return y, state, self.cell(x[:, 0])

    torch.manual_seed(0)
    reader = Reader()
    compiled = magneto.compile(reader, dynamic=True)
    state = None
    for length in (4, 2, 5):
        x = torch.randn(3, length, 3)
        assert_equal(compiled(x, state), reader(x, state), 1e-6)
        state = reader(x, state)[1]  # type: ignore[assignment]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_results_over_many_steps_follow_from_a_few(kind: Any, recorded: bool, batch_first: bool) -> None:
    for options in ({}, {"bidirectional": True}, {"num_layers": 2, "dropout": 0.5}, {"bias": False, "batch": 0}):
        batch = options.pop("batch", 2)
        layer = kind(4, 5, batch_first=batch_first, **options)
        x = torch.randn((batch, 9, 4) if batch_first else (9, batch, 4))
        compiled = magneto.optimize("eager", nopython=True)(
            lambda x, layer=layer: [(t.stride(), t.shape, t.requires_grad) for t in tensors(layer(x))]
        )
        with torch.set_grad_enabled(recorded):
            assert compiled(x) == [(t.stride(), t.shape, t.requires_grad) for t in tensors(layer(x))]


def tensors(result: Any) -> list[torch.Tensor]:
    first, states = result
    return [first, *(states if isinstance(states, tuple) else (states,))]
