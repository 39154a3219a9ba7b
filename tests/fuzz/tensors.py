"""Random tensor programs (tensor_grammar.py): eager against a compiler.

    python -m tests.fuzz.tensors --first 0 --count 500 --size 8 --backends aot_eager,inductor [--sizes] [--wide] [--large --threads 2] [--numerics eager] [--device cuda]

Compared: values (`aot_eager`: bits), gradients, shapes, types, strides, which results share memory, what is written to the inputs, the random stream, errors; and whether results of some calls are what they were behind all others.
A difference of `inductor` counts where it stays in float64. An error that eager's backward raises is not asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import magneto
from tests.fuzz.tensor_grammar import Program, program_of

GRADIENTS = 1e-5  # of aot_eager: sums of several gradients come in another order
FAST, DOUBLE = 2e-4, 1e-7
HALF = 0.03
_HALVES = ("half", "float16", "autocast")
_BROKEN_VIEW = "A view was created in"  # and its memory written in another mode: eager's view cannot say whether it is a leaf, ours can


VARIANTS = {
    "": ("", contextlib.nullcontext),
    "same": ("same", contextlib.nullcontext),
    "window": ("window", contextlib.nullcontext),
    "no_grad": ("", torch.no_grad),
    "inference": ("", torch.inference_mode),
}
"""How a program is called: which inputs share memory, in which mode."""


def outcome(fn: Callable[..., Any], program: Program, double: bool = False, variant: str = "") -> dict[str, Any]:
    shared, mode = VARIANTS[variant]
    inputs = program.inputs(double, shared)
    torch.manual_seed(program.seed)
    try:
        with mode():
            results = fn(*inputs)
        described = [(tuple(t.shape), t.dtype, t.device, _strides(t), t.requires_grad, t.is_leaf) for t in results]
    except Exception as error:  # noqa: BLE001 - an error is an outcome
        return {"error": (type(error).__name__, str(error)[:150])}
    found: dict[str, Any] = {"results": described, "random": _random(program.device), "refused": None, "gradients": []}
    memory = [t.untyped_storage()._cdata for t in (*inputs, *results)]
    found["memory"] = [[a == b for b in memory] for a in memory]
    total = [
        (t.double() * torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64, device=t.device).view(t.shape)).sum().cpu()
        for t in results
        if t.requires_grad and t.is_floating_point()
    ]
    if total:
        try:
            torch.stack(total).sum().backward()
        except RuntimeError as error:
            found["refused"] = str(error)[:80]
        found["gradients"] = [t.grad for t in inputs]
    found["values"] = [t.detach().clone() for t in (*results, *inputs)]
    made = [t.detach() for t in (*results, *(t for t in found["gradients"] if t is not None))]
    found["kept"] = [(t, t.clone()) for t in made]
    return found


def _random(device: str) -> torch.Tensor:
    return torch.cat([torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.startswith("cuda") else [])])


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step if n > 1 else 0 for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() > 1 else ()


def _close(a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    if not tolerance or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a.to(wide).nan_to_num(12345.0), b.to(wide).nan_to_num(12345.0))
    if a.dtype in (torch.float16, torch.bfloat16):
        tolerance = max(tolerance, HALF)
    scale = a.to(wide).nan_to_num(0, 0, 0).abs().max().clamp(min=1).item() if a.numel() else 1.0
    return torch.allclose(a.to(wide), b.to(wide), rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def difference(expected: dict[str, Any], found: dict[str, Any], tolerance: float) -> str | None:
    if "error" in expected or "error" in found:
        same = expected.get("error") == found.get("error") or _BROKEN_VIEW in expected.get("error", ("", ""))[1]
        return None if same else f"error: {expected.get('error')} / {found.get('error')}"
    if expected["refused"]:
        return None
    for what in ("results", "memory", "refused"):
        if expected[what] != found[what]:
            return f"{what}: {expected[what]} / {found[what]}"
    if not torch.equal(expected["random"], found["random"]):
        return "random stream"
    for i, (a, b) in enumerate(zip(expected["values"], found["values"], strict=True)):
        if not _close(a, b, tolerance):
            return f"value {i}: {a} / {b}"
    for i, (a, b) in enumerate(zip(expected["gradients"], found["gradients"], strict=True)):
        if (a is None) != (b is None) or (a is not None and b is not None and _strides(a) != _strides(b)):
            return f"gradient {i}: {a} / {b}"
        if not _close(a, b, max(tolerance, GRADIENTS)):
            return f"gradient {i}: {a} / {b}"
    return None


def check(program: Program, backend: str, bits: bool = True, variants: Sequence[str] = ("",), others: Sequence[int] = (0, 0)) -> str | None:
    """What differs from eager when one optimised function is called in all variants, twice. `bits`: values of `aot_eager` must be equal; sums over inputs with gaps that are written need not be.
    `others`: what is added to the seed of the inputs' numbers, per call."""
    tolerance = FAST if backend != "aot_eager" else 0 if bits else GRADIENTS
    calls = [replace(program, seed=program.seed + more, _memory={}) for more in others]
    return _first_difference(backend, tolerance, [(one, variant) for one in calls for variant in variants])


