"""What happens when the hook has no region for an entry point: capture, hand the graph to the backend, build the guards and the region; limits, refusals, errors.

`Context` is the payload of a `_C.Policy`: the settings of one `optimize(...)` call. No user program ever fails because capture failed: the frame then runs in CPython.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import importlib
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._device import DeviceContext

from magneto import _C
from magneto.base import events
from magneto.base.collection import no_collection
from magneto.base.dataclass import dataclass, field
from magneto.base.errors import GraphBreak, MagnetoError, UserError, warn_once
from magneto.base.flags import config
from magneto.base.logs import dump, dumping, log, logging
from magneto.base.varying import varying
from magneto.dynamo import marks
from magneto.dynamo.bytecode.decode import slot_names
from magneto.dynamo.guards.explain import Miss, changed_decisions, changed_modules, changed_numbers, explain_miss, keeps_failing
from magneto.dynamo.guards.native import build_program
from magneto.dynamo.guards.source import Local, Source
from magneto.dynamo.guards.wording import remedy, subject
from magneto.dynamo.machine.assume import Place, Refuted
from magneto.dynamo.machine.machine import SymbolicMachine
from magneto.dynamo.machine.signals import Forced, Restart
from magneto.dynamo.machine.varying import Varying
from magneto.dynamo.region import runtime
from magneto.dynamo.region.build import RegionPlan, finish_region, plan_region
from magneto.dynamo.region.once import CompiledWhenCalledAgain, breaks_its_guards
from magneto.dynamo.region.sizes import (
    AGAIN,
    FLEETING,
    MOVING,
    Budget,
    Dimension,
    SizesThatCome,
    Verdict,
    missed_sizes,
    moved_sizes,
    wanted,
)
from magneto.dynamo.region.skip import looks_at_memory, skip_reason
from magneto.graph import SizeUnknown
from magneto.graph.atomic import atomic
from magneto.graph.program import standalone

Backend = Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
MAX_ATTEMPTS = 64
MAX_CHANGING = 100  # numbers that change at once and become inputs: more of them are a table of data
FLIPS = 3  # so often numbers in small tensors may decide otherwise than before; then they are breaks
PLAIN_LIMIT = 3
_SHOWN = {"print", "open", "input", "exit", "quit", "help", "breakpoint", "license", "credits", "copyright"}
_OURS = {name: fn for name, fn in vars(builtins).items() if callable(fn) and not name.startswith("_") and name not in _SHOWN}
_OUR_MODULES = (ast, builtins, collections, functools, sys, torch, types, weakref)
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


@dataclass(eq=False)
class Context:
    """Settings of one optimised callable. `on_plan` sees each finished plan before its graph is compiled (export, explain)."""

    backend: Backend
    backend_name: str = "custom"
    nopython: bool = False
    unknown_sizes: bool = False  # the backend takes graphs with tensors whose sizes depend on data
    varying_sizes: bool = False  # it takes graphs with inputs whose sizes vary from call to call
    dynamic: bool | None = None
    slow_backend: bool = False  # a graph that is not expected again is run without it
    on_plan: Callable[[RegionPlan], None] | None = None
    plans: list[RegionPlan] = field(default_factory=list)
    refuted: set[Place] = field(default_factory=set)  # branches that raised after all
    _left: set[tuple[Any, str]] = field(default_factory=set)

    def leave_to_eager(self, code: Any, reason: str) -> None:
        """Frames of `code` run in eager for now; said once."""
        if (code, reason) not in self._left:
            self._left.add((code, reason))
            events.emit("fallback", what=code.co_qualname, reason=reason)
            log(1, lambda: f"{code.co_qualname} runs in eager: {reason}")

    changing: dict[tuple[Any, int], set[Source]] = field(default_factory=dict)  # by entry point: what differed between calls
    sizes: collections.defaultdict[tuple[Any, int], SizesThatCome] = field(default_factory=lambda: collections.defaultdict(SizesThatCome))
    budget: Budget = field(default_factory=Budget)
    varying: dict[tuple[Any, int], int] = field(default_factory=dict)  # by entry point whose new variant differs in sizes: from how many
    moving: dict[tuple[Any, int], set[Dimension]] = field(default_factory=dict)  # by entry point: what has had several sizes,
    fixed: dict[tuple[Any, int], set[Dimension]] = field(default_factory=dict)  # and what has to be a constant

    @property
    def varies(self) -> bool:
        """Whether sizes of inputs may be unknown to a graph."""
        return self.varying_sizes and self.dynamic is not False

    flips: collections.Counter[tuple[Any, int]] = field(
        default_factory=collections.Counter
    )  # by entry point: how often a small tensor has decided otherwise


def _mode_for_eager() -> str | None:
    """The mode of torch, active now, that must see every operation as the program makes it."""
    if torch.is_grad_enabled() and _saved_tensor_hooks(True) is not None:
        return "hooks on saved tensors are active: they rely on eager's own choice of what is saved"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    if vars(forward_ad)["_current_level"] >= 0:
        return "forward-mode differentiation is active: tensors may carry tangents"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is active: it records operations"
    for index in range(torch._C._len_torch_function_stack()):
        if not isinstance(torch._C._get_function_stack_at(index), DeviceContext):
            return "a TorchFunctionMode is active"
    return None


def install() -> None:
    """Give the hook its compiler."""
    _C.set_compiler(compile_entry)
    _C.set_on_rerun(_on_rerun)
    foreign = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    _C.set_foreign_switch(getattr(foreign, "set_eval_frame", None))


def _on_rerun(region: Any, error: BaseException) -> bool:
    """A region raised: the interpreter runs the frame again, unless the exception is control flow that passes through a graph."""
    if (
        type(error).__name__ == "_StopRecomputationError"
    ):  # torch.utils.checkpoint ends a recomputation by raising out of a saved-tensor hook
        return True
    if hasattr(error, "magneto_applied"):  # the graph wrote to its inputs in a way that cannot be taken back
        return True
    if isinstance(error, Refuted):
        context: Context = region.policy.payload
        if not context.nopython:
            context.refuted.add(error.place)
            region.invalidate()
    events.counter("reruns")
    log(1, lambda: f"region {region.info.get('name')} raised {error!r}; the interpreter runs the frame")
    return False


_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]


def compile_entry(policy: Any, state: Any, missed: list[Any]) -> Any:
    """The hook's callback: a Region, None (interpret this time), SKIP_ENTRY or SKIP_CODE."""
    context: Context = policy.payload
    if len(missed) >= FLEETING and context.budget.closed():
        return None
    if config.disable or any(getattr(builtins, name, None) is not fn for name, fn in _OURS.items()):
        return None  # switched off; or the program has replaced a built-in function that capture itself calls
    if any(sys.modules.get(module.__name__) is not module for module in _OUR_MODULES):
        return None  # what capture calls may import it
    mark = marks.mark_of(state.func) if state.offset == 0 else None
    if mark == marks.DISABLE:
        return _C.DISABLE_CODE
    if state.code is _IMPORT:  # a module's body does not run twice, nor what finders do and its decorators call
        return _C.DISABLE_CODE
    if mark == marks.SKIP or skip_reason(state.code, state.globals) is not None:
        return _C.SKIP_CODE
    if looks_at_memory(state.code) is not None:
        return _C.DISABLE_CODE if "get_objects" in state.code.co_names else _C.SKIP_CODE
    mode = _mode_for_eager()
    if mode is not None:
        context.leave_to_eager(state.code, mode)
        return None
    if missed and not (may := _may_recompile(context, state, missed)):
        return None if may is None else _C.SKIP_ENTRY
    started = time.perf_counter()
    with events.timer("compile"), no_collection():
        try:
            region = _compile(context, state, policy, missed)
        except (GraphBreak, UserError):
            raise
        except _Nothing as nothing:
            if context.nopython and nothing.reason is not None:
                raise nothing.reason from None
            events.emit("fallback", what=state.code.co_qualname, reason=str(nothing))
            return _C.SKIP_ENTRY
        except _BackendFailed as failed:
            raise failed.error from None
        except RecursionError:  # the program stands near its own limit, or nests its values deeply
            log(1, lambda: f"capture of {state.code.co_qualname} ran out of stack")
            if context.nopython:
                raise
            return None
        except Exception as error:
            return _internal(state, error)
    code = state.code
    seconds = time.perf_counter() - started
    events.emit("compile", function=code.co_qualname, file=code.co_filename, line=code.co_firstlineno, offset=state.offset, seconds=seconds)
    return region


