"""Elementwise operations x dtypes x layouts: meta rules and decompositions against eager."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops.checking import CheckingMode
from tests.ops.layouts import BOOL, FLOATS, INTEGERS, pair_layouts, single_layouts

UNARY: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        "neg abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
        "floor ceil round trunc sign sgn frac square isnan isinf isfinite logical_not bitwise_not sigmoid lgamma nan_to_num positive relu "
        "erfc digamma signbit isposinf isneginf zeros_like ones_like empty_like clone"
    ).split()
}
UNARY |= {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "elu_alpha": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, 2.0, 3.0),
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "logsigmoid": F.logsigmoid,
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "softsign": F.softsign,
    "clamp": lambda x: torch.clamp(x, 0, 2),
    "clamp_float": lambda x: torch.clamp(x, -0.5, 1.25),
    "clamp_min": lambda x: torch.clamp(x, min=1),
    "clamp_max": lambda x: x.clamp_max(1.5),
    "add_one": lambda x: x + 1,
    "add_half": lambda x: x + 0.1,
    "one_minus": lambda x: 1 - x,
    "rsub_float": lambda x: 0.3 - x,
    "mul_float": lambda x: x * 0.3,
    "mul_true": lambda x: x * True,
    "div_three": lambda x: x / 3,
    "rdiv": lambda x: 1.0 / x,
    "div_floor": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "div_trunc": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "floordiv": lambda x: x // 2,
    "floordiv_float": lambda x: x // 1.5,
    "mod": lambda x: x % 3,
    "mod_negative": lambda x: x % -2.5,
    "fmod": lambda x: torch.fmod(x, 3),
    **{f"pow_{e}": (lambda x, e=e: x**e) for e in (0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 2.5, 1.0, 2.0)},
    "rpow": lambda x: 2.0**x,
    "gt": lambda x: x > 0,
    "lt_float": lambda x: x < 0.1,
    "eq": lambda x: x == 3,
    "ne_float": lambda x: x != 0.5,
    "ge": lambda x: x >= 1,
    "le": lambda x: x <= 0.1,
    "and": lambda x: x & 3,
    "xor_true": lambda x: x ^ True,
    "lshift": lambda x: x << 2,
    "rshift": lambda x: x >> 1,
    "masked_fill": lambda x: x.masked_fill(x > 0, 1),
    "masked_fill_float": lambda x: x.masked_fill(x > 0, -0.5),
    "where_scalar": lambda x: torch.where(x > 0, x, 0.0),
    "where_scalars": lambda x: torch.where(x > 0, 1, 2.5),
    "to_float": lambda x: x.float(),
    "to_int": lambda x: x.nan_to_num(0, 1, 1).to(torch.int32),
    "to_bool": lambda x: x.bool(),
    "to_double": lambda x: x.double(),
    "to_half": lambda x: x.half(),
    "full_like": lambda x: torch.full_like(x, 1),
    "fill": lambda x: torch.fill(x, 1),
    "new_zeros": lambda x: x.new_zeros(3, 2),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "contiguous": lambda x: x.contiguous(),
    "add_": lambda x: x.contiguous().add_(1),
    "relu_": lambda x: x.clone().relu_(),
    "copy_": lambda x: torch.zeros(x.shape).copy_(x),
}

BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
    "sub": torch.sub,
    "sub_alpha": lambda a, b: torch.sub(a, b, alpha=3),
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "where": lambda a, b: torch.where(b > 0, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=2),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a, value=0.5),
    "lerp": lambda a, b: torch.lerp(a, b, 0.7),
    "lerp_tensor": lambda a, b: torch.lerp(a, b, a),
    "clamp_tensor": lambda a, b: torch.clamp(a, b, b + 1),
    "clamp_min_tensor": lambda a, b: torch.clamp(a, min=b),
    "copysign": torch.copysign,
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "masked_fill_tensor": lambda a, b: (a + b).masked_fill(b > 0, b.sum() if b.dtype is a.dtype else 1),
    "prelu": lambda a, b: F.prelu(a, b.reshape(-1)[:1]) if b.numel() else None,
}

GRADIENTS: dict[str, Callable[..., Any]] = {
    "threshold_backward": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0),
    "tanh_backward": torch.ops.aten.tanh_backward,
    "sigmoid_backward": torch.ops.aten.sigmoid_backward,
    "gelu_backward": torch.ops.aten.gelu_backward,
    "gelu_backward_tanh": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
    "silu_backward": torch.ops.aten.silu_backward,
    "hardtanh_backward": lambda g, x: torch.ops.aten.hardtanh_backward(g, x, -1, 1),
    "hardswish_backward": torch.ops.aten.hardswish_backward,
    "hardsigmoid_backward": torch.ops.aten.hardsigmoid_backward,
    "leaky_relu_backward": lambda g, x: torch.ops.aten.leaky_relu_backward(g, x, 0.2, False),
    "prelu_backward": lambda g, x: torch.ops.aten._prelu_kernel_backward(g, x, g.abs()),
    "elu_backward": lambda g, x: torch.ops.aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "elu_backward_result": lambda g, x: torch.ops.aten.elu_backward(g, 0.5, 1.0, 1.0, True, x),
    "softplus_backward": lambda g, x: torch.ops.aten.softplus_backward(g, x, 1, 20),
    "mse_loss_backward": lambda g, x: torch.ops.aten.mse_loss_backward(g, x, g, 0),
    "smooth_l1_loss_backward": lambda g, x: torch.ops.aten.smooth_l1_loss_backward(g, x, g, 0, 0.5),
}


def run(fn: Callable[..., Any], cases: list[Any], numpy_too: bool) -> list[str]:
    """Problems of `fn` over argument tuples; what eager refuses is skipped."""
    problems: list[str] = []
    worked = 0
    for arguments in cases:
        mode = CheckingMode(numpy_too)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.no_grad(), mode:
                    fn(*arguments)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, ZeroDivisionError, TypeError):
            continue
        worked += 1
        problems += mode.problems
    return problems


def finite(cases: list[Any]) -> list[Any]:
    """Without nan and infinities, where eager's vector and scalar kernels disagree among themselves."""
    return [tuple(x.nan_to_num(0.5, 2.0, -2.0) if x.dtype.is_floating_point else x for x in case) for case in cases]


