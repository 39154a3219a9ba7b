"""Generated calls of the whole tensor API: every public method and attribute of torch.Tensor, every public function of torch, torch.nn.functional,
linalg, fft and special. Which arguments a callable takes is found by trying the rows of `ARGUMENTS` in eager; the first ones that work are the test."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import get_ignored_functions, get_overridable_functions

import magneto

F = torch.nn.functional
NAMESPACES: dict[str, Any] = {"torch": torch, "nn.functional": F, "linalg": torch.linalg, "fft": torch.fft, "special": torch.special}


@functools.cache
def samples(kind: str) -> dict[str, Any]:
    """Tensors of one kind, by the letters that rows of arguments use."""
    torch.manual_seed(0)
    values = torch.tensor([[0.5, -1.25, 2.0], [0.75, 0.25, -0.5], [1.5, -2.5, 0.1]])
    made: dict[str, torch.Tensor] = {
        "x": values,
        "y": values.flip(0) + 0.25,
        "v": values[0].clone(),
        "w": values[1].clone(),
        "s": torch.tensor(1.5),
    }
    made["b"] = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    made["c"] = torch.linspace(-1, 1, 12).reshape(2, 3, 2)
    made["d"] = torch.linspace(-1, 1, 2 * 4 * 6 * 6).reshape(2, 4, 6, 6)
    made["e"] = torch.linspace(-1, 1, 2 * 2 * 4 * 4 * 4).reshape(2, 2, 4, 4, 4)
    made["p"] = values @ values.T + 3 * torch.eye(3)  # positive definite
    made["k"] = torch.linspace(-1, 1, 4 * 4 * 3 * 3).reshape(4, 4, 3, 3)
    made["f"] = torch.linspace(-1, 1, 16).reshape(2, 4, 2)
    made["k5"] = torch.linspace(-1, 1, 4 * 27).reshape(2, 2, 3, 3, 3)
    made["b3"] = torch.linspace(-1, 1, 48).reshape(2, 4, 6)
    made["k3"] = torch.linspace(-1, 1, 48).reshape(4, 4, 3)
    made["b4"] = torch.linspace(0.5, 1, 4)
    made["a4"] = torch.linspace(0.25, 2, 4)
    made["g4"] = torch.linspace(-1, 1, 2 * 3 * 3 * 2).reshape(2, 3, 3, 2)
    made["t2"] = torch.linspace(-1, 1, 12).reshape(2, 2, 3)
    made["b9"] = torch.linspace(-1, 1, 27).reshape(3, 3, 3)
    made["w2"] = torch.linspace(-1, 1, 36).reshape(12, 3)
    made["w3"] = torch.linspace(-1, 1, 18).reshape(3, 2, 3)
    if kind == "grad":
        made = {name: value.t().clone().t().requires_grad_() if value.ndim == 2 else value.requires_grad_() for name, value in made.items()}
    elif kind != "float":
        dtype = getattr(torch, kind)
        made = {
            name: (value * 4).to(dtype) if not dtype.is_complex else torch.complex(value, value.flip(0)) for name, value in made.items()
        }
    return {
        **made,
        "i": torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0]]),
        "j": torch.tensor([2, 0, 1]),
        "n": torch.tensor([1, 0]),
        "m": torch.tensor([[True, False, True], [False, True, True], [True, True, False]]),
        "q": torch.tensor([0.1, 0.5, 0.9]),
        "u": torch.tensor([1, 3, 2]),
        "t": torch.tensor([1, 2]),
        "z": torch.zeros(3, 3, dtype=torch.uint8),
    }


# A row: letters of `samples` are tensors, other values are themselves. In the order in which they are tried; `S(...)`: keywords.
class S(dict[str, Any]):
    """Keyword arguments at the end of a row."""


ROWS: tuple[tuple[Any, ...], ...] = (
    ("x",),
    ("x", "y"),
    ("x", 1),
    ("x", "v"),
    ("v",),
    ("v", "w"),
    ("p",),
    ("p", "x"),
    ("x", 0, 1),
    ("x", (1, 0)),
    ("x", (3, 3)),
    ("x", torch.float64),
    ("x", "y", "x"),
    ("x", "m"),
    ("x", "i"),
    ("x", "j"),
    ("x", 1, "i"),
    ("x", 0, "j"),
    ("x", "m", "y"),
    ("x", "m", 1.5),
    ("x", "y", 1),
    ("x", "y", 0.5),
    ("x", 0.1, 0.9),
    ("x", -1, 1),
    ("x", 1, 2),
    ("x", 0, "j", "x"),
    ("x", 1, "i", "x"),
    ("x", 1, "i", "x", "sum"),
    ("x", 0, "j", 1.5),
    ("x", 1, "i", 1.5),
    ("x", "v", "w"),
    ("x", 2, 0, 1),
    ("x", 1, 0, 2),
    ("x", (0, 1)),
    ("x", 0, (0, 1)),
    ("x", 1, (3, 1)),
    ("x", 0, 0, 2),
    ("x", "x", "x"),
    ("x", "y", "m"),
    ("x", (3, 3), (1, 3)),
    ("x", "i", "x"),
    ("x", ("j",), "v"),
    ("x", "float32"),
    ("x", (1,), (0,)),
    ("x", (1, 1)),
    ("x", 1, torch.float64),
    ("m",),
    ("i",),
    ("i", "i"),
    ("i", 1),
    ("j",),
    ("j", "u"),
    ("m", "m"),
    ("v", 3),
    ("v", "p", "w"),
    ("x", "b"),
    ("b",),
    ("b", "c"),
    ("c", "b", "b"),
    ("b", 2),
    ("b", 2, 2),
    ("b", 2, 1),
    ("b", (2, 2)),
    ("b", (1, 2)),
    ("b", (4,)),
    ("b", (1, 1)),
    ("b", 0, 2, 1),
    ("d",),
    ("d", 2),
    ("d", (2, 2)),
    ("d", 2, "d"),
    ("d", "k"),
    ("d", "k", "b4"),
    ("d", 3),
    ("d", 2, 2),
    ("d", (6, 6), (2, 2)),
    ("e",),
    ("e", 2),
    ("e", (2, 2, 2)),
    ("e", "k5"),
    ("d", 3, 2, 2),
    ("d", (2, 2), (0.5, 0.5)),
    ("b3", "k3"),
    ("c", "b", "f"),
    ("x", "b9", "b9"),
    ("b", "f"),
    ("b3", "k3", "b4", 1, 1, 1),
    ("e", "k5", None, 1, 1, 1),
    ("d", "g4", 0, 0, False),
    ("d", 2, "b4", "b4", 1e-5),
    ("d", (4, 6, 6), None, None, 1e-5),
    ("d", "b4", "b4", "b4", "b4", True, 0.1, 1e-5, False),
    ("d", "b4", "b4", "b4", "b4", True, 0.1, 1e-5),
    ("x", "j", "x", "sum"),
    ("x", 0, "j", "x", "mean"),
    ("x", "v", 0, 1),
    ("v", "x", (3, 3), (3, 1)),
    ("x", "x", (3, 3), (3, 1), 0),
    ("x", (2,), 1.5),
    ("x", "m", "v"),
    ("x", 4, S(return_complex=True)),
    ("i", 3),
    ("j", S(size=3)),
    ("t2",),
    ("t2", (2, 2, 4, 4), False),
    ("x", "x", "w2", "w2"),
    ("x", ["x", "x"], "w2", "w2"),
    ("q", 2),
    (1, "q"),
    ("x", "v", "u", 0, 0, 255),
    ("x", 0.1, 0, 0, 255),
    ("x", 0.1, 0, torch.qint8),
    (torch.float32, torch.int64),
    ("cpu",),
    ("b3", 2),
    ("x", "t"),
    ("x", "u"),
    ("x", "y", "u"),
    ("x", "x", "v"),
    ("x", "x", "x", 0.5),
    ("x", "v", "w", "v"),
    ("v", "v", "v", "v", "v"),
    ("d", "b4", "b4", "b4", "b4"),
    ("d", "b4", "a4"),
    ("d", "b4", "a4", "b4", "b4"),
    ("x", "u", "y"),
    ("i", "x"),
    ("i", "x", "j"),
    (["x", "y"],),
    (["x", "y"], 1),
    (["v", "w"],),
    (["x", "y"], ["y", "x"]),
    (["x", "y"], ["y", "x"], ["x", "x"]),
    (["x", "y"], 2.0),
    ("ij,jk->ik", "x", "y"),
    ("ii", "x"),
    (3,),
    (2, 3),
    ((2, 3),),
    ((2, 3), 1.5),
    (0, 4),
    (0.0, 1.0, 5),
    (0, 5, (2, 3)),
    ((2, 3), (3, 1)),
    ((2, 3), (0, 1)),
    ([1.0, 2.0],),
    (1.0, "x"),
    ("x", 0, True),
    ("x", 0, 1, 1),
    ("x", -1, "v"),
    ("x", 2, 1, 0),
    ("x", 0.3, True),
    ("x", S(dim=0)),
    ("x", 2, S(dim=0)),
    ("x", S(dtype=torch.float64)),
    ("x", S(p=2, dim=1)),
    ("x", (3,), S(weight="v", bias="w")),
    ("d", 2, S(return_indices=True)),
    ("d", S(kernel_size=2, output_size=(3, 3))),
    ("d", S(size=(8, 8))),
    ("d", S(scale_factor=2)),
    ("x", S(ord=2)),
    ("x", S(dims=(0, 1), shifts=(1, 1))),
    ("x", S(n=2)),
    ("x", S(size=(2,))),
    ("x", S(repeats=2)),
    ("d", "g4"),
    ("t2", (2, 2, 4, 4)),
    ("x", 1, 1, "x"),
    ("x", torch.nn.Identity()),
    ("x", 3, S(win_length=3)),
    (),
)
METHOD_FIRST = frozenset("vwpxbcdeijmqs")


STREAM = torch.get_rng_state()


def resolve(value: Any, tensors: dict[str, Any]) -> Any:
    """A copy of the sample that a letter names: one for all places of a row."""
    if isinstance(value, str):
        if value not in tensors:
            known = samples(tensors["kind"]).get(value)
            tensors[value] = value if known is None else known.detach().clone().requires_grad_(known.requires_grad)
        return tensors[value]
    if isinstance(value, S):
        return S({name: resolve(item, tensors) for name, item in value.items()})
    if type(value) in (tuple, list):
        return type(value)(resolve(item, tensors) for item in value)
    return value


@dataclass(frozen=True)
class Api:
    """One public name: `Tensor.add`, `torch.add`."""

    name: str
    kind: str  # method, attribute, function
    owner: str

    @functools.cache
    def program(self) -> Callable[..., Any]:
        short = self.name.rpartition(".")[2]
        if self.kind == "attribute":
            return _function(f"def program(x): return x.{short}")
        if self.kind == "method":
            return _function(f"def program(x, *args, **kwargs): return x.{short}(*args, **kwargs)")
        return _function(f"def program(*args, **kwargs): return owner.{short}(*args, **kwargs)", owner=NAMESPACES[self.owner])


def _function(text: str, **names: Any) -> Callable[..., Any]:
    exec(compile(text, "tensor_api_program.py", "exec"), names)
    return names["program"]  # type: ignore[no-any-return]


def every_api() -> list[Api]:
    """All public names, found in dir() and in torch's table of overridable functions."""
    found: dict[str, Api] = {}
    for name in dir(torch.Tensor):
        raw = getattr(torch.Tensor, name)
        if name.startswith("_") and not (name.startswith("__") and name.strip("_") in OPERATORS):
            continue
        found[f"Tensor.{name}"] = Api(f"Tensor.{name}", "method" if callable(raw) else "attribute", "Tensor")
    ignored = get_ignored_functions()
    overridable = {owner: functions for owner, functions in get_overridable_functions().items() if isinstance(owner, types.ModuleType)}
    for owner, module in NAMESPACES.items():
        public = set(dir(module)) & {fn.__name__ for fn in overridable.get(module, ()) if hasattr(fn, "__name__")}
        public |= {name for name in dir(module) if isinstance(getattr(module, name), types.BuiltinFunctionType)}
        for name in sorted(public):
            fn = getattr(module, name)
            if not name.startswith("_") and callable(fn) and (fn in overridable.get(module, ()) or fn in ignored or owner != "torch"):
                found[f"{owner}.{name}"] = Api(f"{owner}.{name}", "function", owner)
    return list(found.values())