def check_sizes(program: Program, backend: str) -> str | None:
    """The same where one size of the inputs is another one in each call, there and back. An operation whose result nobody reads does not raise here."""
    chosen = random.Random(program.seed)
    sizes = sorted({n for shape, *_ in program.specs for n in shape if n > 1}) or [1]
    old = chosen.choice(sizes)
    news = [old, *chosen.sample([n for n in (2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 17, 20, 33, 40, 65) if n != old], 6)]
    if chosen.random() < 0.3:
        news.insert(chosen.randrange(1, 5), 1)
    made = [
        replace(program, _memory={}, specs=[(tuple(n if k == old else k for k in s), *rest) for s, *rest in program.specs]) for n in news
    ]
    here = [replace(one, device="", _memory={}) for one in made]  # an index out of range is fatal on a device
    made = [one for one, there in zip(made, here, strict=True) if not one.device or "error" not in outcome(there.function(), there)]
    tolerance = FAST if backend != "aot_eager" else GRADIENTS
    return _first_difference(backend, tolerance, [(one, "") for one in (*made, *made[::-1]) if "error" not in outcome(one.function(), one)])


def _first_difference(backend: str, tolerance: float, calls: Sequence[tuple[Program, str]]) -> str | None:
    """Of one optimised function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        magneto.reset()
        fn = calls[0][0].function() if calls else len
        optimised = magneto.optimize(backend)(fn)
        kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for program, variant in calls:
            if program.device and variant == "inference" and "torch.func." in program.source():
                continue  # torch 2.11 gives zeros
            ours = outcome(optimised, program, False, variant)
            found = difference(outcome(fn, program, False, variant), ours, tolerance)
            if program.seed % 2:
                kept.append(ours.get("kept", []))
            del ours
            if found and backend != "aot_eager" and found.startswith(("value", "gradient")):
                if any(word in program.source() + str(program.specs) for word in (*_HALVES, *["view(torch.int"] * bool(program.device))):
                    continue  # one rounding more or less decides comparisons, and bits
                again = outcome(magneto.optimize(backend)(fn), program, True, variant)
                found = difference(outcome(fn, program, True, variant), again, DOUBLE)
            if found:
                return f"{variant} {[shape for shape, *_ in program.specs]} {found}"
        if not all(_close(now, then, 0) for tensors in kept for now, then in tensors):
            return "results are not what they were when they were returned"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--size", type=int, default=8, help="statements in a program")
    parser.add_argument("--backends", default="aot_eager,inductor")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="how each is called, one after another by one optimised function")
    parser.add_argument("--sizes", action="store_true", help="call each with sizes that vary instead")
    parser.add_argument("--wide", action="store_true", help="more functions")
    parser.add_argument("--large", action="store_true", help="larger inputs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--numerics", default="fast")
    parser.add_argument(
        "--device",
        default="",
        help="where inputs and what the program makes lie; each variant is called four times there, with other numbers",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    magneto.config.numerics = options.numerics
    failures = 0
    for seed in range(options.first, options.first + options.count):
        program = program_of(seed, options.size, options.wide, options.large, options.device)
        others = (0, 2, 4, 6) if options.device else (0, 0)
        for backend in options.backends.split(","):
            found = (
                check_sizes(program, backend)
                if options.sizes
                else check(program, backend, not options.device, options.variants.split(","), others)
            )
            if found:
                failures += 1
                print(f"---- seed {seed}, {backend}: {program.specs}\n{program.source()}{found}\n", flush=True)
    print(f"{options.count} programs, {failures} differences")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