def check(fn: Callable[..., Any], cases: list[Any], numpy_too: bool = False) -> None:
    problems = run(fn, cases, numpy_too)
    assert not problems, "\n".join(dict.fromkeys(problems))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *BOOL], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: torch.dtype) -> None:
    numpy_too = dtype in (torch.float32, torch.int64, torch.bool) and name not in ("to_int",)
    cases = [(x,) for x in single_layouts(dtype, special=name != "to_int")]
    check(UNARY[name], finite(cases) if name == "gelu" else cases, numpy_too)


DTYPE_PAIRS = [
    *[(d, d) for d in (*FLOATS, *INTEGERS, *BOOL)],
    (torch.float32, torch.int64),
    (torch.int64, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bool, torch.float32),
    (torch.int32, torch.int64),
    (torch.uint8, torch.int32),
]


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=lambda pair: "-".join(str(d).removeprefix("torch.") for d in pair))
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    if name == "div_trunc" and dtypes[0] is torch.bfloat16:
        pytest.skip("eager rounds the quotient before or after truncation, depending on the layout")
    check(BINARY[name], pair_layouts(*dtypes), dtypes == (torch.float32, torch.float32))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    cases = pair_layouts(dtype, dtype)
    check(GRADIENTS[name], finite(cases) if name.startswith(("hard", "elu")) else cases)


def test_shifts_by_tensors() -> None:
    a = torch.tensor([1, -8, 7, 100], dtype=torch.int32)
    for amount, fn in itertools.product((0, 3, 31, 32, 40, -1), (torch.bitwise_left_shift, torch.bitwise_right_shift)):
        check(fn, [(a, torch.full_like(a, amount)), (a.long(), torch.full_like(a, amount).long())], numpy_too=True)
