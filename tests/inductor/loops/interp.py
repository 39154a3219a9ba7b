"""The meaning of a Program, executed with numpy: slow, plain, and the oracle of every code generator's tests.

Every element of an iteration space is computed at once by broadcasting; a Load gathers from the flat memory of its buffer and
checks its bounds. Half types are kept as float32 arrays that are rounded after every operation, as eager rounds. Library calls run through torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from magneto.inductor.loops.ir import (
    Buffer,
    Const,
    IndexValue,
    Indirect,
    LibraryCall,
    Load,
    Masked,
    Op,
    Ordered,
    Pointwise,
    Program,
    Reduction,
    Size,
    Value,
    ViewOf,
)
from magneto.inductor.loops.philox import word_of
from magneto.symbolic import Add, And, Cmp, Expr, FloorDiv, Max, Min, Mod, Mul, Or, Sym
from magneto.symbolic import Const as IntConst

Array: TypeAlias = Any
NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16, torch.bfloat16: np.float32, torch.bool: np.bool_,
    torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64,
}  # fmt: skip


def _via_torch(fn: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    return lambda *xs: fn(*(torch.from_numpy(np.array(x, order="C")) for x in np.broadcast_arrays(*xs))).numpy()


def _div(a: Array, b: Array) -> Array:
    return np.true_divide(a, b, dtype=np.result_type(a)) if a.dtype.kind == "f" else np.true_divide(a, b)


UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative, "abs": np.abs, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "log2": np.log2, "log10": np.log10, "sqrt": np.sqrt, "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "reciprocal": lambda x: (1 / x).astype(x.dtype), "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "erf": _via_torch(torch.erf), "floor": np.floor, "ceil": np.ceil, "round": np.round, "trunc": np.trunc, "sign": lambda x: ((x > 0).astype(np.int8) - (x < 0)).astype(x.dtype),
    "isnan": np.isnan, "isinf": np.isinf, "bitwise_not": np.invert, "logical_not": np.logical_not, "lgamma": _via_torch(torch.lgamma),
}  # fmt: skip
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _div, "floordiv": _via_torch(torch.floor_divide),
    "remainder": _via_torch(torch.remainder), "fmod": _via_torch(torch.fmod), "pow": _via_torch(torch.pow), "atan2": np.arctan2,
    "maximum": np.maximum, "minimum": np.minimum, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
    "shift_left": _via_torch(torch.bitwise_left_shift), "shift_right": _via_torch(torch.bitwise_right_shift),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _round(x: Array, dtype: torch.dtype) -> Array:
    """An array as the dtype, rounded to its precision."""
    x = np.asarray(x)
    if dtype is torch.bfloat16:
        return torch.from_numpy(np.array(x, order="C")).to(torch.bfloat16).float().numpy()
    return x.astype(NUMPY_DTYPES[dtype], copy=False)


class _Body:
    """Evaluation of one body over given symbols."""

    def __init__(self, memory: dict[str, Array], symbols: dict[str, Array]) -> None:
        self.memory = memory
        self.symbols = symbols
        self.values: dict[tuple[Value, int], Array] = {}
        self.masks: list[Array] = []  # masks in force, innermost last; the memo is keyed by their identity

    def mask(self) -> Array | None:
        return self.masks[-1] if self.masks else None

    def value(self, v: Value) -> Array:
        key = (v, id(self.mask()))
        found = self.values.get(key)
        if found is None:
            found = self.values[key] = self.compute(v)
        return found

    def compute(self, v: Value) -> Array:
        if isinstance(v, Const):
            return (
                np.asarray(v.value, dtype=NUMPY_DTYPES[v.dtype])
                if v.dtype is not torch.bfloat16
                else _round(np.asarray(v.value, np.float32), v.dtype)
            )
        if isinstance(v, Load):
            return self.load(v)
        if isinstance(v, IndexValue):
            return _round(self.index(v.expr), v.dtype)
        if isinstance(v, Masked):
            cond = self.value(v.cond)
            outer = self.mask()
            self.masks.append(cond if outer is None else cond & outer)
            inner = self.value(v.value)
            keep = self.masks.pop()
            self.kept = getattr(self, "kept", [])
            self.kept.append(keep)  # ids in the memo must stay unique
            return np.where(cond, inner, self.value(v.other))
        assert isinstance(v, Op)
        args = [self.value(a) for a in v.args]
        return self.apply(v, args)

    def apply(self, v: Op, args: list[Array]) -> Array:
        if v.name == "where":
            return np.where(*args)
        if v.name == "convert_element_type":
            return _round(args[0] != 0 if v.dtype is torch.bool else args[0], v.dtype)
        if v.name == "uniform":
            return word_of(*args).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
        fn: Any = UNARY[v.name] if len(args) == 1 else BINARY[v.name]
        if v.args[0].dtype is torch.float16:
            args = [a.astype(np.float32) for a in args]
        return _round(fn(*args), v.dtype)

    def load(self, v: Load) -> Array:
        memory = self.memory[v.buffer]
        index = self.in_force(np.asarray(self.index(v.index)))
        if index.size and (index.min() < 0 or index.max() >= memory.size):
            if self.mask() is None or memory.size:
                raise IndexError(f"{v.buffer}[{index.min()}..{index.max()}] of {memory.size} elements")
            return np.zeros(index.shape, memory.dtype)
        return memory[index]

    def in_force(self, index: Array) -> Array:
        mask = self.mask()
        return index if mask is None else np.where(mask, index, 0)

    def index(self, e: Expr) -> Array:
        go = self.index
        match e:
            case IntConst():
                return e.value
            case Indirect():
                found = self.in_force(self.value(e.value).astype(np.int64))
                if found.size and (found.min() < 0 or found.max() >= int(self.index_size(e.extent))):
                    raise IndexError("index out of range in self")
                return found
            case Sym():
                return self.symbols[e.name]
            case Add():
                return e.const + sum(c * go(t) for t, c in e.terms)
            case Mul():
                out = go(e.factors[0])
                for f in e.factors[1:]:
                    out = out * go(f)
                return out
            case FloorDiv():
                return go(e.a) // go(e.b)
            case Mod():
                return go(e.a) % go(e.b)
            case Cmp():
                return {"lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal}[e.op](go(e.a), go(e.b))
            case Min() | Max():
                return _fold(np.minimum if isinstance(e, Min) else np.maximum, [go(a) for a in e.args])
            case And() | Or():
                return _fold(np.logical_and if isinstance(e, And) else np.logical_or, [go(a) for a in e.args])
        raise AssertionError(e)

    def index_size(self, size: Size) -> Array:
        return size if isinstance(size, int) else self.index(size)


def _fold(fn: Callable[[Array, Array], Array], xs: list[Array]) -> Array:
    out = xs[0]
    for x in xs[1:]:
        out = fn(out, x)
    return out


def _space(ranges: Sequence[int], reduce_ranges: Sequence[int]) -> dict[str, Array]:
    """Symbol name -> its values, shaped to broadcast over ranges + reduce_ranges."""
    sizes = (*ranges, *reduce_ranges)
    names = [f"i{d}" for d in range(len(ranges))] + [f"r{d}" for d in range(len(reduce_ranges))]
    return {name: np.arange(s).reshape((s,) + (1,) * (len(sizes) - d - 1)) for d, (name, s) in enumerate(zip(names, sizes, strict=True))}


class Interpreter:
    """Runs one Program. `sizes`: values of the symbolic sizes by name."""

    def __init__(self, program: Program, sizes: dict[str, int] | None = None) -> None:
        self.program = program
        self.sizes: dict[str, Array] = dict(sizes or {})
        self.flat: dict[str, torch.Tensor] = {}  # the memory of every buffer, 1-D
        self.memory: dict[str, Array] = {}
        self.table = program.buffer_table()

    def size(self, s: Size) -> int:
        return s if isinstance(s, int) else int(_Body({}, self.sizes).index(s))

    def put(self, buffer: Buffer, flat: torch.Tensor) -> None:
        self.flat[buffer.name] = flat
        self.memory[buffer.name] = (
            (flat.float() if buffer.dtype is torch.bfloat16 else flat).numpy() if buffer.dtype in NUMPY_DTYPES else None
        )

    def put_tensor(self, buffer: Buffer, t: torch.Tensor) -> None:
        expected = tuple(self.size(s) for s in buffer.strides)
        if any(s > 1 and x != y for s, x, y in zip(t.shape, t.stride(), expected, strict=True)) and t.numel():
            raise AssertionError(f"{buffer.name}: strides {t.stride()} where the program says {expected} for {tuple(t.shape)}")
        if t.dtype is not buffer.dtype or tuple(t.shape) != tuple(self.size(s) for s in buffer.shape):
            raise AssertionError(f"{buffer.name}: {t.dtype}{tuple(t.shape)} where the program says {buffer.dtype}{buffer.shape}")
        n = sum((s - 1) * x for s, x in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
        self.put(buffer, torch.as_strided(t.detach(), (n,), (1,), t.storage_offset()))

    def view(self, v: ViewOf) -> torch.Tensor:
        shape, strides = [self.size(s) for s in v.shape], [self.size(s) for s in v.strides]
        flat = self.flat[v.buffer]
        return torch.as_strided(flat, shape, strides, flat.storage_offset() + self.size(v.offset))

    def write(self, buffer: Buffer, values: Array) -> None:
        shape, strides = [self.size(s) for s in buffer.shape], [self.size(s) for s in buffer.strides]
        flat = torch.zeros(self.size(buffer.storage_numel), dtype=buffer.dtype)
        source = torch.from_numpy(np.array(np.broadcast_to(values, shape)))
        torch.as_strided(flat, shape, strides).copy_(source)
        self.put(buffer, flat)

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        for buffer, value in zip(self.program.inputs, inputs, strict=True):
            if buffer is not None:
                self.put_tensor(buffer, value)
        for constant in self.program.constants:
            self.put_tensor(constant.buffer, constant.value)
        with np.errstate(all="ignore"):
            for node in self.program.nodes:
                if isinstance(node, Pointwise):
                    self.write(node.buffer, self.body(node.body, node.ranges, ()))
                elif isinstance(node, Reduction):
                    self.reduce(node)
                elif isinstance(node, Ordered):
                    self.ordered(node)
                else:
                    self.call(node)
        return tuple(self.view(o) if isinstance(o, ViewOf) else o for o in self.program.outputs)

    def body(self, value: Value, ranges: Sequence[Size], reduce_ranges: Sequence[Size]) -> Array:
        shape = [self.size(s) for s in (*ranges, *reduce_ranges)]
        if 0 in shape:
            return np.zeros(shape, NUMPY_DTYPES[value.dtype])
        symbols = self.sizes | _space(shape[: len(ranges)], shape[len(ranges) :])
        return np.broadcast_to(_Body(self.memory, symbols).value(value), shape)

    def reduce(self, node: Reduction) -> None:
        x = self.body(node.body, node.ranges, node.reduce_ranges)
        kept = x.shape[: len(node.ranges)]
        x = x.reshape((*kept, int(np.prod(x.shape[len(node.ranges) :], dtype=np.int64))))
        acc = NUMPY_DTYPES[node.acc_dtype]
        if node.kind == "welford":
            mean = x.mean(-1, dtype=np.float64)
            m2 = ((x - mean[..., None]) ** 2).sum(-1)
            self.write(node.buffers[0], mean.astype(acc))
            self.write(node.buffers[1], m2.astype(acc))
            return
        results = {
            "sum": lambda: x.sum(-1, dtype=acc), "prod": lambda: x.prod(-1, dtype=acc), "max": lambda: x.max(-1), "min": lambda: x.min(-1),
            "argmax": lambda: x.argmax(-1), "argmin": lambda: x.argmin(-1), "any": lambda: x.any(-1), "all": lambda: x.all(-1),
            "m2": lambda: ((x - x.mean(-1, dtype=np.float64, keepdims=True)) ** 2).sum(-1).astype(acc),
        }  # fmt: skip
        self.write(node.buffer, results[node.kind]())

    def ordered(self, node: Ordered) -> None:
        x = self.body(node.body, node.ranges, ())
        if node.place is None:
            wide = np.float64 if x.dtype.kind == "f" else x.dtype
            self.write(node.buffer, x.cumsum(node.serial[0], dtype=wide).astype(x.dtype))
            return
        assert node.init is not None
        first, sums = self.body(node.init, node.buffer.shape, ()), node.kind == "row_sums"
        self.write(node.buffer, np.zeros_like(first) if sums else first)
        np.add.at(self.memory[node.name], self.body(node.place, node.ranges, ()).ravel(), x.ravel())
        if sums:
            shape, strides = ([self.size(s) for s in sizes] for sizes in (node.buffer.shape, node.buffer.strides))
            torch.as_strided(self.flat[node.name], shape, strides).add_(torch.from_numpy(np.array(first)))

    def call(self, node: LibraryCall) -> None:
        args = self.argument(node.args)
        kwargs = {k: self.argument(v) for k, v in node.kwargs}
        if node.out_op is not None:
            for name, b in zip(node.out_names, node.buffers, strict=True):
                shape, strides = [self.size(s) for s in b.shape], [self.size(s) for s in b.strides]
                kwargs[name] = torch.empty_strided(shape, strides, dtype=b.dtype)
            node.out_op(*args, **kwargs)
            results: Any = tuple(kwargs[name] for name in node.out_names)
        else:
            results = node.op(*args, **kwargs)
            results = (results,) if node.single else tuple(results)
            if node.lists:
                results = tuple(t for r, n in zip(results, node.lists, strict=True) for t in (r if n >= 0 else (r,)))
        for buffer, t in zip(node.outputs, results, strict=True):
            if buffer is not None:
                self.put_tensor(buffer, t)
        for name in node.mutates:
            self.put(self.table[name], self.flat[name])

    def argument(self, x: Any) -> Any:
        if isinstance(x, ViewOf):
            return self.view(x)
        if isinstance(x, tuple):
            return tuple(self.argument(y) for y in x)
        return self.size(x) if isinstance(x, Expr) else x


def run_program(program: Program, *inputs: Any, sizes: dict[str, int] | None = None) -> tuple[Any, ...]:
    """The outputs of a Program for given inputs (tensors in the layout that the Program's inputs say; IndexError, AssertionError)."""
    return Interpreter(program, sizes).run(*inputs)