class _Nothing(Exception):
    """No part of the frame can be a region."""

    def __init__(self, reason: GraphBreak | None) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _BackendFailed(Exception):
    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _internal(state: Any, error: Exception) -> Any:
    """A defect of ours: said once, and the entry point is left to CPython."""
    text = "".join(traceback.format_exception(error))
    log(1, text)
    events.emit("fallback", what=state.code.co_qualname, reason=f"internal error: {error!r}", traceback=text)
    if not config.suppress_errors:
        raise error
    warn_once(
        "W010",
        code=state.code.co_qualname,
        file=state.code.co_filename,
        line=state.code.co_firstlineno,
        error=f"{type(error).__name__}: {error}",
    )
    return _C.SKIP_ENTRY


def _is_plain(info: Any) -> bool:
    """A region that runs its frame to the end without one tensor operation: variants of it gain little (`__getattr__` called with each name)."""
    return bool(info) and info["gm"] is None and info["reason"] is None


def _explained(region: Any, state: Any) -> Miss:
    return explain_miss(region.info["guards"], state, getattr(region.guards, "failed_row", -1))


def _may_recompile(context: Context, state: Any, missed: list[Any]) -> bool | None:
    """None: not in this call."""
    code = state.code
    if len(missed) >= PLAIN_LIMIT and all(_is_plain(region.info) for region in missed):
        return False
    verdict = Verdict.NOW
    sizes = missed_sizes(missed, state)
    context.varying[code, state.offset] = len(missed) if sizes else 0
    if context.varies and len(missed) >= MOVING - 1:
        moving, moved = context.moving.setdefault((code, state.offset), set()), moved_sizes(missed, state)
        if (
            not moved <= moving
        ):  # what had to be a constant beside constants may vary beside these (a mask, and the cache that it is as long as)
            context.fixed.pop((code, state.offset), None)
        moving |= moved
    varies = context.slow_backend and (sizes or context.budget.began)  # what the callable calls varies with its sizes
    if varies and FLEETING <= len(missed) < config.recompile_limit and not context.budget.allows():
        if not context.budget.told:
            context.budget.told = True
            why = f"sizes change more often than compiling for them pays: it has taken {config.size_seconds:g} seconds and a quarter of the time since (size_seconds)"
            events.emit("fallback", what=code.co_qualname, reason=why)
            log(1, f"{code.co_qualname} runs in eager in some calls: {why}")
        return None
    if len(missed) >= config.recompile_limit:
        known = (code, state.offset) in context.sizes
        verdict = context.sizes[code, state.offset].verdict(sizes, len(missed), context.budget)
        if known and verdict is Verdict.LATER:
            return None
    reason = _explained(missed[0], state) if missed[0].info else None
    where = {"file": code.co_filename, "line": code.co_firstlineno}
    if verdict is not Verdict.NOW:
        worst = keeps_failing([_explained(region, state) for region in missed if region.info])
        often = f"; {subject(worst[0])} differs from {worst[1]} of {len(missed)} variants. {remedy(worst[0])}" if worst is not None else ""
        later = f" Sizes that come {AGAIN} times get variants still, up to {config.size_variants}." if verdict is Verdict.LATER else ""
        warn_once("W011", code=code.co_qualname, **where, limit=config.recompile_limit, reason=f"{reason}{often}{later}")
        return None if later else False
    told = reason.fields() if reason is not None else {}
    events.emit("recompile", function=code.co_qualname, **where, reason=str(reason), variants=len(missed), **told)
    log(1, lambda: f"recompile of {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}): {reason}")
    if missed[0].info:
        guards = missed[0].info["guards"]
        numbers = changed_numbers(guards, state) if context.dynamic is not False else set()
        changed = changed_modules(guards, state) | (numbers if len(numbers) <= MAX_CHANGING else set())
        decisions = changed_decisions(guards, state)
        if decisions:
            context.flips[code, state.offset] += 1
            changed |= decisions if context.flips[code, state.offset] > FLIPS else set()
        context.changing.setdefault((code, state.offset), set()).update(changed)
    if config.error_on_recompile:
        raise UserError("U006", function="error_on_recompile", reason=str(reason))
    return True


