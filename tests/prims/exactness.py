"""Runs one operator's call through the recipe of a backend and compares with eager: values, dtype, shape, strides, exceptions, gradients.

`python -m tests.prims.exactness [name...]` runs the whole table (every public operator x dtype x layout) and prints what differs.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from docs.operators import Operator, public_operators, rounding_of
from magneto.backends import pipeline
from magneto.backends.pipeline import Pass, Unit
from magneto.base.flags import config
from tests.prims.operator_samples import DTYPES, KINDS, Call, Kind, calls_of


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def as_graph(op: Any, call: Call, count: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A captured graph of the one call, and its inputs. `count`: how many results the call has (0: a single tensor)."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            return graph.placeholder(f"x{len(inputs)}")
        return type(value)(place(item) for item in value) if isinstance(value, (list, tuple)) else value

    args = tuple(place(arg) for arg in call[0])
    kwargs = {name: place(arg) for name, arg in call[1].items()}
    node = graph.call_function(op, args, kwargs)
    graph.output(tuple(graph.call_function(operator.getitem, (node, i)) for i in range(count)) if count else (node,))
    return fx.GraphModule({}, graph), inputs


@dataclass
class Run:
    """What a call gave: results (tensors and numbers) or an exception; gradients where they were asked for."""

    results: list[Any] = field(default_factory=list)
    error: Exception | None = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)


def _leaves(inputs: list[torch.Tensor], grad: bool) -> list[torch.Tensor]:
    """Fresh inputs of the same layout."""
    made = []
    for x in inputs:
        leaf = x.detach()
        if grad and (x.dtype.is_floating_point or x.dtype.is_complex):
            leaf = leaf.requires_grad_()
        made.append(leaf)
    return made


def _with_gradients(run: Run, leaves: list[torch.Tensor]) -> Run:
    outputs = [r for r in run.results if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    if outputs and wanted:
        weights = [torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).to(o.dtype).reshape(o.shape) for o in outputs]
        run.gradients = list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))
    return run


def run_eager(gm: fx.GraphModule, inputs: list[torch.Tensor], grad: bool) -> Run:
    leaves = _leaves(inputs, grad)
    try:
        with torch.set_grad_enabled(grad):
            return _with_gradients(Run(list(gm(*leaves))), leaves)
    except Exception as error:
        return Run(error=error)


class Recorded:
    """What became of the operation: the targets of the decomposed graphs, and why a graph fell back."""

    def __init__(self) -> None:
        self.targets: list[Any] = []
        self.fallback: str = ""

    def half(self, half: tuple[Pass, ...]) -> tuple[Pass, ...]:
        def look(unit: Unit) -> Unit:
            self.targets += [node.target for node in unit.traced.graph.nodes if node.op == "call_function"]
            return unit

        return (*half[:-1], Pass("record", look), half[-1])


def run_compiled(gm: fx.GraphModule, inputs: list[torch.Tensor], grad: bool, half: tuple[Pass, ...], seen: Recorded) -> Run:
    leaves = _leaves(inputs, grad)
    try:
        with torch.set_grad_enabled(grad), config.patch(suppress_errors=False):
            try:
                compiled = pipeline.compile_captured(gm, leaves, seen.half(half))
            except Exception as error:  # what the compiler refuses runs in eager
                seen.fallback = f"{type(error).__name__}: {error}"
                compiled = gm
            return _with_gradients(Run(list(compiled(*leaves))), leaves)
    except Exception as error:
        return Run(error=error)


# ---- comparing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """How far from eager a result may be: units in the last place (0: the same bits), of 1.0 at least for smaller results when `cancels`."""

    ulps: float = 0.0
    cancels: bool = False

    def __bool__(self) -> bool:
        return self.ulps > 0


EXACT = Bound()


def distances(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, cancels: bool) -> torch.Tensor:
    """Distance of each element in units of the last place that `dtype` has at the expected value; inf where nan or infinities differ."""
    info = torch.finfo(dtype)
    smallest = 1.0 if cancels else info.tiny
    a, e = got.double(), expected.double()
    exponent = torch.frexp(e.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=smallest))[1] - 1
    apart = (a - e).abs() / torch.ldexp(torch.full_like(e, info.eps), exponent)
    apart = torch.where(a.isfinite() & e.isfinite(), apart, math.inf)
    return torch.where((a == e) | (a.isnan() & e.isnan()), 0.0, apart)


def rounding(got: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None, bound: Bound) -> torch.Tensor:
    """Which elements are wrong: further than `bound` ulps from eager, and (where float64 says what is right) further from the truth than eager is."""
    if not bound:
        return (got != expected) & ~(got.isnan() & expected.isnan()) | ((got == 0) & (torch.signbit(got) != torch.signbit(expected)))
    wrong = distances(got, expected, expected.dtype, bound.cancels) > bound.ulps
    if exact is not None and exact.shape == got.shape and exact.dtype is torch.float64 and bool(wrong.any()):
        rounded = exact.to(got.dtype).double().where(exact.to(got.dtype).isinf(), exact)
        ours, theirs = (distances(x, rounded, got.dtype, bound.cancels) for x in (got, expected))
        wrong = wrong & (ours > torch.maximum(2 * theirs, torch.full_like(theirs, bound.ulps)))
    return wrong


def differ(got: Any, expected: Any, exact: Any, bound: Bound, strides: bool = True) -> str:
    """What differs, in words; '' when nothing does. `exact`: the results in float64, or None."""
    if isinstance(expected, (list, tuple)):
        several = exact if isinstance(exact, (list, tuple)) and len(exact) == len(expected) else [None] * len(expected)
        return "; ".join(filter(None, (differ(*three, bound, strides) for three in zip(got, expected, several, strict=True))))
    if not isinstance(expected, torch.Tensor):
        return "" if type(got) is type(expected) and (got == expected or got != got) else f"{got!r} for {expected!r}"
    if got.shape != expected.shape or got.dtype is not expected.dtype:
        return f"{got.dtype}{tuple(got.shape)} for {expected.dtype}{tuple(expected.shape)}"
    if got.layout is not expected.layout:
        return f"{got.layout} for {expected.layout}"
    if expected.layout is not torch.strided:
        return differ(got.to_dense(), expected.to_dense(), None, bound, False)
    if strides and expected.numel() and got.stride() != expected.stride():
        return f"strides {got.stride()} for {expected.stride()}"
    got, expected = got.detach().resolve_conj().resolve_neg(), expected.detach().resolve_conj().resolve_neg()
    if expected.dtype.is_complex:
        precise = torch.view_as_real(exact.detach().resolve_conj()) if isinstance(exact, torch.Tensor) and exact.dtype.is_complex else None
        return differ(torch.view_as_real(got), torch.view_as_real(expected), precise, bound, False)
    if expected.dtype.is_floating_point:
        wrong = rounding(got, expected, exact.detach() if isinstance(exact, torch.Tensor) else None, bound)
    else:
        wrong = got != expected
    if not bool(wrong.any()):
        return ""
    return f"{got[wrong].flatten()[:4].tolist()} for {expected[wrong].flatten()[:4].tolist()} at {wrong.nonzero()[:4].tolist()}"


@dataclass
class Outcome:
    """One call: what differs, whether eager refused it, whether the operator is still in the decomposed graph."""

    problem: str
    refused: bool
    kept: bool
    fallback: str


def in_double(call: Call) -> Call:
    """The call with float64 in place of smaller floats."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.double() if value.dtype.is_floating_point else value.to(torch.complex128) if value.dtype.is_complex else value
        if isinstance(value, (list, tuple)):
            return type(value)(wide(item) for item in value)
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    return tuple(wide(arg) for arg in call[0]), {name: wide(arg) for name, arg in call[1].items()}


