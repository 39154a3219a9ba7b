"""GPU benchmark: magneto against eager and torch.compile, interleaved, CUDA events, medians.

`python -m benchmarks.gpu [--out benchmarks/results/gpu.json] [--budget seconds] [names...]`. Each row runs all contenders in turn, `ROUNDS` times; of models a time is that
of one call between two events with the device idle before, so that the host's part shows; of kernels the mean of ten calls. Cold compile is the wall time of the first call (training: first step).
`model` rows are whole calls, `kernel` rows report the share of the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROUNDS = 25
REPEATED = 10  # calls of a kernel between two events: what the host costs is not what is asked there
DEVICE = "cuda"
Made = tuple[
    Callable[..., Any], tuple[Any, ...], bool, int
]  # function, arguments, trains?, bytes a perfect kernel moves (0: no kernel row)

ROWS: dict[str, Callable[[], Made]] = {}


def row(make: Callable[[], Made]) -> Callable[[], Made]:
    ROWS[make.__name__] = make
    return make


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


# ---- kernels: (function, arguments, trains, bytes) -----------------------------------------------------------------------


@row
def pointwise_chain() -> Made:
    x, y = randn(1 << 26), randn(1 << 26)
    return lambda x, y: torch.sigmoid(x * 2 + y) * x, (x, y), False, 12 << 26


@row
def gelu_bias_bf16() -> Made:
    x, b = randn(16384, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    return lambda x, b: F.gelu(x + b), (x, b), False, 4 * x.numel()


@row
def softmax_8192x4096() -> Made:
    x = randn(8192, 4096)
    return lambda x: F.softmax(x, -1), (x,), False, 8 * x.numel()


@row
def softmax_128x262144() -> Made:
    x = randn(128, 262144)
    return lambda x: F.softmax(x, -1), (x,), False, 8 * x.numel()


@row
def layer_norm_16384x4096_bf16() -> Made:
    x, w, b = randn(16384, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    return lambda x, w, b: F.layer_norm(x, (4096,), w, b), (x, w, b), False, 4 * x.numel()


@row
def layer_norm_training() -> Made:
    x, w, b = randn(16384, 4096, grad=True), randn(4096, grad=True), randn(4096, grad=True)
    return lambda x, w, b: F.layer_norm(x, (4096,), w, b), (x, w, b), True, 4 * 5 * x.numel()


@row
def rms_norm_bf16() -> Made:
    x, w = randn(16384, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    return (
        lambda x, w: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w,
        (x, w),
        False,
        4 * x.numel(),
    )


@row
def cross_entropy_128k() -> Made:
    x, t = randn(2048, 128256, dtype=torch.bfloat16, grad=True), torch.randint(0, 128256, (2048,), device=DEVICE)
    return lambda x, t: F.cross_entropy(x.float(), t), (x, t), True, 6 * x.numel()


@row
def sum_of_columns() -> Made:
    x = randn(65536, 1024)
    return lambda x: x.sum(0), (x,), False, 4 * x.numel()


@row
def sum_of_everything() -> Made:
    x = randn(1 << 26)
    return lambda x: x.sum(), (x,), False, 4 * x.numel()


@row
def transposed_sum() -> Made:
    x, y = randn(8192, 8192), randn(8192, 8192)
    return lambda x, y: x.t() + y, (x, y), False, 12 * x.numel()


@row
def embedding() -> Made:
    w, i = randn(50000, 1024), torch.randint(0, 50000, (64, 512), device=DEVICE)
    return lambda w, i: F.embedding(i, w) * 2, (w, i), False, 8 * i.numel() * 1024


# ---- models --------------------------------------------------------------------------------------------------------------


@row
def tiny_function() -> Made:
    return lambda x: x + 1, (randn(8),), False, 0


@row
def mlp() -> Made:
    layers = [m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers).to(DEVICE), (randn(32, 256),), False, 0


@row
def resnet18() -> Made:
    import torchvision

    return torchvision.models.resnet18().to(DEVICE).eval(), (randn(16, 3, 128, 128),), False, 0


@row
def resnet18_training() -> Made:
    import torchvision

    return torchvision.models.resnet18().to(DEVICE), (randn(16, 3, 128, 128),), True, 0


@row
def resnet50() -> Made:
    import torchvision

    return torchvision.models.resnet50().to(DEVICE).eval(), (randn(32, 3, 224, 224),), False, 0


@row
def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False)).to(DEVICE).eval()
    return lambda ids: model(ids).logits, (torch.randint(0, 50000, (4, 512), device=DEVICE),), False, 0


def _bert() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(attn_implementation="sdpa")).to(DEVICE).eval()


@row
def bert_base() -> Made:
    model = _bert()
    return lambda ids: model(ids).last_hidden_state, (torch.randint(0, 30000, (8, 128), device=DEVICE),), False, 0


@row
def bert_base_training() -> Made:
    model = _bert()
    return lambda ids: model(ids).last_hidden_state, (torch.randint(0, 30000, (8, 128), device=DEVICE),), True, 0


@row
def vit_b_16() -> Made:
    import torchvision

    return torchvision.models.vit_b_16().to(DEVICE).eval(), (randn(10, 3, 224, 224),), False, 0


# ---- measuring -----------------------------------------------------------------------------------------------------------


def contender(fn: Any, args: tuple[Any, ...], train: bool) -> Callable[[], Any]:
    """One call, or one forward and backward."""
    if not train:

        def call() -> Any:
            with torch.no_grad():
                return fn(*args)

        return call
    seeds: list[torch.Tensor] = []

    def step() -> Any:
        out = fn(*args)
        if not seeds:
            seeds.append(torch.randn_like(out))
        out.backward(seeds[0])
        for x in args:
            if isinstance(x, torch.Tensor):
                x.grad = None
        for p in getattr(fn, "parameters", list)():
            p.grad = None
        return out

    return step


def timed(call: Callable[[], Any], repeats: int = 1) -> float:
    """Milliseconds of one call, the mean of `repeats` between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def measure(name: str, opponents: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    torch.manual_seed(0)
    fn, args, train, moved = ROWS[name]()
    calls: dict[str, Callable[[], Any]] = {}
    result: dict[str, Any] = {"trains": train, "ms": {}, "cold_s": {}, "errors": {}, "peak_mib": {}}
    for who, wrap in opponents.items():
        try:
            calls[who] = contender(wrap(fn), args, train)
            start = time.perf_counter()
            calls[who]()
            torch.cuda.synchronize()
            result["cold_s"][who] = round(time.perf_counter() - start, 2)
            for _ in range(4):
                calls[who]()
            result["peak_mib"][who] = _peak(calls[who])
        except Exception as error:
            calls.pop(who, None)
            result["errors"][who] = f"{type(error).__name__}: {str(error)[:200]}"
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(ROUNDS):
        for who, call in calls.items():
            times[who].append(timed(call, REPEATED if moved else 1))
    result["ms"] = {who: round(statistics.median(t), 5) for who, t in times.items()}
    ours = result["ms"].get("magneto")
    if ours:
        result["speedup"] = {who: round(t / ours, 3) for who, t in result["ms"].items() if who != "magneto"}
        modes = [t for who, t in result["ms"].items() if who.startswith("torch.compile")]
        if len(modes) > 1:
            result["speedup"]["torch.compile, its best mode"] = round(min(modes) / ours, 3)
    if moved:
        copy = _bandwidth()
        result["share_of_copy"] = {who: round(moved / (t * 1e-3) / copy, 3) for who, t in result["ms"].items()}
    return result


def _peak(call: Callable[[], Any]) -> float:
    """MiB of the largest part of memory in use during a call, beyond what is in use before it: recordings keep theirs, in no one's count."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _bandwidth() -> float:
    """Bytes read and written by a large copy in a second."""
    source = torch.empty(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    times = [timed(lambda: target.copy_(source)) for _ in range(7)]
    return 2 * source.nbytes / (statistics.median(times) * 1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results/gpu.json"))
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--modes", action="store_true", help="also torch.compile with CUDA graphs, and magneto without")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    import triton

    import magneto

    opponents: dict[str, Callable[[Any], Any]] = {
        "magneto": lambda fn: magneto.optimize("inductor")(fn),
        "eager": lambda fn: fn,
        "torch.compile": lambda fn: torch.compile(fn),
    }
    if options.modes:
        opponents["torch.compile reduce-overhead"] = lambda fn: torch.compile(fn, mode="reduce-overhead")
        opponents["magneto no-cudagraphs"] = lambda fn: magneto.optimize("inductor", mode="no-cudagraphs")(fn)
    started = time.perf_counter()
    rows: dict[str, Any] = {}
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
        "rounds": ROUNDS, "allow_tf32": torch.backends.cuda.matmul.allow_tf32, "rows": rows,
    }  # fmt: skip
    for name in options.names or ROWS:
        if time.perf_counter() - started > options.budget:
            break
        try:
            rows[name] = measure(name, opponents)
            print(name, rows[name]["ms"], rows[name].get("share_of_copy", ""), rows[name]["cold_s"], rows[name]["errors"] or "", flush=True)
        except Exception:
            rows[name] = {"error": traceback.format_exc()[-600:]}
            print(name, rows[name]["error"], flush=True)
        torch.compiler.reset()
        magneto.reset()
        torch.cuda.empty_cache()
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