def _capture(state: Any, changing: frozenset[Source], policy: Any, missed: Sequence[Any]) -> tuple[SymbolicMachine, RegionPlan]:
    """Attempts until one capture needs no further forced break."""
    forced: dict[int, Forced] = {}
    context: Context = policy.payload
    entry = state.code, state.offset
    moving, fixed = context.moving.get(entry, set()), context.fixed.setdefault(entry, set())
    numbers = {(source, 0) for source in changing}  # as sizes
    may_vary = Varying(functools.partial(wanted, moving | numbers, fixed, context.dynamic)) if context.varies else None
    marks.capturing.active = True
    try:
        whole = context.nopython or any(region.info and region.info["reason"] is None for region in missed)
        return _attempt(state, forced, changing, policy, may_vary, whole)
    finally:
        if may_vary is not None:
            fixed |= may_vary.fixed()
        marks.capturing.active = False


def _joins(outer: Any, inner: Any) -> bool:
    """Whether what was optimised under policy `inner` may be captured as a part of a region under `outer`."""
    a, b = outer.payload, inner.payload
    return inner.compile and a.backend is b.backend and a.dynamic == b.dynamic and a.nopython >= b.nopython


def _attempt(
    state: Any, forced: dict[int, Forced], changing: frozenset[Source], policy: Any, varying: Varying | None, whole: bool
) -> tuple[SymbolicMachine, RegionPlan]:
    joins = functools.partial(_joins, policy)
    back = 1
    for _ in range(MAX_ATTEMPTS):
        machine = SymbolicMachine(
            state, forced, _C.UNBOUND, _C.NULL_, changing, joins, policy.payload.refuted, policy.payload.unknown_sizes, varying
        )
        try:
            ending = machine.capture()
            if ending.reason is not None and whole and machine.varying.settle(None):  # with constants it does not break, or may not
                machine.restart_knowing()
            return machine, plan_region(machine, ending)
        except SizeUnknown as problem:
            machine.release()
            if not machine.varying.settle(problem.what):
                raise
            forced.clear()
        except Restart as again:
            machine.release()
            if machine.varying.again:  # other constants, and other breaks
                forced.clear()
                continue
            if again.reason is not None:
                forget_frames(again.reason)
            previous = forced.get(again.count)
            if previous is None or not previous.interpret:
                forced[again.count] = Forced(again.reason, again.interpret or previous is not None)
                continue
            if again.count <= back:
                raise _Nothing(again.reason) from None
            forced[again.count - back] = Forced(
                again.reason, True
            )  # what cannot be rebuilt there (a value that contains itself) was made before
            back *= 2
    raise MagnetoError("I001", what=f"capture of {state.code.co_qualname} needs more than {MAX_ATTEMPTS} attempts")