def exact_run(op: Any, call: Call, count: int, grad: bool) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gm, inputs = as_graph(op, in_double(call), count)
        return run_eager(gm, inputs, grad)


def check(
    op: Any,
    call: Call,
    bound: Bound = EXACT,
    half: tuple[Pass, ...] = pipeline.CALL_HALF_DECOMPOSED,
    grad: bool = False,
    strides: bool = True,
) -> Outcome:
    """One call through the recipe with `half` against eager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = op(*call[0], **call[1])
        except Exception:
            result = None
        count = len(result) if isinstance(result, (list, tuple)) else 0
        gm, inputs = as_graph(op, call, count)
        eager = run_eager(gm, inputs, grad)
        seen = Recorded()
        compiled = run_compiled(gm, inputs, grad, half, seen)
        problem = ""
        if eager.error is not None or compiled.error is not None:
            if type(eager.error) is not type(compiled.error):
                problem = f"raises {compiled.error!r} for {eager.error!r}"
        else:
            ill_conditioned = re.fullmatch(FINITE, op._schema.name.removeprefix("aten::"))
            if grad and ill_conditioned and len(compiled.gradients) == len(eager.gradients):
                compiled.gradients = [e if near(g, e) else g for g, e in zip(compiled.gradients, eager.gradients, strict=True)]
            problem = runs_differ(compiled, eager, Run(), bound, strides)
            if problem and (bound or grad):  # float64 says who is right
                problem = runs_differ(compiled, eager, exact_run(op, call, count, grad), bound, strides)
    return Outcome(problem, eager.error is not None, op in seen.targets, seen.fallback)


def runs_differ(got: Run, expected: Run, exact: Run, bound: Bound, strides: bool) -> str:
    double = any(
        g is not None and g.dtype is torch.float64 for g in expected.gradients
    )  # where nothing says which of two roundings is right
    sums = Bound(max(bound.ulps, 4.0), bound.cancels or double)  # gradients are formulas and sums, rounded one by one
    problem = differ(got.results, expected.results, exact.results, bound, strides)
    return problem + gradients_differ(got.gradients, expected.gradients, exact.gradients, sums)


def near(got: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Whether a gradient of linear algebra differs by 512 units of its largest element's last place at most."""
    if got is None or expected is None or not expected.numel() or got.shape != expected.shape or got.dtype is not expected.dtype:
        return False
    return bool((got - expected).abs().max() <= 512 * torch.finfo(expected.dtype).eps * expected.abs().max())


