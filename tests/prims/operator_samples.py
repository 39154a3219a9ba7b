"""Sample arguments for any ATen operator: from its schema's types, a table of what single arguments and single operators need, and, where that
finds nothing, the rows that tests/python/tensor_api.py tries on the whole tensor API."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.ops.layouts import permuted, spaced
from tests.python.tensor_api import ROWS, resolve

Call = tuple[tuple[Any, ...], dict[str, Any]]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)


def expanded(x: torch.Tensor) -> torch.Tensor:
    """The first row everywhere: strides of zero."""
    return x[:1].expand(x.shape) if x.ndim and x.shape[0] else x


def offset(x: torch.Tensor) -> torch.Tensor:
    """The same values, somewhere inside their storage."""
    whole = torch.zeros(x.numel() + 3, dtype=x.dtype)
    whole[3:] = x.reshape(-1)
    return whole[3:].view(x.shape)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The second dimension innermost."""
    return permuted(x, (0, *range(2, x.ndim), 1)) if x.ndim > 2 else transposed(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return permuted(x, tuple(reversed(range(x.ndim))))


def stepped(x: torch.Tensor) -> torch.Tensor:
    return spaced(x) if x.ndim else x


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": transposed,
    "stepped": stepped,
    "expanded": expanded,
    "channels_last": channels_last,
    "offset": offset,
}


@dataclass(frozen=True)
class Kind:
    """How the tensors of a call are made: dtype, layout, and the shape that an operator without a shape of its own takes."""

    dtype: torch.dtype
    layout: str = "contiguous"
    shape: tuple[int, ...] = (3, 4)
    special: bool = True
    other: torch.dtype | None = None

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape)) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')}-{self.layout}-{sizes}" + (f"-{self.other}" if self.other else "")


KINDS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("contiguous", (3, 4)),
    ("transposed", (3, 4)),
    ("stepped", (3, 4)),
    ("expanded", (3, 4)),
    ("channels_last", (2, 3, 2, 2)),
    ("offset", (2, 3, 2)),
    ("contiguous", ()),
    ("contiguous", (0, 3)),
    ("contiguous", (1,)),
    ("contiguous", (37,)),
)
"""(layout, shape): what a call looks like."""

_EXTREMES = {
    torch.uint8: [0, 1, 255, 254, 128, 127, 2, 7],
    torch.int8: [0, 1, -1, 127, -128, -127, 2, -7],
    torch.int16: [0, 1, -1, 32767, -32768, 1000, 2, -7],
    torch.int32: [0, 1, -1, 2**31 - 1, -(2**31), 46341, 2, -7],
    torch.int64: [0, 1, -1, 2**63 - 1, -(2**63), 3037000500, 2, -7],
}
_FLOAT_EXTREMES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 3e4, -1e-3, 20.5, -30.0]


