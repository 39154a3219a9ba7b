"""fake_call: what a torch-level call returns, writes and aliases, without running it.

Any callable that ends in ATen operations works: torch and F functions, Tensor methods and properties (`getattr` with a name), operator
functions. PyTorch's own Python and C++ code runs above our FakeMode, so composite functions, autograd's in-place checks, `requires_grad` of
results and error messages are PyTorch's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.base.dataclass import dataclass
from magneto.base.heard import taken
from magneto.graph.fake_tensor import Counts, FakeMode, make_fake, meta_of, root_of
from magneto.graph.fallback import DataDependent, UnsupportedFake
from magneto.graph.meta import TensorMeta
from magneto.graph.unknown import EXAMPLE, FAILED, LARGE_PROBES, N_PROBES, Sizes, SizeUnknown, merge, probe, too_large
from magneto.graph.ways import BY_ID, WAYS

Path = tuple[Any, ...]

# Tensor methods that hand out the values themselves.
VALUE_METHODS = frozenset({"numpy", "tolist", "data_ptr", "__array__", "storage", "untyped_storage", "__dlpack__", "__reduce_ex__"})
_VALUE_CALLABLES = frozenset(id(getattr(torch.Tensor, name)) for name in VALUE_METHODS)


@dataclass(frozen=True, slots=True)
class FakeResult:
    """The outcome of a fake call.

    value: the result with TensorMeta in place of tensors (tuples, lists, dicts and torch.return_types keep their type).
    mutated: paths of the tensor arguments whose storage was written; a path is (argument index or keyword, step, ...).
    aliases: (path in the value, path of an argument) for each result that shares an argument's storage; the value itself has path ().
    same: the result *is* the n-th tensor argument (counted depth first over args, then kwargs), as for in-place methods.
    random: the call consumed random numbers.
    raises: it looks at numbers in order to raise, so that it runs though nobody may want its result.
    """

    value: Any
    mutated: tuple[Path, ...] = ()
    aliases: tuple[tuple[Path, Path], ...] = ()
    same: int | None = None
    random: bool = False
    raises: bool = False


class _Arguments:
    """Fake tensors for the TensorMeta in a call's arguments, and where each stands."""

    __slots__ = ("copies", "fakes", "mode", "paths")

    def __init__(self, mode: FakeMode, copies: bool) -> None:
        self.mode = mode
        self.copies = copies
        self.fakes: list[torch.Tensor] = []
        self.paths: list[Path] = []

    def build(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind is TensorMeta:
            fake: torch.Tensor = make_fake(value)
            fake.is_argument = True  # type: ignore[attr-defined]
            if value.requires_grad:
                fake.requires_grad_(True)
                if self.copies and not value.is_leaf:
                    fake = torch.ops.aten.clone.default(fake)
            self.fakes.append(fake)
            self.paths.append(path)
            return fake
        if kind is tuple or kind is list:
            return kind(self.build(item, (*path, step)) for step, item in enumerate(value))
        if kind is dict:
            return {key: self.build(item, (*path, key)) for key, item in value.items()}
        if kind is slice:
            return slice(*(self.build(getattr(value, end), (*path, end)) for end in ("start", "stop", "step")))
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            items = [self.build(item, (*path, step)) for step, item in enumerate(value)]
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        return value


_LOCAL = threading.local()


def _mode() -> FakeMode:
    mode = getattr(_LOCAL, "mode", None)
    if mode is None:
        mode = _LOCAL.mode = FakeMode()
    return mode


def fake_call(
    fn: Callable[..., Any] | str, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, grad_enabled: bool = True,
    counts: Counts | None = None,
) -> FakeResult:  # fmt: skip
    """Result of `fn(*args, **kwargs)`, or of the Tensor method named `fn`, with TensorMeta in place of tensors.

    Raises what torch would raise for these shapes and dtypes; DataDependent when values are needed; UnsupportedFake when metadata
    cannot describe what happens.
    """
    kwargs = kwargs or {}
    if isinstance(fn, str):
        if fn in VALUE_METHODS:
            raise DataDependent(f"Tensor.{fn}")
        method: Callable[..., Any] = getattr(torch.Tensor, fn)
        method = BY_ID.get(id(method), method)
        fn = method
    elif id(fn) in BY_ID:
        fn = BY_ID[id(fn)]
    elif id(fn) in _VALUE_CALLABLES:
        raise DataDependent(getattr(fn, "__name__", str(fn)))
    before = torch.is_grad_enabled()
    if before is not grad_enabled:
        torch._C._set_grad_enabled(grad_enabled)
    try:
        try:
            return _run(fn, args, kwargs, False, counts)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            return _run(fn, args, kwargs, True, counts)
    finally:
        torch._C._set_grad_enabled(before)


def fake_probes(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], sizes: Sizes, keys: Sequence[Any], *, grad_enabled: bool = True
) -> FakeResult:
    """As fake_call, for arguments some of whose sizes are unknown, and operations whose results have such sizes: see `unknown.py`.

    `keys`: for each tensor argument (counted as in FakeResult.same), what its count of non-zero elements is remembered by. Raises SizeUnknown too.
    """
    if sizes.found and too_large((args, kwargs)):
        raise SizeUnknown("beside a number or size of many millions")
    counts = Counts(sizes, keys)
    found: list[Any] = [FAILED] * N_PROBES
    for index in (EXAMPLE, *(i for i in reversed(range(N_PROBES)) if i != EXAMPLE)):
        if index == LARGE_PROBES - 1:
            merge([result if result is FAILED else result.value for result in found])  # a split into millions of pieces is not tried
        try:
            given, named = probe(tuple(args), index), probe(kwargs, index)
        except LookupError:
            continue
        counts.begin(index)
        try:
            with contextlib.nullcontext() if index == EXAMPLE else taken([]):  # what torch warns of made-up sizes is not the program's
                found[index] = fake_call(fn, given, named, grad_enabled=grad_enabled, counts=counts)
        except (DataDependent, UnsupportedFake):
            raise
        except Exception as error:
            if index < LARGE_PROBES:
                unknown = SizeUnknown(str(error).strip().split("\n")[0])
                unknown.what = args, kwargs
                raise unknown from error
    first, others = found[0], [result for result in found if result is not FAILED]
    if any(not set(result.mutated) <= set(first.mutated) for result in others):  # statistics of nothing are not written
        raise SizeUnknown("what it writes depends on data")
    if (found[1].aliases, found[1].same) != (first.aliases, first.same) or (
        first.same is not None and any(r.same != first.same for r in others)
    ):
        raise SizeUnknown("whether its result shares memory depends on data")
    aliases = tuple(dict.fromkeys(pair for result in others for pair in result.aliases))  # a view of what is empty, or a copy
    value = merge([FAILED if result is FAILED else result.value for result in found])
    return FakeResult(
        value, first.mutated, aliases, first.same, any(result.random for result in others), any(result.raises for result in others)
    )


