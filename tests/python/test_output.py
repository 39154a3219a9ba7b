"""What programs say while they run: print, streams, logging, warnings: the same texts in the same order, from the same lines, in one graph."""

# ruff: noqa

from __future__ import annotations

import collections
import contextlib
import copy
import io
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto
from tests.compare import assert_equal, outcome, same
from tests.python.programs import X

LOG = logging.getLogger("magneto.tests.output")
PROGRAMS: list[tuple[Callable[[torch.Tensor], Any], bool]] = []


def program(whole: bool = True) -> Callable[[Any], Any]:
    """A program; `whole`: captured without a break."""

    def add(fn: Any) -> Any:
        PROGRAMS.append((fn, whole))
        return fn

    return add


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.filename, record.lineno, record.funcName, record.levelname, record.getMessage(), record.args)


class Tee:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.flushed = 0

    def write(self, text: str) -> None:
        self.parts.append(text)

    def flush(self) -> None:
        self.flushed += 1


class Mine(UserWarning):
    pass


@program()
def print_with_options(x):
    print("a", x.shape, sep="-", end="!\n", flush=True)
    y = x + 1
    print("b", file=sys.stdout)
    print("c", y.dtype, file=sys.stderr)
    print()
    print("d", file=None)
    return y


@program()
def print_tensors(x):
    print("before", x)
    y = x.sum() + 1
    print("sum:", y, y.shape, sep=" ")
    print(x.requires_grad, y.grad_fn is None)
    return y * 2


@program(whole=False)
def print_a_tensor_that_is_written_later(x):
    y = x * 2
    print(y)
    y.add_(1)
    print(y)
    return y


@program()
def write_to_streams(x):
    n = sys.stdout.write(f"{tuple(x.shape)}\n")
    sys.stdout.flush()
    print("between")
    sys.stderr.write("error\n")
    return x + n


@program()
def print_to_an_object(x):
    tee = Tee()
    print("a", 1, x.ndim, sep="|", file=tee, flush=True)
    print("hello", file=tee, end="")
    return x + tee.flushed, tee.parts


@program()
def log_with_places(x):
    def helper(y):
        LOG.info("in helper %d", y.ndim)
        return y * 2

    LOG.info("hello %s %s", "a", x.shape)
    print("between")
    LOG.log(logging.WARNING, "lvl")
    LOG.warning("named %(a)d", {"a": 3})
    LOG.debug("off")
    return helper(x) + 1


@program()
def log_tensors(x):
    loss = x.sum()
    LOG.info("loss %s", loss)
    return loss * 2


def deprecated(x):
    warnings.warn("old", FutureWarning, stacklevel=2)
    return x * 2


@program()
def warn_in_order(x):
    print("before")
    warnings.warn("hello")
    y = deprecated(x)
    y = deprecated(y)
    print("after")
    return y


@program()
def warn_in_a_loop(x):
    for i in range(3):
        warnings.warn("once per place")
        warnings.warn(f"number {i}")
        x = x + i
    return x