def gradients_differ(got: list[Any], expected: list[Any], exact: list[Any], bound: Bound) -> str:
    if [g is None for g in got] != [e is None for e in expected]:
        return f" gradients {got} for {expected}"
    several = exact if len(exact) == len(expected) else [None] * len(expected)
    return "".join(
        f" gradient {i}: {wrong}"
        for i, (g, e, x) in enumerate(zip(got, expected, several, strict=True))
        if e is not None and (wrong := differ(g, e, x, bound, False))
    )


# ---- the whole table -----------------------------------------------------------------------------------------------------

FINITE = r"gelu|linalg_.*|.*(det|cond|svd|qr|inverse|eig|cholesky|solve|pinverse|matrix_power).*"
"""Operators for which eager's vector loop and its tail disagree about infinities, or that LAPACK refuses on them."""

KNOWN: dict[str, str] = {
    "quantile": "PyTorch reads numbers of q while it is traced; dynamo's regions check them",
    "nanquantile": "as quantile",
    "multilabel_margin_loss": "of nothing: memory that eager has not written",
    "cdist": "chooses its way by size",
    "slice_inverse": "PyTorch's own, for undoing views: the gradient of what it does not read is zeros",
}
"""Packets that are not compared, and why."""

NO_GRADIENT: dict[str, str] = {"pdist": "eager's kernel for the gradient of no rows ends the process"}
"""Packets whose gradients are not compared, and why."""


def bound_of(row: Operator) -> Bound:
    return Bound(*rounding_of(row.packet)[:2])


def numpy_terms(row: Operator) -> tuple[Bound, tuple[Pass, ...]]:
    """Bound and recipe for the numpy interpreter: functions err as eager's kernels do."""
    bound = bound_of(row)
    return Bound(max(bound.ulps, 4.0), bound.cancels), pipeline.NUMPY_HALF


def is_random(row: Operator) -> bool:
    return torch.Tag.nondeterministic_seeded in row.op.tags or "random" in row.why


UNDEFINED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize resize_as empty_quantized".split())


def comparable(row: Operator) -> bool:
    """Not random, not uninitialised, an operation."""
    return row.kind != "outside" and not is_random(row) and row.packet not in UNDEFINED and row.packet not in KNOWN


