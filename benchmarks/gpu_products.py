"""float32 products on a GPU without TF32's rounding: cuBLAS's own against tensor cores, with each number in parts. `python -m benchmarks.gpu_products [--out benchmarks/results/gpu_products.json] [--seconds 70]`.

Ways: the library; `tf32x3`: kernels that make two parts of TF32 of each number where they read it (what `mode="max-autotune"` tries); `parts`: three parts of bfloat16, made ahead by a kernel of their own, and six
products of them. Microseconds are medians over CUDA events; errors are relative to the sums of absolute products, largest and root mean square, against float64, for normal, positive and wide-ranging numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

SHAPES = (  # what it is of a linear layer, rows, columns, terms, and which operands lie turned; ViT-B/16 with a batch of 10, and others
    ("forward", 1970, 3072, 768, False, True), ("forward", 1970, 768, 3072, False, True), ("data gradient", 1970, 768, 3072, False, False), ("weight gradient", 3072, 768, 1970, True, False),
    ("forward", 1970, 2304, 768, False, True), ("forward", 1970, 768, 768, False, True), ("forward", 1024, 50257, 768, False, True), ("forward", 512, 2048, 512, False, True), ("forward", 128, 768, 768, False, True),
)  # fmt: skip
TF32X3 = ((128, 128, 64, 8, 2), (128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 128, 32, 4, 3))
PARTS = ((128, 128, 64, 8, 2), (128, 128, 32, 8, 3), (128, 64, 64, 4, 2), (128, 64, 32, 4, 3), (64, 128, 64, 4, 2))
NUMBERS: dict[str, Callable[..., torch.Tensor]] = {
    "normal": torch.randn,
    "positive": torch.rand,
    "wide": lambda *sizes, device: torch.randn(*sizes, device=device) * torch.exp(3 * torch.randn(*sizes, device=device)),
}


@triton.jit
def _parts(x, first, second, third, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    a = v.to(tl.bfloat16)
    v -= a.to(tl.float32)
    b = v.to(tl.bfloat16)
    v -= b.to(tl.float32)
    tl.store(first + i, a, mask=i < n)
    tl.store(second + i, b, mask=i < n)
    tl.store(third + i, v.to(tl.bfloat16), mask=i < n)


@triton.jit
def _product(
    a0, a1, a2, b0, b1, b2, c, M, N, K, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IN_PARTS: tl.constexpr
):
    """The product of the largest parts is summed anew in each block of terms, since tensor cores round sums down."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    block = tl.program_id(0)
    first = block // (8 * columns) * 8
    height = tl.minimum(rows - first, 8)
    m = (first + block % (8 * columns) % height) * BM + tl.arange(0, BM)
    n = block % (8 * columns) // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = (m % M)[:, None] * am + k[None, :] * ak
    right = k[:, None] * bk + (n % N)[None, :] * bn
    sums = tl.zeros((BM, BN), tl.float32)
    small = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        across, down = k[None, :] < K - step * BK, k[:, None] < K - step * BK
        x, y = tl.load(a0 + left, mask=across, other=0), tl.load(b0 + right, mask=down, other=0)
        if IN_PARTS:
            x1, x2 = tl.load(a1 + left, mask=across, other=0), tl.load(a2 + left, mask=across, other=0)
            y1, y2 = tl.load(b1 + right, mask=down, other=0), tl.load(b2 + right, mask=down, other=0)
            sums = sums + tl.dot(x, y, max_num_imprecise_acc=1024)
            small = tl.dot(x2, y, tl.dot(x, y2, tl.dot(x1, y1, tl.dot(x1, y, tl.dot(x, y1, small)))))
        else:
            sums = tl.dot(x, y, sums, input_precision="tf32x3")
        left += BK * ak
        right += BK * bk
    sums += tl.where(tl.abs(small) < float("inf"), small, 0.0)
    tl.store(c + m[:, None] * N + n[None, :], sums, mask=(m[:, None] < M) & (n[None, :] < N))


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    flat = x if x.is_contiguous() else x.t()
    made = [torch.empty_like(flat, dtype=torch.bfloat16) for _ in range(3)]
    _parts[(triton.cdiv(flat.numel(), 4096),)](flat, *made, flat.numel(), BLOCK=4096, num_warps=8)
    return made if flat is x else [part.t() for part in made]


def product(xs: list[torch.Tensor], ws: list[torch.Tensor], tiles: tuple[int, ...]) -> torch.Tensor:
    """Of three parts each, or of the numbers three times."""
    (M, K), N = xs[0].shape, ws[0].shape[1]
    rows, columns, terms, warps, stages = tiles
    c = torch.empty(M, N, device="cuda")
    _product[(triton.cdiv(M, rows) * triton.cdiv(N, columns),)](
        *xs, *ws, c, M, N, K, *xs[0].stride(), *ws[0].stride(), BM=rows, BN=columns, BK=terms, IN_PARTS=xs[0].dtype == torch.bfloat16, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return c


def microseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)
        begin.record()
        for _ in range(4):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 250)
    return round(statistics.median(times), 1)


def operands(kind: str, shape: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    _, M, N, K, left, right = shape
    torch.manual_seed(0)
    make = NUMBERS[kind]
    x = make(K, M, device="cuda").t() if left else make(M, K, device="cuda")
    return x, make(N, K, device="cuda").t() if right else make(K, N, device="cuda")


def errors(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], shape: tuple[Any, ...]) -> dict[str, tuple[float, float]]:
    found = {}
    for kind in NUMBERS:
        x, w = operands(kind, shape)
        d = (multiply(x, w).double() - x.double() @ w.double()).abs() / (x.double().abs() @ w.double().abs())
        found[kind] = (float(f"{d.max().item():.2e}"), float(f"{d.square().mean().sqrt().item():.2e}"))
    return found


def measured(shape: tuple[Any, ...]) -> dict[str, Any]:
    x, w = operands("normal", shape)
    xs, ws = parts(x), parts(w)
    row: dict[str, Any] = {"library": {"us": microseconds(lambda: torch.mm(x, w)), "errors": errors(torch.mm, shape)}}
    row["parts of both operands"] = {"us": microseconds(lambda: (parts(x), parts(w)))}
    for name, choices, left, right in (("tf32x3", TF32X3, [x] * 3, [w] * 3), ("parts", PARTS, xs, ws)):
        times = {}
        for tiles in choices:
            try:
                product(left, right, tiles)
                times[str(tiles)] = microseconds(lambda: product(left, right, tiles))  # noqa: B023
            except Exception as error:
                times[str(tiles)] = f"{type(error).__name__}: {error}"[:100]
        timed = {tiles: t for tiles, t in times.items() if isinstance(t, float)}
        if timed:
            best = next(tiles for tiles in choices if str(tiles) == min(timed, key=timed.__getitem__))
            split = parts if name == "parts" else lambda t: [t] * 3
            row[name] = {"us": times, "best": str(best), "errors": errors(lambda x, w: product(split(x), split(w), best), shape)}  # noqa: B023
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/gpu_products.json")
    parser.add_argument("--seconds", type=float, default=70.0)
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "rows": {}}
    for shape in SHAPES:
        if time.monotonic() < until:
            name = f"{shape[0]} {'x'.join(map(str, shape[1:4]))}"
            result["rows"][name] = measured(shape)
            print(name, json.dumps(result["rows"][name]), flush=True)
            Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
