"""The public operators of ATen, and what becomes of each: a decomposition, a chain of views, other operators, or a library call (and why)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch

from magneto.base.dataclass import dataclass
from magneto.prims.decompose import row_of

_PREFIXES = (("special_", "special"), ("linalg_", "linalg"), ("fft_", "fft"))

OUTSIDE: tuple[tuple[str, str], ...] = (
    (r".*(sparse|crow|ccol|row_indices|col_indices|coalesce|smm|hspmm|sspaddmm|dense_dim|indices_copy|to_dense|to_mkldnn|padded).*|(in)?dices|values(_copy)?", "layouts other than strided"),
    (r".*(quantize|qparams|q_per_channel|q_scale|q_zero|qscheme|int_repr|dequantize).*", "quantised tensors"),
    (r"(cudnn|miopen|mkldnn|fbgemm|batch_norm_(backward|elemt|gather|stats|update)).*", "kernels of one device"),
    (r"(is_\w+|dim|size|stride|numel|storage_offset|get_device|output_nr|retains_grad|can_cast|promote_types|result_type|item|equal|allclose|data)",
     "questions about tensors, answered while tracing"),
    (r"(from_file|resize|resize_as|resize_as_sparse|pin_memory|sym_constrain_\w+|hash_tensor|random)", "memory and state, not mathematics"),
)  # fmt: skip
"""Names (regular expressions of packets) that are not operations on strided tensors, and what they are."""

LIBRARY_WHY: tuple[tuple[str, str], ...] = (
    (r"(rand|normal|bernoulli|binomial|poisson|multinomial|native_dropout|rrelu|fractional|random).*", "draws random numbers: the library keeps the stream"),
    (r"(mm|bmm|addmm|addmv|addbmm|baddbmm|mv|dot|vdot|linalg_matrix_exp|linalg__powsum|convolution|conv_tbc|mkldnn\w*|scaled_\w+|linear\w*|mkl_linear|slow_conv\w*|thnn_conv\w*)", "matrix products and convolutions: the library's kernels"),
    (r"(linalg_\w+|cholesky\w*|geqrf|ormqr|lu_unpack|triangular_solve)", "linear algebra: LAPACK"),
    (r"(fft_\w+)", "Fourier transforms: the library's kernels"),
    (r"(cumsum|cumprod|cummax|cummin|logcumsumexp)", "scans: no primitive carries a value along a dimension"),
    (r"(sort|topk|kthvalue|median|nanmedian|mode|unique\w*|searchsorted|bucketize|isin|histc|histogram\w*|bincount)", "order and counts: sorts and searches are the library's"),
    (r"(scatter\w*|index_(add|copy|put|reduce|fill)|put|masked_scatter|embedding_\w+|segment_reduce|as_strided_scatter|unsafe_index_put|max_unpool\w*|col2im)", "scatter: several places may write one element"),
    (r"(nonzero\w*|masked_select|argwhere|repeat_interleave)", "the size of the result depends on data"),
    (r"((adaptive_)?(avg|max)_pool\d\w*|max_pool\w*|upsample\w*|grid_sampler\w*|affine_grid\w*|im2col|(reflection|replication)_pad\w*)", "windows and interpolation: the library's kernels"),
    (r"(view_as_(complex|real)\w*|complex|polar|angle)", "complex numbers: left to the library"),
    (r"(digamma|polygamma|mvlgamma|igamma|igammac|i0|erfc|erfinv|logit|special_\w+|hypot|nextafter|gcd|lcm|frexp|ldexp|logaddexp2?|exponential)", "a function that no primitive computes to the kernel's accuracy"),
    (r"(as_strided\w*|view|view_copy|unfold\w*|slice_inverse|lift\w*)", "reads memory by address: only the library knows the storage"),
    (r"(linspace|logspace|range|\w+_window|fft_\w*freq|tril_indices|triu_indices|empty_permuted|block_diag)", "made once from constants: the library's rounding"),
    (r"(copysign|signbit)", "looks at the sign bit, which no primitive shows (of nan)"),
    (r"clone", "a copy for its memory; between two operations it disappears"),
    (r"(conv_depthwise3d|dist|soft_margin_loss|addr|round|diag_embed|diagonal_scatter)", "not decomposed yet"),
    (r"(gru|lstm|rnn|quantized)\w*", "recurrent cells: the library's kernels"),
    (r"(native_norm|renorm|norm|multi_margin_loss|multilabel_\w+|nll_loss2d\w*|cross_entropy\w*|ctc_loss)", "several kernels in one: left to the library"),
)  # fmt: skip
"""Why an operator without a decomposition is a library call: the first row whose expression matches its packet."""


EXCEPT: tuple[tuple[str, str], ...] = (
    (r"add", "bool with a factor"),
    (r"(all|any)", "uint8, whose answer is uint8"),
    (r"arange", "bounds that are no integers; half precision"),
    (r"bitwise_(left|right)_shift", "a number shifted by a tensor"),
    (r"(clamp|clamp_max|clamp_min|max|min|hardtanh|threshold|pow|logsumexp)", "integers and bool where the kernel has a way of its own"),
    (r"(div|floor_divide|fmod|remainder)", "integers divided by a tensor: a zero raises"),
    (r"(index|index_select)", "masks, several indices at once"),
    (r"(nan_to_num|nansum)", "integers"),
    (r"avg_pool3d", "on the CPU; integers, windows of more than 16 elements that meet"),
    (r"_?(adaptive_)?(avg|max)_pool[23]d\w*", "on the CPU where they are adaptive; integers, indices that somebody wants, windows of more than 16 elements, other layouts"),
    (r"upsample_nearest\w*", "factors that are no whole numbers"),
    (r"linalg_cross", "on the CPU; integers and complex numbers"),
    (r"affine_grid_generator", "on the CPU; volumes, types other than float32"),
    (r"grid_sampler_2d", "on the CPU; cubic, and mirrored beyond the edges"),
    (r"im2col", "complex numbers, integers"),
    (r"col2im", "sums of more than 30 windows, or of fewer in half precision; steps of windows with gaps"),
    (r"diag_embed|diagonal_backward", "on the CPU"),
    (r"(reflection|replication)_pad\w*", "complex numbers, integers on a GPU, on the CPU types of less than 32 bits in rows"),
    (r"_?(unsafe_)?index_put\w*", "writes that do not add whole rows of float32 or float64"),
    (r"(prod|trace)", "half precision, whose kernels compute in half precision"),
    (r"as_strided", "inputs, whose storage only the library knows"),
    (r"slice_scatter", "steps along the last dimension of what lies in memory, on the CPU"),
    (r"(native_batch_norm|native_layer_norm|native_group_norm)", "nothing to normalise; statistics that are written in place"),
    (r"(\w*_loss|binary_cross_entropy)", "nothing to reduce; weights of classes"),
)  # fmt: skip
"""Arguments of decomposed operators that are library calls all the same: packets, and which."""


ROUNDED: tuple[tuple[str, float, bool, str], ...] = (
    (r"(add|sub|rsub|subtract|addcmul|addcdiv|lerp|addr|addmv|linalg_cross|cross|dist|trapz|trapezoid|cumulative_trapezoid)", 2, True, "eager multiplies and adds with one rounding in its vector loop"),
    (r"(pow|float_power|rsqrt|ldexp|logit|sinc|xlogy|special_\w+)", 2, False, "eager's vector loop and its tail differ in the last digit"),
    (r"(gelu|mish|silu|softplus|elu|celu|selu|glu|sigmoid|log_sigmoid|logaddexp2?|hardswish|soft_margin_loss|prelu|softshrink)", 4, True, "the formula's terms are rounded one by one"),
    (r"(\w*_norm|renorm|norm|batch_norm|std|std_mean|var|var_mean|cov|corrcoef)", 64, True, "sums in another order"),
    (r"(\w*softmax(\.int)?|logsumexp|log_softmax|sum|nansum|mean|nanmean|prod|trace|dot|vdot|matmul|inner|einsum|tensordot|linalg_\w+|\w*_loss\w*|binary_cross_entropy\w*|kl_div|"
     r"cosine_similarity|pairwise_distance|cdist|pdist|scaled_dot_product_attention|kron|chain_matmul|stft|istft|bilinear|\w*_cell)", 16, True, "sums in another order"),
    (r"(nuclear_norm|svd|det|logdet|slogdet|inverse|pinverse|matrix_power|matrix_exp|norm_except_dim|frobenius_norm|qr|lu_solve|orgqr)", 64, True, "LAPACK is asked for more, and takes another way"),
)  # fmt: skip
"""Where results may differ from eager's in the last digits: packets, units of the last place, whether these count at 1.0 for results below it (terms
cancel), and why. Everything else gives the same bits."""


def rounding_of(packet: str) -> tuple[float, bool, str]:
    """(units of the last place, at 1.0 at least, why); zeros where results are bit for bit eager's."""
    return next((row[1:] for row in ROUNDED if re.fullmatch(row[0], packet)), (0.0, False, ""))


