"""For all tests: every compiler check on, a private cache directory, a clean compiler before each test, the same random numbers."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator

# Before anything of magneto is imported: the flags read the environment once.
os.environ.setdefault("MAGNETO_VERIFY", "1")
os.environ.setdefault("MAGNETO_SIZE_SECONDS", "1000")  # what is compiled does not depend on how busy the machine is
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


def pytest_collection_finish() -> None:
    """Collections of garbage, which some tests ask for, pass over the hundreds of thousands of objects that importing everything has made."""
    gc.collect()
    gc.freeze()


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
        if "torch.distributions" in sys.modules:  # torch._dynamo turns the checks off for the whole process
            torch.distributions.Distribution.set_default_validate_args(__debug__)
        _reset_compiler()
        before = _thread_state()
    yield
    flags.config.reset()
    if HAVE_TORCH:
        after = _thread_state()
        assert after == before, "the test left torch in another state: a later test would be judged under it"


def _thread_state() -> dict[str, object]:
    """What torch keeps for the thread. An autocast that was never left keeps casted weights: a later step would compute with old ones."""
    import torch

    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "autocast nesting": nesting,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "anomaly mode": torch.is_anomaly_enabled(),
    }


def _reset_compiler() -> None:
    """Only where something may have been compiled: a test of a lower layer need not load the upper ones."""
    api = sys.modules.get("magneto.api")
    if api is not None:
        api.reset()
