"""Switches of the process that tracing moves for a while."""

from __future__ import annotations

import threading

import pytest
import torch

from magneto.graph.modes import without_cudnn


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_on_again_when_two_threads_have_traced(enabled: bool) -> None:
    """The second one begins while the first has it off, and ends later: it was left off for good."""
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(enabled)
    inside, left = threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        with without_cudnn():
            inside.set()
            left.wait(10)
            seen.append(torch._C._get_cudnn_enabled())

    try:
        thread = threading.Thread(target=second)
        with without_cudnn():
            thread.start()
            assert inside.wait(10)
        left.set()
        thread.join()
        assert seen == [False]
        assert torch._C._get_cudnn_enabled() is enabled
    finally:
        torch._C._set_cudnn_enabled(before)


def test_cudnn_is_on_again_behind_an_error() -> None:
    before = torch._C._get_cudnn_enabled()
    with pytest.raises(ValueError), without_cudnn(), without_cudnn():
        raise ValueError
    assert torch._C._get_cudnn_enabled() is before
