"""Global switches of torch that a function sets for a while."""

# ruff: noqa

from __future__ import annotations

import torch

import magneto


def test_switches_of_cudnn_are_set_and_put_back():
    def fn(x, stop):
        with torch.backends.cudnn.flags(enabled=False, deterministic=True):
            y = x.sin()
            inside = torch.backends.cudnn.enabled
            if stop:
                magneto.graph_break()
            inside = inside, torch.backends.cudnn.deterministic
        return y * 2, inside, torch.backends.cudnn.enabled

    def switches():
        return torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark

    compiled = magneto.optimize("eager")(fn)
    before = switches()
    x, expected = torch.ones(3), 0
    for stop in (False, True, False):
        y, *answers = compiled(x, stop)
        assert stop or magneto.stats()["breaks"] == expected
        expected = magneto.stats()["breaks"]
        assert torch.equal(y, x.sin() * 2) and answers == [(False, True), before[0]] and switches() == before
    torch.backends.cudnn.enabled = not before[0]
    try:
        assert compiled(x, False)[2] is not before[0]
    finally:
        torch.backends.cudnn.enabled = before[0]
