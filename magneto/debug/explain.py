"""`explain(fn, *args)`: one run of fn, and what became of it: graphs, breaks with their reasons and mends, guards, costs."""

from __future__ import annotations

import copy
import linecache
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.fx

from magneto.api.inspect import inspect
from magneto.api.optimize import optimize
from magneto.base import events
from magneto.base.dataclass import dataclass, field
from magneto.base.errors import CATALOGUE, format_stack
from magneto.base.events import Event
from magneto.base.text import indent, plural

_CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class BreakReason:
    """Why one graph ended early: catalogue id, reason, hint, and the user's stack, innermost frame last."""

    id: str
    reason: str
    hint: str = ""
    user_stack: tuple[tuple[str, int, str], ...] = ()

    @property
    def where(self) -> str:
        """``file:line in function``, or an empty string."""
        if not self.user_stack:
            return ""
        file, line, function = self.user_stack[-1]
        return f"{file}:{line} in {function}"

    @property
    def source(self) -> str:
        """The user's line."""
        return linecache.getline(*self.user_stack[-1][:2]).strip() if self.user_stack else ""

    def __str__(self) -> str:
        parts = [f"[{self.id}] {self.reason}"]
        if self.user_stack:
            parts.append(format_stack(self.user_stack))
        if self.hint:
            parts.append(f"  hint: {self.hint}")
        return "\n".join(parts)

    @classmethod
    def of(cls, event: Event) -> BreakReason:
        fields = event.fields
        id = fields.get("id", "")
        hint = fields.get("hint") or (CATALOGUE[id].hint if id in CATALOGUE else "")
        return cls(id, str(fields.get("reason", "")), hint, tuple(tuple(frame) for frame in fields.get("stack", ())))


@dataclass
class Explanation:
    """What `explain` found. Prints as a readable summary and unpacks as six values:

    explanation (one line), out_guards (text of each guard), graphs (GraphModules), ops_per_graph (targets called by each graph),
    break_reasons (BreakReasons), explanation_verbose (the breaks with the user's stack, and the guards).
    """

    function: str
    graphs: list[torch.fx.GraphModule]
    break_reasons: list[BreakReason]
    out_guards: list[str]
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def ops_per_graph(self) -> list[list[Any]]:
        return [[node.target for node in gm.graph.nodes if node.op in _CALLS] for gm in self.graphs]

    @property
    def explanation(self) -> str:
        ops = sum(map(len, self.ops_per_graph))
        return (
            f"{self.function} produced {plural(len(self.graphs), 'graph')} with {plural(len(self.break_reasons), 'graph break')} "
            f"and {plural(ops, 'op')}"
        )

    @property
    def explanation_verbose(self) -> str:
        parts = [self.explanation]
        if self.break_reasons:
            parts.append("Break reasons:")
            parts += [f"{i}. {indent(str(reason), 3).lstrip()}" for i, reason in enumerate(self.break_reasons, 1)]
        if self.fallbacks:
            parts.append("Runs in eager:\n" + indent("\n".join(self.fallbacks)))
        if self.out_guards:
            parts.append(f"Guards ({len(self.out_guards)}):\n" + indent("\n".join(self.out_guards)))
        return "\n\n".join(parts) + "\n"

    def __iter__(self) -> Iterator[Any]:
        yield self.explanation
        yield self.out_guards
        yield self.graphs
        yield self.ops_per_graph
        yield self.break_reasons
        yield self.explanation_verbose

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        return tuple(self)[i]

    def __str__(self) -> str:
        lines = [self.explanation]
        for i, gm in enumerate(self.graphs):
            lines.append(f"  graph {i}: {_summary_of(gm)}")
        for i, reason in enumerate(self.break_reasons, 1):
            lines.append(f"  break {i}: [{reason.id}] {reason.reason}")
            if reason.where:
                lines.append(f"    at {reason.where}")
            if reason.source:
                lines.append(f"      {reason.source}")
            if reason.hint:
                lines.append(f"    mend: {reason.hint}")
        lines += [f"  in eager: {what}" for what in self.fallbacks]
        lines.append(f"  guards: {len(self.out_guards)}")
        if self.error is not None:
            lines.append(f"  the call raised {type(self.error).__name__}: {self.error}")
        if self.stages:
            slow = sorted(self.stages.items(), key=lambda item: -item[1])[:5]
            lines.append(f"  {self.seconds * 1e3:.0f} ms: " + ", ".join(f"{stage} {seconds * 1e3:.0f} ms" for stage, seconds in slow))
        return "\n".join(lines)

    __repr__ = __str__


def _summary_of(gm: torch.fx.GraphModule) -> str:
    names = [_name(node.target) for node in gm.graph.nodes if node.op in _CALLS]
    inputs = sum(node.op == "placeholder" for node in gm.graph.nodes)
    common = Counter(names).most_common(6)
    shown = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in common)
    more = ", ..." if len(set(names)) > len(common) else ""
    return f"{plural(len(names), 'op')} on {plural(inputs, 'input')}" + (f" ({shown}{more})" if names else "")


def _name(target: Any) -> str:
    return getattr(target, "__name__", None) or str(target)


class _Collector:
    """The backend of explain: keeps each graph as captured and runs it in eager."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(torch.fx.GraphModule(gm, copy.deepcopy(gm.graph)))
        return gm.forward


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Run ``fn(*args, **kwargs)`` once, captured but not compiled, and say what happened. fn's side effects do happen.

    An exception of fn does not propagate; it stands in `.error`, after what was captured up to there. What was compiled for fn before
    is neither used nor changed.
    """
    collector = _Collector()
    optimized = optimize(collector)(fn)
    before = {stage: timing.own for stage, timing in events.timings().items()}
    error: BaseException | None = None
    with events.recording() as seen:
        try:
            optimized(*args, **kwargs)
        except Exception as raised:
            error = raised
    stages = {stage: timing.own - before.get(stage, 0.0) for stage, timing in events.timings().items()}
    return Explanation(
        function=getattr(fn, "__qualname__", None) or type(fn).__name__,
        graphs=collector.graphs,
        break_reasons=[BreakReason.of(event) for event in seen if event.kind == "break"],
        out_guards=_guards_of(optimized),
        seconds=sum(event.fields.get("seconds", 0.0) for event in seen if event.kind == "compile"),
        stages={stage: seconds for stage, seconds in stages.items() if seconds > 0},
        fallbacks=[
            f"{event.fields.get('what') or event.fields.get('graph', '')}: {event.fields.get('reason', '')}"
            for event in seen
            if event.kind == "fallback"
        ],
        error=error,
    )


def _guards_of(optimized: Any) -> list[str]:
    """Every guard of every entry as text, each once, in order."""
    texts: dict[str, None] = {}
    for entry in inspect(optimized):
        for line in str(entry.guards).splitlines():
            if line.strip():
                texts[line.strip()] = None
    return list(texts)