@program()
def warnings_switched_off(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("unheard")
        x = x + 1
    warnings.warn("heard")
    return x


@program()
def warnings_filtered(x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quiet.*")
        warnings.warn("be quiet now")
        warnings.warn("be loud now", Mine)
    return x + 1


@program()
def warnings_as_errors(x):
    with warnings.catch_warnings():
        warnings.simplefilter("error", Mine)
        try:
            warnings.warn("mine", Mine)
        except Mine as error:
            return x + 1, str(error)


@program(whole=False)
def warnings_recorded(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("a")
        y = x + 1
    return y, len(seen), str(seen[0].message), seen[0].lineno


def _written(message: Any) -> None:
    print(message.category.__name__, message.message, message.filename, message.lineno, file=sys.stderr)


_written.__module__ = "warnings"  # in place of the function there, which pytest has replaced


def said(fn: Callable[..., Any], calls: int = 3) -> tuple[list[Any], str]:
    """Results and output of a few calls."""
    monkeypatch = pytest.MonkeyPatch()
    fn_globals: Any = globals()
    fn_globals.pop("__warningregistry__", None)
    out = io.StringIO()
    handler = Lines()
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    LOG.addHandler(handler)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
            warnings.simplefilter("default")
            monkeypatch.setattr(warnings, "_showwarnmsg_impl", _written)
            results = [outcome(fn, ((X.clone(),), {})) for _ in range(calls)]
    finally:
        monkeypatch.undo()
        LOG.removeHandler(handler)
    return results, out.getvalue()


@program()
def numbers_of_the_run(x):
    loss = x.abs().mean().item()
    print("loss:", loss, f"{loss:.3f}", sep=" | ")
    LOG.warning("step %d: %.2f", 3, loss)
    LOG.error(f"loss {loss / 4:.5f}")
    print(f"{x.sum().item()}", end="")
    sys.stdout.write(f"{loss}\n")
    return x * 2, loss


@pytest.mark.parametrize(("fn", "whole"), PROGRAMS, ids=[fn.__name__ for fn, _ in PROGRAMS])
def test_the_same_is_said(fn: Any, whole: bool) -> None:
    plain, plain_text = said(fn)
    compiled = magneto.optimize("eager", nopython=whole)(fn)
    ours, our_text = said(compiled)
    assert our_text == plain_text
    for (value, error), (plain_value, plain_error) in zip(ours, plain):
        assert repr(error) == repr(plain_error)
        assert_equal(value, plain_value)


def test_a_filter_that_raises_later() -> None:
    def warns(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        warnings.warn("careful", Mine)
        return y

    compiled = magneto.optimize("eager")(warns)
    with pytest.warns(Mine):
        compiled(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Mine)
        with pytest.raises(Mine, match="careful"):
            compiled(X)


def test_a_stream_that_was_closed() -> None:
    stream = io.StringIO()

    def writes(x: torch.Tensor) -> torch.Tensor:
        print("first")
        stream.write("text")
        return x + 1

    compiled = magneto.optimize("eager")(writes)
    compiled(X)
    assert stream.getvalue() == "text"
    stream.close()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(ValueError, match="closed"):
        compiled(X)
    assert out.getvalue() == "first\n"


# -- module attributes, state dictionaries


def test_attributes_of_modules() -> None:
    def run(optimise: Callable[[Any], Any]) -> list[Any]:
        settings: Any = types.ModuleType("settings")
        settings.count, settings.scale = 0, 1.5

        def step(x: torch.Tensor) -> Any:
            settings.count += 1
            settings.last = x.sum()
            if settings.count > 2:
                settings.scale = 2.5
            y = x * settings.scale + settings.count
            del settings.last
            return y, hasattr(settings, "last")

        fn = optimise(step)
        return [(fn(X), settings.count, settings.scale, sorted(vars(settings))) for _ in range(5)]

    assert_equal(run(magneto.optimize("eager", nopython=True)), run(lambda fn: fn))


def test_state_dictionaries() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def look(x: torch.Tensor) -> Any:
        found = model.state_dict()
        copied = copy.deepcopy(found)
        mean = {name: value.float().mean() for name, value in found.items()}
        return found, found._metadata, copied._metadata, hasattr(copy.copy(found), "_metadata"), mean, x + 1  # type: ignore[attr-defined]

    compiled = magneto.optimize("eager", nopython=True)(look)
    for _ in range(2):
        ours, plain = compiled(X), look(X)
        assert type(ours[0]) is collections.OrderedDict and all(
            value.data_ptr() == plain[0][name].data_ptr() for name, value in ours[0].items()
        )
        assert_equal(ours[1:], plain[1:])


def test_running_averages_of_state_dictionaries() -> None:
    def run(optimise: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        average = copy.deepcopy(model)

        def step(x: torch.Tensor) -> Any:
            model.to(x.device).train()
            y = model(x)
            with torch.no_grad():
                for name, value in average.state_dict().items():
                    if value.is_floating_point():
                        value.mul_(0.9).add_(model.state_dict()[name], alpha=0.1)
            average.load_state_dict({name: value * 1 for name, value in average.state_dict().items()})
            model.eval()
            return y.detach(), model(x).detach(), average.eval()(x).detach(), model[1].running_mean.requires_grad

        fn = optimise(step)
        return [fn(X) for _ in range(3)]

    assert_equal(run(magneto.optimize("eager", nopython=True)), run(lambda fn: fn))


def _warned(x: Any) -> Any:
    y = x + 1
    warnings.warn("hello")
    return y


class Recording:
    """A with-block of the program that reads what was recorded when it ends, as unittest's assertWarns does."""

    def __enter__(self) -> Any:
        self.block = warnings.catch_warnings(record=True)
        self.log: Any = self.block.__enter__()
        magneto.graph_break()
        return self

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)
        self.said = [(str(warning.message), warning.lineno) for warning in self.log]


def _recorded(x: Any) -> Any:
    recording = Recording()
    with recording:
        warnings.simplefilter("always")
        y = _warned(x)
        inside = len(recording.log)
        y = _warned(y) * len(recording.log)
    return y, inside, recording.said


def _counted(x: Any, log: list[Any]) -> Any:
    before = len(log)
    y = _warned(x)
    return y * len(log), before


def test_recorded_warnings_are_there_when_the_program_looks() -> None:
    same(_recorded, magneto.optimize("eager")(_recorded), X)
    for fn in (_counted, magneto.optimize("eager")(_counted)):
        for _ in range(3):
            with warnings.catch_warnings(record=True) as log:
                warnings.simplefilter("always")
                y, before = fn(X, log)
                assert (y.tolist(), before, len(log)) == ((X + 1).tolist(), 0, 1)


def test_a_function_that_takes_warnings_is_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    def fn(x):
        before = len(log)
        return _warned(x) * len(log), before

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: log.append(str(message)))
        compiled = magneto.optimize("eager")(fn)
        for n in range(3):
            y, before = compiled(X)
            assert (y.tolist(), before, log) == (((X + 1) * (n + 1)).tolist(), n, ["hello"] * (n + 1))