class Maker:
    """Makes the tensors of one call: reproducible, each another one."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.made = 0

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, like_kind: bool = False) -> torch.Tensor:
        dtype = dtype or self.kind.dtype
        wanted = self.kind.shape if like_kind else shape
        self.made += 1
        return LAYOUTS[self.kind.layout](self.values(wanted, dtype))

    def values(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.made * 101 + math.prod(shape))
        n = math.prod(shape)
        if dtype is torch.bool:
            return torch.randint(0, 2, (n,), generator=generator).bool().reshape(tuple(shape))
        if dtype.is_complex:
            return torch.complex(torch.randn(n, generator=generator), torch.randn(n, generator=generator)).to(dtype).reshape(tuple(shape))
        if not dtype.is_floating_point:
            x = torch.randint(0 if dtype is torch.uint8 else -9, 10, (n,), generator=generator).to(dtype)
            extremes: list[Any] = _EXTREMES[dtype]
        else:
            x = (torch.randn(n, generator=generator, dtype=torch.float64) * 2).to(dtype)
            extremes = _FLOAT_EXTREMES
        if self.kind.special and n > 4:
            count = min(len(extremes), n - 3)
            first = (self.made * 5) % len(extremes)
            rolled = (extremes[first:] + extremes[:first])[:count]
            x[torch.randperm(n, generator=generator)[:count]] = torch.tensor(
                rolled, dtype=torch.float64 if dtype.is_floating_point else dtype
            ).to(dtype)
        return x.reshape(tuple(shape))

    def positive(self, *shape: int) -> torch.Tensor:
        x = self(*shape)
        return x.abs() + 1 if x.dtype is not torch.bool else x

    def index(self, limit: int, *shape: int) -> torch.Tensor:
        self.made += 1
        generator = torch.Generator().manual_seed(self.made)
        return torch.randint(0, limit, shape, generator=generator)

    def mask(self, *shape: int) -> torch.Tensor:
        return self.values(shape or self.kind.shape, torch.bool)


# ---- arguments by name and type ------------------------------------------------------------------------------------------

NUMBERS: tuple[Any, ...] = (2, -1.5, 0, True, -3, 0.1, 255)
BY_NAME: dict[str, tuple[Any, ...]] = {
    "dim": (0, -1),
    "dims": ([0], [-1, 0]),
    "axis": (0, -1),
    "dim0": (0,),
    "dim1": (-1,),
    "dim2": (1,),
    "keepdim": (True,),
    "dtype": (torch.float64, torch.int64),
    "rounding_mode": ("floor", "trunc"),
    "approximate": ("tanh",),
    "reduction": (0, 2),
    "diagonal": (1, -1),
    "offset": (1, -1),
    "alpha": (2, 0.5),
    "beta": (2, 0.5),
    "value": (2, 0.5),
    "correction": (0, 2),
    "unbiased": (False, True),
    "memory_format": (),
    "layout": (),
    "device": (),
    "pin_memory": (),
    "generator": (),
    "non_blocking": (),
    "copy": (True,),
    "largest": (False,),
    "k": (2, -1),
    "n": (3,),
    "p": (1, 3, 0.5),
    "sections": (2,),
    "chunks": (2,),
    "split_size": (2,),
    "decimals": (1, -1),
    "nan": (0.5,),
    "posinf": (3.0,),
    "neginf": (-3.0,),
    "eps": (1e-3,),
    "lambd": (0.3,),
    "ord": (1, math.inf, 0, 3),
    "sizes": ([2, 2],),
    "repeats": ([2, 1], [2, 1, 3], [0, 2], [1, 2, 1, 1, 2]),
    "shifts": ([1], [1, -2]),
    "indexing": ("ij",),
    "mode": ("constant",),
    "max": (1, 0.25, None),
    "min": (-1, 0.5),
    "start": (1, -2, 0.5),
    "end": (5, 7.5, -3),
    "step": (2, 0.75, -1),
    "steps": (5, 1, 0),
    "length": (2,),
    "upscale_factor": (2,),
    "downscale_factor": (2,),
    "groups": (2,),
    "window_length": (5, 1, 0),
    "periodic": (False,),
    "weight": (),
    "threshold": (0.5,),
    "size": ([2, 3], []),
    "pad": ([1, 2], [-1, 1], [1, 0, 2, 1]),
    "other": NUMBERS,
    "exponent": (0, 1, 2, 3, 0.5, -0.5, -1, -2, 2.5, True, 4),
    "M": (4,),
    "m": (4,),
}


def choices(argument: Any, make: Maker) -> Iterator[Any]:
    """Values that an argument can take, the plainest first."""
    text, name = str(argument.type), argument.name
    if name in BY_NAME and "Tensor" not in text:
        yield from BY_NAME[name]
        if text == "number":
            yield from NUMBERS
    elif text == "Tensor" or text == "Optional[Tensor]":
        yield tensor_named(name, make)
    elif text == "List[Tensor]":
        yield [make(like_kind=True), make(like_kind=True)]
        yield [make(like_kind=True)]
    elif text in ("number", "Optional[number]"):
        yield from NUMBERS
    elif text in ("float", "Optional[float]"):
        yield from (0.5, 2.0)
    elif text in ("int", "SymInt", "Optional[int]", "Optional[SymInt]"):
        yield from (1, 0, 2)
    elif text in ("bool", "Optional[bool]"):
        yield from (True, False)
    elif text.startswith(("List[int", "List[SymInt", "Optional[List[int", "Optional[List[SymInt")):
        yield from ([0], [1, 2], [2, 2])


def tensor_named(name: str, make: Maker) -> Any:
    if name in ("index", "indices"):
        return make.index(max(min((*make.kind.shape, 3)), 1), *make.kind.shape)
    if name in ("mask", "condition"):
        return make.mask()
    x = make(like_kind=True)
    return x if make.made == 1 or make.kind.other is None else LAYOUTS[make.kind.layout](make.values(make.kind.shape, make.kind.other))


def from_schema(op: Any, kind: Kind) -> Iterator[Call]:
    """The required arguments in all choices (one changed at a time), then each optional one changed."""
    arguments = list(op._schema.arguments)
    required = [a for a in arguments if not a.has_default_value()]
    optional = [a for a in arguments if a.has_default_value()]
    plain = [next(iter(choices(a, Maker(kind))), None) for a in required]

    def call(changed: int = -1, value: Any = None, named: dict[str, Any] | None = None) -> Call:
        make = Maker(kind)
        args, kwargs = [], dict(named or {})
        for position, argument in enumerate(required):
            chosen = value if position == changed else _fresh(argument, plain[position], make)
            if argument.kwarg_only:
                kwargs[argument.name] = chosen
            else:
                args.append(chosen)
        return tuple(args), kwargs

    yield call()
    for position, argument in enumerate(required):
        for value in itertools.islice(choices(argument, Maker(kind)), 1, None):
            yield call(position, value)
    for argument in optional:
        for value in choices(argument, _later(kind)):
            yield call(named={argument.name: value})
    if "dim" in {a.name for a in optional} and "keepdim" in {a.name for a in optional}:
        yield call(named={"dim": [0] if "List" in str(next(a for a in optional if a.name == "dim").type) else 0, "keepdim": True})
    if sum(str(a.type) == "Tensor" for a in required) > 1:
        yield from _broadcasting(required, call)


def _fresh(argument: Any, chosen: Any, make: Maker) -> Any:
    """Tensors are made anew for each call."""
    if isinstance(chosen, torch.Tensor) or (isinstance(chosen, list) and chosen and isinstance(chosen[0], torch.Tensor)):
        return next(iter(choices(argument, make)))
    return chosen


def _later(kind: Kind) -> Maker:
    make = Maker(kind)
    make.made = 7
    return make


def _broadcasting(required: list[Any], call: Callable[..., Call]) -> Iterator[Call]:
    """The last tensor laid out otherwise, or smaller than the others: a row, a single element, no dimensions."""
    args, kwargs = call()
    last = max((i for i, a in enumerate(args) if isinstance(a, torch.Tensor)), default=None)
    if last is None or not args[last].ndim or not args[last].numel():
        return
    for smaller in (transposed(args[last]), args[last][:1], args[last].flatten()[0], args[last][0]):
        yield (*args[:last], smaller, *args[last + 1 :]), kwargs


# ---- operators that need more than their schema says ---------------------------------------------------------------------


def _cell(gates: int) -> Callable[[Maker], list[Any]]:
    """A step of a recurrent net: input, state, weights and biases of `gates` gates."""
    return lambda make: [(make(2, 3), make(2, 4), make(gates * 4, 3), make(gates * 4, 4), make(gates * 4), make(gates * 4))]


def _factors(make: Maker) -> tuple[torch.Tensor, torch.Tensor]:
    """An LU factorisation, rounded to this kind of numbers."""
    factors, pivots = torch.linalg.lu_factor(make(3, 3).to(torch.complex128) + 9 * torch.eye(3))
    return (factors if make.kind.dtype.is_complex else factors.real).to(make.kind.dtype), pivots


def _spectrum(make: Maker) -> torch.Tensor:
    return torch.complex(*((x.real if x.is_complex() else x).to(torch.float32) for x in (make(5, 4), make(5, 4))))


def _labels(make: Maker, *shape: int) -> torch.Tensor:
    return make.index(3, *shape)


BY_OPERATOR: dict[str, Callable[[Maker], list[Any]]] = {
    # The default driver starts from pivots that torch leaves uninitialised: a rank decided by rcond, and the last bit, are what was in memory.
    "linalg_lstsq": lambda make: [(make(4, 3), make(4, 2), {"driver": "gels"})],
    # Statistics are read, not written: the operator is called several times with the same tensors.
    "batch_norm": lambda make: [
        (make(2, 4, 3, 3), make(4), make(4), None, None, True, 0.1, 1e-5, False),
        (make(2, 4, 3, 3), make(4), make(4), make(4), make.positive(4), False, 0.1, 1e-5, False),
    ],
    "instance_norm": lambda make: [
        (make(2, 4, 3, 3), make(4), make(4), None, None, True, 0.1, 1e-5, False),
        (make(2, 4, 3, 3), None, None, make(4), make.positive(4), False, 0.1, 1e-5, False),
    ],
    "bitwise_and.Scalar_Tensor": lambda make: [(3, make(like_kind=True)), (True, make(like_kind=True))],
    "bitwise_or.Scalar_Tensor": lambda make: [(3, make(like_kind=True)), (True, make(like_kind=True))],
    "bitwise_xor.Scalar_Tensor": lambda make: [(3, make(like_kind=True)), (True, make(like_kind=True))],
    "col2im": lambda make: [(make(2, 12, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])],
    "im2col": lambda make: [(make(2, 3, 4, 4), [2, 2], [1, 1], [0, 1], [2, 1])],
    "conv_tbc": lambda make: [(make(4, 2, 3), make(2, 3, 5), make(5), 1)],
    "convolution": lambda make: [
        (make(2, 4, 5), make(6, 2, 3), make(6), [2], [1], [1], False, [0], 2),
        (make(2, 3, 4, 5), make(4, 3, 2, 2), None, [1, 2], [0, 1], [1, 1], False, [0, 0], 1),
        (make(2, 3, 4, 5), make(3, 4, 2, 2), make(4), [2, 2], [1, 0], [1, 1], True, [1, 0], 1),
        (make(1, 2, 3, 3, 3), make(2, 1, 2, 2, 2), None, [1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 2),
    ],
    "ctc_loss.Tensor": lambda make: [(make(6, 2, 4), make.index(3, 2, 2) + 1, torch.tensor([6, 5]), torch.tensor([2, 1]))],
    "einsum": lambda make: [
        ("ij,kj->ik", [make(3, 4), make(2, 4)]),
        ("bij,bjk->bk", [make(2, 3, 4), make(2, 4, 3)]),
        ("ii->i", [make(3, 3)]),
    ],
    "embedding_bag": lambda make: [(make(5, 3), make.index(5, 6), torch.tensor([0, 2]), False, mode) for mode in (0, 1, 2)],
    "embedding_bag.padding_idx": lambda make: [(make(5, 3), make.index(5, 6), torch.tensor([0, 2]), False, 1, False, None, False, 2)],
    "grid_sampler_3d": lambda make: [(make(1, 2, 3, 3, 3), make(1, 2, 2, 2, 3) / 9, mode, 0, False) for mode in (0, 1)],
    "gru_cell": _cell(3),
    "rnn_relu_cell": _cell(1),
    "rnn_tanh_cell": _cell(1),
    "histogramdd.TensorList_bins": lambda make: [(make(6, 2), [torch.linspace(-3, 3, 4).to(make.kind.dtype) for _ in range(2)])],
    "istft": lambda make: [(_spectrum(make), 8, {"hop_length": 2, "window": torch.hann_window(8)})],
    "linalg_cond.p_str": lambda make: [(make(3, 3), "nuc"), (make(3, 3), "fro")],
    "linalg_lu_solve": lambda make: [(*_factors(make), make(3, 2)), (*_factors(make), make(2, 3), {"left": False})],
    "linalg_norm.ord_str": lambda make: [(make(3, 4), "fro"), (make(3, 4), "nuc", {"keepdim": True})],
    "lu_solve": lambda make: [(make(3, 2), *_factors(make))],
    "max_unpool3d": lambda make: [(make(1, 1, 2, 2, 2), 3 * torch.arange(8).reshape(1, 1, 2, 2, 2), [3, 3, 3], [1, 1, 1], [0, 0, 0])],
    "narrow.Tensor": lambda make: [(make(4, 3), 0, torch.tensor(1), 2)],
    "nll_loss2d": lambda make: [(make(2, 3, 2, 2), _labels(make, 2, 2, 2), None, reduction, -100) for reduction in (0, 1, 2)],
    "nonzero_static": lambda make: [(make(3, 4), {"size": 5}), (make(3, 4), {"size": 14, "fill_value": -7})],
    "ormqr": lambda make: [(make(3, 3), make(3), make(3, 2)), (make(3, 3), make(3), make(2, 3), False, True)],
    "reflection_pad2d": lambda make: [(make(2, 3, 4, 3), [1, 2, 3, 0]), (make(3, 4, 3), [0, 1, 1, -1])],
    "reflection_pad3d": lambda make: [(make(1, 2, 3, 3, 3), [1, 2, 0, 1, 2, 1])],
    "replication_pad3d": lambda make: [(make(1, 2, 3, 3, 3), [1, 2, 0, 1, 2, 1])],
    "scatter.reduce": lambda make: [(make(4, 3), 0, make.index(4, 3, 3), make(3, 3), {"reduce": how}) for how in ("add", "multiply")],
    "scatter.value_reduce": lambda make: [(make(4, 3), 0, make.index(4, 3, 3), 2, {"reduce": how}) for how in ("add", "multiply")],
    "segment_reduce": lambda make: [(make(6), how, {"lengths": torch.tensor([2, 3, 1])}) for how in ("sum", "mean", "max", "min")],
    "slow_conv3d": lambda make: [(make(1, 2, 3, 3, 3), make(3, 2, 2, 2, 2), [2, 2, 2], make(3), [1, 1, 1], [0, 0, 0])],
    "slow_conv_dilated3d": lambda make: [(make(1, 2, 4, 4, 4), make(3, 2, 2, 2, 2), [2, 2, 2], make(3), [1, 1, 1], [0, 0, 0], [2, 2, 2])],
    "slow_conv_transpose2d": lambda make: [(make(1, 2, 3, 3), make(2, 3, 2, 2), [2, 2], make(3))],
    "slow_conv_transpose3d": lambda make: [(make(1, 2, 3, 3, 3), make(2, 3, 2, 2, 2), [2, 2, 2], make(3))],
}
"""By packet or packet.overload: calls as tuples (args..., optional dict of keywords)."""


def declared(row: Any) -> Call:
    row = row if isinstance(row, tuple) else (row,)
    return (row[:-1], row[-1]) if row and isinstance(row[-1], dict) else (row, {})


def from_rows(op: Any, kind: Kind) -> Iterator[Call]:
    """Rows of the table of the whole tensor API that eager accepts: at most three."""
    for number in _accepted_rows(op, kind.dtype):
        yield tuple(_laid_out(arg, kind) for arg in _resolved(number, kind.dtype)), {}


@functools.cache
def _accepted_rows(op: Any, dtype: torch.dtype) -> list[int]:
    plain = (number for number, row in enumerate(ROWS) if not (row and isinstance(row[-1], dict)))
    return list(itertools.islice((number for number in plain if accepts(op, (_resolved(number, dtype), {}))), 3))


def _resolved(number: int, dtype: torch.dtype) -> tuple[Any, ...]:
    name = str(dtype).removeprefix("torch.")
    tensors: dict[str, Any] = {"kind": name if name != "float32" else "float"}
    return tuple(resolve(value, tensors) for value in ROWS[number])


def _laid_out(value: Any, kind: Kind) -> Any:
    if isinstance(value, torch.Tensor):
        return LAYOUTS[kind.layout](value)
    return type(value)(_laid_out(item, kind) for item in value) if isinstance(value, (list, tuple)) else value


def accepts(op: Any, call: Call) -> bool:
    """Whether eager takes the call."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            op(*call[0], **call[1])
    except Exception:
        return False
    return True


def calls_of(op: Any, kind: Kind) -> Iterator[Call]:
    """Calls of `op` for one kind of tensors; some are refused by eager, on purpose. Structured operators ignore the kind's shape."""
    packet = str(op).removeprefix("aten.")
    table = BY_OPERATOR.get(packet) or BY_OPERATOR.get(packet.partition(".")[0])
    if table is not None:
        yield from map(declared, table(Maker(kind)))
        return
    made = list(from_schema(op, kind))
    if any(accepts(op, call) for call in made):
        yield from made
    else:
        yield from from_rows(op, kind)
