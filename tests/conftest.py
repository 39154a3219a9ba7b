"""For all tests: every compiler check on, a private cache directory, a clean compiler before each test, the same random numbers."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator

# Before anything of magneto is imported: the flags read the environment once.
os.environ.setdefault("MAGNETO_VERIFY", "1")
if "MAGNETO_CACHE_DIR" not in os.environ:
    os.environ["MAGNETO_CACHE_DIR"] = tempfile.mkdtemp(prefix="magneto-tests-")

import pytest

HAVE_TORCH = importlib.util.find_spec("torch") is not None


def pytest_ignore_collect(collection_path: os.PathLike[str]) -> bool | None:
    """Without torch only files that mark themselves torchfree are even imported."""
    path = os.fspath(collection_path)
    if HAVE_TORCH or not os.path.basename(path).startswith("test_"):
        return None
    with open(path, encoding="utf-8") as file:
        return True if "torchfree" not in file.read() else None


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    """Each test starts with the flags of the environment, no compiled code, nothing said, and the same seed."""
    from magneto.base import errors, events, flags

    flags.config.reset()
    errors.forget_warnings()
    events.reset()
    if HAVE_TORCH:
        import torch

        torch.manual_seed(0)
        _reset_compiler()
    yield
    flags.config.reset()


def _reset_compiler() -> None:
    """Only where something may have been compiled: a test of a lower layer need not load the upper ones."""
    api = sys.modules.get("magneto.api")
    if api is not None:
        api.reset()
