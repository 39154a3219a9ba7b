"""A tensor on a GPU times a number that lies there, in place: the kernel looks at the number first and returns where it is 1."""

from __future__ import annotations

import torch

from magneto.inductor.runtime.plan_code import TritonKernel

BLOCK, PROGRAMS, WARPS = 4096, 1056, 8
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
BODY = """def kernel(p0, p1, n: tl.constexpr, B: tl.constexpr, P: tl.constexpr, T: tl.constexpr):
    factor = tl.load(p1).to(tl.{wide})
    if factor != 1:
        for turn in range(0, T):
            at = (turn * P + tl.program_id(0).to(tl.int64)) * B + tl.arange(0, B)
            value = tl.load(p0 + at, mask=at < n, other=0).to(tl.{wide})
            tl.store(p0 + at, (value * factor).to(p0.dtype.element_ty), mask=at < n)
"""


def kernel_of(n: int, made: torch.dtype, factor: torch.dtype) -> TritonKernel:
    """For `n` elements that lie together."""
    body = BODY.format(wide="float64" if torch.float64 in (made, factor) else "float32")
    programs = min(PROGRAMS, -(-n // BLOCK))
    constants = (("n", n), ("B", BLOCK), ("P", programs), ("T", -(-n // (BLOCK * programs))))
    return TritonKernel(body, (f"*{NAMES[made]}", f"*{NAMES[factor]}"), constants, (programs,), WARPS, False)


def scale_on_device(made: torch.Tensor, factor: torch.Tensor) -> None:
    """`made` is dense. Without Triton the product is PyTorch's."""
    kernel, found = kernel_of(made.numel(), made.dtype, factor.dtype), {}
    if factor.device == made.device:
        try:
            from magneto.inductor.runtime.triton_launch import launchers

            found = launchers([kernel], made.device, leniently=True)
        except ImportError:
            pass
    if kernel in found:
        found[kernel](made, factor)
    else:
        made.mul_(factor)