def special_for(row: Operator, kind: Kind, grad: bool = False) -> Kind:
    if grad and row.packet in ("softshrink", "hardshrink"):  # of nan eager's vector loop says 0 and its tail passes the gradient
        return replace(kind, special=False)
    sums_cancel = row.packet in ("mean", "nanmean", "sum") and kind.dtype is torch.int64
    if re.fullmatch(FINITE, row.packet):  # matrices of equal rows are singular, or not, by the last bit
        return replace(kind, special=False, layout="stepped" if kind.layout == "expanded" else kind.layout)
    overflows = row.packet == "lcm"  # eager's kernel divides the smallest integer by -1, which the processor answers with SIGFPE
    endless = row.packet in (
        "special_legendre_polynomial_p",
        "special_laguerre_polynomial_l",
    )  # eager loops up to the degree, here the greatest int64
    return replace(kind, special=False) if sums_cancel or overflows or endless else kind


def describe(call: Call) -> str:
    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{value.stride()}"
        return "[" + ", ".join(map(one, value)) + "]" if isinstance(value, list) else repr(value)

    return "(" + ", ".join([*map(one, call[0]), *(f"{k}={one(v)}" for k, v in call[1].items())]) + ")"


def kinds(dtypes: tuple[torch.dtype, ...], few: bool = False) -> Iterator[Kind]:
    """Every way to make tensors; `few`: sizes only, no layouts."""
    for dtype in dtypes:
        for layout, shape in KINDS[6:] if few else KINDS:
            yield Kind(dtype, layout, shape)
        yield Kind(dtype, other=torch.int64 if dtype is not torch.int64 else torch.float32)
        yield Kind(dtype, other=torch.float64)


@dataclass
class Slice:
    """The table with tensors of one dtype: how many calls there were, what became of them."""

    calls: int = 0
    refused: int = 0
    fallback: int = 0
    problems: int = 0
    operators: int = 0
    seconds: float = 0.0

    def row(self, row: Operator, chosen: Iterator[Kind], terms: tuple[Any, ...], grad: bool, show: int) -> None:
        """All calls of one operator; prints what differs, `show` calls at most, and operators that no call works for."""
        worked = problems = 0
        met: set[str] = set()
        for kind in chosen:
            for call in calls_of(row.op, special_for(row, kind, grad)):
                if (text := describe(call)) in met:  # operators with shapes of their own make the same calls for many kinds
                    continue
                met.add(text)
                outcome = check(row.op, call, *terms, grad=grad)
                self.calls += 1
                self.refused += outcome.refused
                worked += not outcome.refused
                self.fallback += bool(outcome.fallback and not outcome.refused)
                problems += bool(outcome.problem)
                if outcome.problem and problems <= show:
                    print(f"{row.name} {kind} {text}: {outcome.problem[:300]}")
        self.operators += 1
        self.problems += problems
        if not worked:
            print(f"{row.name}: no call works")
        elif problems:
            print(f"{row.name}: {problems} problems")
        sys.stdout.flush()


def record(path: Path, name: str, found: Slice) -> None:
    """The slice into the file of the complete run, whose totals are counted anew."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"slices": {}}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    taken = {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "commit": commit}
    kept["slices"][name] = {**vars(found), "seconds": round(found.seconds), **taken}
    kept["totals"] = {
        key: sum(row[key] for row in kept["slices"].values()) for key in ("calls", "refused", "fallback", "problems", "seconds")
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtypes", default="")
    parser.add_argument("--grad", action="store_true")
    parser.add_argument("--kind", default="")
    parser.add_argument("--numpy", action="store_true", help="the numpy interpreter in place of torch's kernels")
    parser.add_argument("--few", action="store_true", help="no layouts, only sizes")
    parser.add_argument("--show", type=int, default=3)
    parser.add_argument("--record", type=Path, help="a JSON file that keeps the counts, one slice for each dtype")
    options = parser.parse_args()
    rows = [row for row in public_operators() if comparable(row)]
    rows = [row for row in rows if not (options.grad and row.packet in NO_GRADIENT)]
    rows = [row for row in rows if not options.names or row.packet in options.names]
    rows = [row for row in rows if not options.kind or row.kind in options.kind.split(",")]
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if options.dtypes and name not in options.dtypes.split(","):
            continue
        found, start = Slice(), time.process_time()
        for row in rows:
            terms = numpy_terms(row) if options.numpy else (bound_of(row),)
            found.row(row, kinds((dtype,), options.few), terms, options.grad, options.show)
        found.seconds = time.process_time() - start
        print(name, vars(found), flush=True)
        if options.record:
            what = [name, *["forward and backward"] * options.grad, *["sizes only"] * options.few]
            record(options.record, ", ".join(what), found)


if __name__ == "__main__":
    main()