BINARY = frozenset(
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv mod rmod pow rpow ipow matmul rmatmul "
    "and or xor rand ror rxor iand ior ixor lshift rshift eq ne lt le gt ge contains getitem".split()
)
OPERATORS = BINARY | frozenset("neg pos abs invert len bool int float index iter".split())


def calls_of(api: Api, kind: str, count: int) -> Iterator[tuple[Any, ...]]:
    """The first `count` rows that eager accepts."""
    fn = api.program()
    found = 0
    for row in ROWS:
        if api.kind != "function" and (not row or not isinstance(row[0], str) or row[0] not in METHOD_FIRST):
            continue
        if (api.kind == "attribute" and len(row) > 1) or (len(row) != 2 and api.name.rpartition(".")[2].strip("_") in BINARY):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if call(fn, row, kind)[0] is NotImplemented:
                    continue
        except Exception:
            continue
        yield row
        found += 1
        if found == count:
            return


def call(fn: Callable[..., Any], row: tuple[Any, ...], kind: str) -> tuple[Any, list[Any]]:
    """(result, arguments after the call), on fresh tensors and a fixed random stream."""
    tensors: dict[str, Any] = {"kind": kind}
    args = [resolve(value, tensors) for value in row]
    named = args.pop() if args and isinstance(args[-1], S) else {}
    torch.set_rng_state(STREAM)
    result = fn(*args, **named)
    return result, [*args, *named.values()]


