"""Tests of the frame-evaluation hook need neither torch nor the package: see harness.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frame.harness import C, Frames


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    """Instead of the suite's fixture of that name, which needs the package. Every test leaves the hook as it found it."""
    before = C.set_compiler(None), C.set_on_rerun(None)
    C.clear()
    yield
    C.set_compiler(before[0])
    C.set_on_rerun(before[1])
    assert not C.eval_frame_installed()
    assert C.active_policy() is None


@pytest.fixture
def frames() -> Frames:
    return Frames()