@dataclass(frozen=True, slots=True)
class Operator:
    """kind: decomposed, view (decomposed, and an alias of its argument in eager), composite, library or outside."""

    op: Any
    kind: str
    why: str

    @property
    def name(self) -> str:
        return str(self.op).removeprefix("aten.")

    @property
    def packet(self) -> str:
        return self.name.partition(".")[0]


def _is_public(packet: str) -> bool:
    homes = (torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch.linalg)
    if any(hasattr(home, packet) for home in homes):
        return True
    return any(packet.startswith(prefix) and hasattr(getattr(torch, home), packet[len(prefix) :]) for prefix, home in _PREFIXES)


def _overloads() -> Iterator[tuple[str, Any]]:
    """Functional overloads of public packets: nothing is written, no output argument, no named dimensions."""
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = full.removeprefix("aten::").partition(".")
        if not full.startswith("aten::") or packet.startswith("_") or packet.endswith("_backward") or not _is_public(packet):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if op is None or op._schema.is_mutable or any("Dimname" in str(argument.type) for argument in op._schema.arguments):
            continue
        yield packet, op


def _matching(rows: tuple[tuple[str, str], ...], packet: str) -> str:
    return next((why for pattern, why in rows if re.fullmatch(pattern, packet)), "")


@functools.cache
def public_operators() -> tuple[Operator, ...]:
    """Every functional overload of torch's public operators, in order of name."""
    return tuple(_classified(packet, op) for packet, op in _overloads())


def _classified(packet: str, op: Any) -> Operator:
    outside = _matching(OUTSIDE, packet)
    if outside:
        return Operator(op, "outside", outside)
    aliases = any(result.alias_info is not None for result in op._schema.returns)
    if row_of(op) is not None:
        excepted = _matching(EXCEPT, packet)
        return Operator(op, "view" if aliases else "decomposed", excepted and f"except {excepted}")
    full = str(op).replace(".default", "").replace("aten.", "aten::", 1)
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
        return Operator(op, "composite", "PyTorch writes it as other operators, which are followed")
    return Operator(op, "library", _matching(LIBRARY_WHY, packet))