def digits(numbers: torch.Tensor) -> str:
    """The numbers, to as many digits as two runs of one LAPACK routine have in common."""
    if numbers.dtype.is_complex:
        return digits(torch.view_as_real(numbers))
    if not numbers.dtype.is_floating_point:
        return repr(numbers.tolist())
    return " ".join(f"{0.0 if abs(number) < 1e-5 else number:.4g}" for number in numbers.double().flatten().tolist())


def describe(result: Any, args: list[Any]) -> Any:
    """All that can be seen of a result: type, metadata, numbers, relation to the arguments."""
    if isinstance(result, torch.Tensor):
        same = [index for index, arg in enumerate(args) if arg is result]
        place: Any = None
        if result.layout is torch.strided:
            storage = result.untyped_storage().data_ptr()
            shared = [
                index
                for index, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and arg.layout is torch.strided and arg.untyped_storage().data_ptr() == storage and storage
            ]
            place = shared, tuple(result.stride()), result.storage_offset()
        numbers = result.detach().resolve_conj().resolve_neg()
        bits = (result.is_conj(), result.is_neg(), result.requires_grad, result.is_leaf)
        version = result._version if same else None
        return (
            type(result),
            result.dtype,
            tuple(result.shape),
            place,
            same,
            bits,
            version,
            digits(numbers) if result.layout is torch.strided else str(numbers),
        )
    if isinstance(result, (tuple, list)):
        return type(result), [describe(item, args) for item in result]
    if isinstance(result, dict):
        return {key: describe(item, args) for key, item in result.items()}
    if isinstance(result, (int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.layout)):
        return type(result), repr(result)
    return type(result)


def observe(fn: Callable[..., Any], row: tuple[Any, ...], kind: str) -> Any:
    """What the call shows: its result and its arguments afterwards, or its exception."""
    try:
        result, args = call(fn, row, kind)
    except Exception as error:
        return type(error), str(error)
    shown = describe(result, args)
    return shown, [describe(arg, []) for arg in args], [arg._version if isinstance(arg, torch.Tensor) else None for arg in args]


@dataclass
class Outcome:
    """One call, plain and traced."""

    api: Api
    row: tuple[Any, ...]
    kind: str
    same: bool
    plain: Any
    ours: Any
    breaks: list[str]


def compare(api: Api, row: tuple[Any, ...], kind: str, backend: Any = "eager") -> Outcome:
    fn = api.program()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = observe(fn, row, kind)
        magneto.reset()
        compiled = magneto.optimize(backend)(fn)
        ours = observe(compiled, row, kind)
        breaks = list(magneto.stats()["break_reasons"])
        again = observe(compiled, row, kind)
    same = plain == ours == again
    return Outcome(api, row, kind, same, plain, ours if ours != plain else again, breaks)


__all__ = ["Api", "Outcome", "calls_of", "compare", "every_api"]