def _run(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], copies: bool, counts: Counts | None) -> FakeResult:
    mode = _mode()
    arguments = _Arguments(mode, copies)
    with mode:
        real_args = [arguments.build(value, (position,)) for position, value in enumerate(args)]
        real_kwargs = {key: arguments.build(value, (key,)) for key, value in kwargs.items()}
        mode.written.clear()
        mode.random = mode.raises = False
        mode.counts = counts
        if counts is not None:
            counts.fakes, counts.written = arguments.fakes, mode.written
        try:
            value = _over_time(fn, *real_args) if fn in _RECURRENT and not kwargs else fn(*real_args, **real_kwargs)
        finally:
            mode.counts = None
    return _describe(value, arguments, mode)


_RECURRENT = frozenset(WAYS[call] for call in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
_STEPS = 3


def _over_time(fn: Callable[..., Any], *args: Any) -> Any:
    """A recurrent layer on the CPU: a few steps of it, from which the results of all follow. (It is a loop over time, and the lengths that are tried reach thousands.)"""
    x, time = args[0], int(args[-1] is True)  # the last one says whether batches come first; of packed sequences the fourth is no bool
    if len(args) != 9 or type(args[3]) is not bool or x.dim() != 3 or x.shape[time] <= 2 * _STEPS or x.device.type != "cpu":
        return fn(*args)
    results, *states = fn(x.narrow(time, 0, _STEPS), *args[1:])
    steps = results.transpose(0, time)
    steps = torch.cat([steps[:1].expand(x.shape[time] - _STEPS, -1, -1), steps])
    return (steps.transpose(0, time), *states)


def _describe(value: Any, arguments: _Arguments, mode: FakeMode) -> FakeResult:
    roots: dict[int, Path] = {}
    for fake, path in zip(arguments.fakes, arguments.paths, strict=True):
        roots.setdefault(id(root_of(fake)), path)
    aliases: list[tuple[Path, Path]] = []
    same = None
    if isinstance(value, torch.Tensor):
        same = next((n for n, fake in enumerate(arguments.fakes) if fake is value), None)
    result = _to_value(value, (), roots, aliases)
    mutated: tuple[Path, ...] = ()
    if mode.written:
        pairs = zip(arguments.fakes, arguments.paths, strict=True)
        mutated = tuple(path for fake, path in pairs if id(root_of(fake)) in mode.written)
    return FakeResult(result, mutated, tuple(aliases), same, mode.random, mode.raises)


def _to_value(value: Any, path: Path, roots: dict[int, Path], aliases: list[tuple[Path, Path]]) -> Any:
    if isinstance(value, torch.Tensor):
        owner = roots.get(id(root_of(value)))
        if owner is not None:
            aliases.append((path, owner))
        return meta_of(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_to_value(item, (*path, step), roots, aliases) for step, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _to_value(item, (*path, key), roots, aliases) for key, item in value.items()}
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [_to_value(item, (*path, step), roots, aliases) for step, item in enumerate(value)]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value
