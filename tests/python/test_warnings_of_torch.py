"""What torch warns when capture asks it is shown once, at the program's line, as in eager."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import magneto
from magneto.base.errors import MagnetoWarning
from magneto.base.heard import taken
from tests.compare import same


def sizes(x: torch.Tensor) -> Any:
    y = F.mse_loss(x, x[:, 0])
    return F.mse_loss(x[:2], x[0]) + y


def no_freedom(x: torch.Tensor) -> Any:
    a = x.var(1), x.std((0, 1), correction=9), torch.var_mean(x, 1)[1]
    b = torch.std_mean(x, dim=1, correction=2), x[:0].var(0)
    return a, b, x[0].std(), x.std(0), x.var(1, unbiased=False), torch.var(x, 0, correction=2)


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x)


def in_a_helper(x: torch.Tensor) -> Any:
    return helper(x) + helper(x * 2), F.kl_div(x, x.exp())


def of_a_module(x: torch.Tensor) -> Any:
    return nn.L1Loss()(x, x[:, 0])


def behind_a_break(x: torch.Tensor) -> Any:
    y = F.upsample(x[None, None], scale_factor=2)
    magneto.graph_break()
    return F.upsample(y, scale_factor=2), y.dim()


PROGRAMS = [sizes, no_freedom, in_a_helper, of_a_module, behind_a_break]


def shown(fn: Callable[..., Any], action: Any, times: int = 3) -> Any:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        for k in range(times):
            try:
                x = torch.arange(3.0).view(3, 1) + k
                fn(x.requires_grad_(k == 1))
            except UserWarning as error:
                found.append(warnings.WarningMessage(error, type(error), "raised", 0))
    return [(str(w.message), w.category, w.filename, w.lineno) for w in found if w.category is not MagnetoWarning]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_warning_is_shown_at_its_line(program: Callable[..., Any], backend: str) -> None:
    expected = shown(program, "default")
    found = [
        one for one in shown(magneto.optimize(backend)(program), "default") if not one[2].startswith("<magneto")
    ]  # calls of the library
    assert expected and sorted(map(str, found)) == sorted(map(str, expected))


@pytest.mark.parametrize("action", ["error", "ignore"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_filters(program: Callable[..., Any], action: str) -> None:
    assert shown(magneto.optimize("inductor")(program), action, 1) == shown(program, action, 1)


def test_what_has_been_shown_is_not_shown_again_behind_a_compile() -> None:
    def said(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("said", stacklevel=1)
        return x

    def program(x: torch.Tensor) -> torch.Tensor:
        return magneto.optimize("inductor")(lambda x: F.mse_loss(x, x[0]))(said(x))

    texts = [text for text, *_ in shown(program, "default")]
    assert texts.count("said") == 1


def test_only_this_thread_is_listened_to_and_our_own_warnings_pass() -> None:
    before, heard = warnings._showwarnmsg, list[warnings.WarningMessage]()  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with taken(heard):
            other = threading.Thread(target=warnings.warn, args=("other",))
            other.start()
            other.join()
            with taken([]):
                warnings.warn("inner", stacklevel=1)
            warnings.warn("outer", stacklevel=1)
            warnings.warn(MagnetoWarning("ours"), stacklevel=1)
        warnings.warn("behind", stacklevel=1)
    assert [str(w.message) for w in heard] == ["outer"] and [str(w.message) for w in found] == ["other", "ours", "behind"]
    assert warnings._showwarnmsg is before  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_kernels_that_are_asked_for_types_do_not_warn(dtype: torch.dtype) -> None:
    x = torch.ones(4, 4, dtype=dtype)
    compiled = magneto.optimize("eager", nopython=True)(lambda x: (x.var(-1), x.std(0, correction=2), torch.var_mean(x)[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x)


def test_sizes_that_are_tried_are_not_the_programs() -> None:
    for options in ({"dynamic": True}, {}):
        compiled = magneto.compile(lambda x: F.mse_loss(x, x[:1]) + x.sum(), **options)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for n in (3, 4, 5, 6, 7):
                compiled(torch.ones(n))
        texts = {str(w.message).split(". This")[0] for w in found}
        assert texts and texts <= {
            f"Using a target size (torch.Size([1])) that is different to the input size (torch.Size([{n}]))" for n in range(3, 8)
        }


def test_what_is_warned_inside_of_our_modes_is_at_the_programs_line() -> None:
    program = """
import warnings, torch, magneto
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    magneto.optimize("eager")(torch.nn.LSTM(2, 4, proj_size=3))(torch.ones(3, 1, 2))
print([w.filename for w in found])
"""  # once in a process
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.strip() == repr([torch.nn.modules.rnn.__file__])


def old_autocast(x: torch.Tensor) -> Any:
    with torch.cpu.amp.autocast():  # type: ignore[attr-defined]
        y = x @ x.t()
    with torch.cuda.amp.autocast(enabled=False):
        return y, x @ x.t()


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_old_autocast_is_deprecated(action: Any, backend: str) -> None:
    def found(fn: Callable[..., Any]) -> list[Any]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter(action, FutureWarning)
            try:
                results = [fn(torch.ones(2, 3)) for _ in range(2)]
            except FutureWarning as error:
                return [str(error)]
        return [results, *[(str(w.message), w.category, w.filename, w.lineno) for w in said]]

    texts = found(magneto.optimize(backend)(old_autocast))
    assert str(texts) == str(found(old_autocast)) and "deprecated" in str(texts[-1])
    assert action == "error" or magneto.stats()["breaks"] == 0


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_old_autocast_as_a_decorator_is_no_break(backend: str) -> None:
    decorated = torch.cpu.amp.autocast(dtype=torch.float16)(lambda x: (x @ x.t(), x.sum()))  # type: ignore[attr-defined]
    switched_off = torch.cuda.amp.autocast(enabled=False)(lambda x: x @ x.t())
    program = lambda x: (*decorated(x), switched_off(x))  # noqa: E731
    same(program, magneto.optimize(backend)(program), torch.ones(2, 3), tolerance=1e-3)
    assert magneto.stats()["breaks"] == 0
