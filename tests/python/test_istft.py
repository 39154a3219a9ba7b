"""`istft` is part of the graph; that its windows cover the signal is checked there, and eager raises where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal, same

BACKENDS = ("aot_eager", "inductor")
WINDOW = torch.hann_window(16)


def spectrum(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.stft(x, 16, window=WINDOW, return_complex=True, **options)


CAPTURED: dict[str, Any] = {
    "plain": lambda x: torch.istft(spectrum(x), 16, window=WINDOW) * 2,
    "method": lambda x: spectrum(x, hop_length=8).istft(16, 8, window=WINDOW, length=x.size(-1)),
    "parts": lambda x: torch.istft(torch.polar(spectrum(x).abs() * 2, spectrum(x).angle()), 16, window=WINDOW, normalized=True),
    "two sides": lambda x: torch.istft(spectrum(x, onesided=False), 16, window=WINDOW, onesided=False, return_complex=True).real,
    "double": lambda x: torch.istft(spectrum(x).to(torch.complex128), 16, window=WINDOW.double(), center=True),
}
WRONG: dict[str, Any] = {
    "windows with gaps": lambda x: torch.istft(spectrum(x, hop_length=16, center=False), 16, 16, window=WINDOW, center=False),
    "not read": lambda x: (torch.istft(spectrum(x, hop_length=16, center=False), 16, 16, window=WINDOW, center=False), x)[1] * 2,
    "a zero window": lambda x: torch.istft(spectrum(x), 16, window=x[0, :16] * 0),
    "real": lambda x: torch.istft(x, 16, window=WINDOW),
    "another length": lambda x: torch.istft(spectrum(x), 32, window=WINDOW),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CAPTURED)
def test_no_break(name: str, backend: str) -> None:
    compiled = magneto.optimize(backend)(CAPTURED[name])
    for _ in range(2):
        same(CAPTURED[name], compiled, torch.randn(2, 160), tolerance=1e-5)
        found = []
        x = torch.randn(2, 160)
        for call in (CAPTURED[name], compiled):
            given = x.clone().requires_grad_()
            call(given).square().sum().backward()
            found.append(given.grad)
        assert_equal(found[1], found[0], 1e-3)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
@pytest.mark.parametrize("name", WRONG)
def test_eagers_errors(name: str, backend: str) -> None:
    compiled = magneto.optimize(backend)(WRONG[name])
    for _ in range(2):
        same(WRONG[name], compiled, torch.randn(2, 160))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_a_vocoder(backend: str) -> None:
    found = []
    for optimize in (lambda fn: fn, magneto.optimize(backend)):
        torch.manual_seed(0)
        net = nn.Linear(6, 18)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)

        @optimize
        def step(x: torch.Tensor) -> torch.Tensor:
            optimiser.zero_grad()
            size, phase = net(x).transpose(1, 2).chunk(2, 1)
            loss = torch.istft(torch.exp(size) * torch.exp(1j * phase), 16, 4, window=WINDOW).square().mean()
            loss.backward()
            optimiser.step()
            return loss.detach()

        found.append(([step(torch.randn(2, 12, 6)) for _ in range(3)], net.weight))
    assert_equal(found[1], found[0], 1e-5)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)