def _compile(context: Context, state: Any, policy: Any, missed: Sequence[Any]) -> Any:
    with events.timer("dynamo"):
        machine, plan = _capture(state, _changing(context, state), policy, missed)
    reason = plan.ending.reason
    if context.nopython and plan.ending.value is None and not plan.ending.suspends:
        if reason is not None:
            raise reason
        return None
    if reason is not None:
        forget_frames(reason)
        if reason.id == "B021" and plan.gm is None:  # a long computation without tensors: CPython is faster at it
            events.emit("fallback", what=state.code.co_qualname, reason=str(reason))
            machine.release()
            return _C.SKIP_ENTRY
    if machine.replays.calls:
        events.emit("replay", function=state.code.co_qualname, calls=machine.replays.calls)
    _report(context, plan)
    if context.on_plan is not None:
        context.on_plan(plan)
    graph = _graph_of(context, plan, context.varying.get((state.code, state.offset), 0)) if plan.gm is not None else None
    with events.timer("guards"):
        program = build_program(plan.guards, plan.exports, plan.packed, state)
    plan.info.update(
        name=plan.name, text=plan.text, guards=plan.guards, exports=plan.exports, packed=plan.packed, gm=plan.gm, reason=reason,
        backend=context.backend_name, graph=graph,
    )  # fmt: skip
    if graph is not None and plan.gm is not None and machine.recorder.n_checks:
        graph = atomic(plan.gm, graph)
    if graph is not None and machine.recorder.random_nodes:
        graph = runtime.keeps_random_stream(graph)
    region = finish_region(plan, graph, program)
    machine.release()
    plan.machine = plan.ending = None  # type: ignore[assignment]
    return region


def _changing(context: Context, state: Any) -> frozenset[Source]:
    """Sources of the numbers that become inputs: those that have changed; with `dynamic=True` all numbers in the frame's variables."""
    found = context.changing.get((state.code, state.offset), set())
    if context.dynamic:
        names = slot_names(state.code)
        values = enumerate(zip(names, state.locals, strict=True))
        found = found | {Local(slot, name) for slot, (name, value) in values if type(value) in (int, float)}
    return frozenset(found)


def forget_frames(reason: GraphBreak) -> None:
    """The frames in a break's traceback hold the capture, and with it the objects of this call."""
    reason.__traceback__ = reason.__context__ = reason.__cause__ = None


def _report(context: Context, plan: RegionPlan) -> None:
    reason = plan.ending.reason
    if plan.gm is not None:
        operations = sum(node.op.startswith("call") for node in plan.gm.graph.nodes)
        code = plan.code
        events.emit(
            "graph", name=plan.name, operations=operations, function=code.co_qualname, file=code.co_filename, line=code.co_firstlineno
        )
        if logging(2):
            log(2, f"graph {plan.name}\n{plan.gm.graph}")
        if dumping():
            gm, name = plan.gm, plan.name
            dump(f"{name}_graph", ".py", lambda: standalone(gm, name))
    if reason is not None:
        events.emit("break", id=reason.id, reason=reason.reason, hint=reason.hint, stack=reason.user_stack, function=plan.code.co_qualname)
        log(1, lambda: f"graph break {reason}")
    if logging(3):
        log(
            3,
            "guards\n"
            + "\n".join(
                f"  {row.kind.name} {row.source.text() if row.source else ''} {row.payload!r}  # {row.user_line}" for row in plan.guards
            ),
        )
    if logging(2):
        log(2, plan.text)


def _graph_of(context: Context, plan: RegionPlan, sizes: int) -> Callable[..., Any]:
    """The callable of the plan's graph. `sizes`: of how many there are variants already, if it is one more."""
    gm, info, machine = plan.gm, plan.info, plan.machine
    assert gm is not None
    told = gm.meta["magneto"]
    fleeting = FLEETING <= sizes < config.recompile_limit and "varying" not in told
    told["budget"] = context.budget
    if context.slow_backend and (fleeting or breaks_its_guards(plan.code, plan.guards, machine.effects)):
        events.counter("graphs_for_one_call")
        why = "sizes change from call to call" if fleeting else "its own effects break its guards"
        log(1, lambda: f"{plan.name} is not expected to be called again: {why}. It is compiled if it is")
        return CompiledWhenCalledAgain(
            gm, lambda inputs: _compile_again(context, gm, info, inputs, sizes > 0), context.budget.allows if fleeting else None
        )
    with varying(sizes > 0):
        return _call_backend(context, gm, info, list(plan.example_inputs))


def _compile_again(context: Context, gm: fx.GraphModule, info: dict[str, Any], inputs: list[Any], sizes: bool) -> Callable[..., Any]:
    with events.timer("compile"), no_collection(), varying(sizes):
        return _call_backend(context, gm, info, inputs)


def _call_backend(context: Context, gm: fx.GraphModule, info: dict[str, Any], inputs: list[Any]) -> Callable[..., Any]:
    if not context.slow_backend:
        _LazyGraphModule.force_recompile(gm)  # its own `forward` may be all that the backend wants
    try:
        with events.timer("backend"), events.recording("kernel") as kernels:
            compiled = context.backend(gm, inputs)
        info["kernels"] = [event.fields["source"] for event in kernels if "source" in event.fields]
    except Exception as error:
        if context.nopython:
            raise _BackendFailed(error) from error
        warn_once("W012", backend=context.backend_name, error=f"{type(error).__name__}: {error}")
        text = "".join(traceback.format_exception(error))
        log(1, text)
        events.emit("fallback", what=f"backend {context.backend_name}", reason=repr(error))
        return atomic(gm)
    if not callable(compiled):
        raise UserError("U005", name=context.backend_name, got=type(compiled).__name__)
    return compiled
