"""The callable round a compiled functional graph: write-backs, aliases and constants, as flat generated Python.

Where there is nothing to do, the compiled graph itself is the callable.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto import _C
from magneto.aot_autograd.links import linked
from magneto.aot_autograd.signature import Alias, Input, Mutation, Output, Result, Signature, Value
from magneto.aot_autograd.spent import spent
from magneto.aot_autograd.views import METHODS, ViewStep, aten
from magneto.base.text import compile_source
from magneto.graph.layout import laid_out

Compiled = Callable[..., Any]


def wrap(
    compiled: Compiled, signature: Signature, constants: Sequence[torch.Tensor] = (), fallback: Compiled | None = None, name: str = "graph"
) -> Compiled:
    """What the caller of the captured graph calls. `fallback` runs the captured graph in eager, for a call in which inputs share memory."""
    if signature.trivial:
        return compiled
    return build(Writer(signature).text(), compiled, constants, fallback, name)


def build(
    source: tuple[str, dict[str, Any]], compiled: Compiled, constants: Sequence[torch.Tensor], fallback: Compiled | None, name: str
) -> Compiled:
    text, namespace = source
    namespace.update(graph=compiled, fallback=fallback, set_grad_enabled=torch._C._set_grad_enabled)
    namespace.update({f"c{i}": constant for i, constant in enumerate(constants)})
    result: Compiled = compile_source(f"wrapper of {name}", text, namespace)["wrapper"]
    return result


class Writer:
    """Writes the wrapper's source. Inputs are `a0, a1, ...`, constants `c0, ...`, results of the graph `r0, ...`."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.namespace: dict[str, Any] = {}
        self.lines: list[str] = []
        self.several: dict[str, tuple[str, set[int]]] = {}
        self.views: dict[Any, str] = {}

    def name_of(self, index: int) -> str:
        """Input `index` of the functional graph: the caller's, or a constant."""
        n = self.signature.n_inputs
        return f"a{index}" if index < n else f"c{index - n}"

    def text(self) -> tuple[str, dict[str, Any]]:
        s = self.signature
        arguments = [f"a{i}" for i in range(s.n_inputs)]
        self.lines = [f"def wrapper({', '.join(arguments)}):"]
        self.memory_check()
        passed = ", ".join([*arguments, *(f"c{i}" for i in range(s.n_constants))])
        if s.n_results:
            self.add(f"{''.join(f'r{i}, ' for i in range(s.n_results))}= graph({passed})")
        elif s.effects:
            self.add(f"graph({passed})")
        behind = len(self.lines)
        for index, strides in s.gaps:
            self.namespace["laid_out"] = laid_out
            self.add(f"r{index} = laid_out(r{index}, {strides})")
        self.links(False)
        self.write_backs()
        if not any(mutation.direct for mutation in s.mutations):
            behind = len(self.lines)
        self.links(True)
        self.add(f"return {self.returned()}")
        if s.mutations:  # when this fails, the interpreter must not run the frame again: it would write once more
            lines = [f"    {line}" for line in self.lines[behind:]]
            self.lines[behind:] = [
                "    try:",
                *lines,
                "    except Exception as error:",
                "        error.magneto_applied = True",
                "        raise",
            ]
        return "\n".join(self.lines) + "\n", self.namespace

    def add(self, line: str) -> None:
        self.lines.append("    " + line)

    def memory_check(self) -> None:
        """A written input that shares memory with another input is not what was compiled: that call runs in eager. Inputs that lie where they lay are apart."""
        apart = self.signature.apart
        if apart is None or not apart.written:
            return
        self.namespace.update(apart=lambda where: apart.holds(tuple(array("q", where))), seen=[b""], addresses=_C.addresses)
        self.add(f"where = addresses(({''.join(f'a{i}, ' for i in apart.inputs)}))")
        self.add("if where != seen[0]:")
        self.add("    if not apart(where):")
        self.add(f"        return fallback({', '.join(f'a{i}' for i in range(self.signature.n_inputs))})")
        self.add("    seen[0] = where")

    def write_backs(self) -> None:
        """Several plain write-backs of one kind become one call."""
        together: dict[bool, list[Mutation]] = {}
        for mutation in self.signature.mutations:
            plain = mutation.under_no_grad or not self.signature.training
            if mutation.direct:
                continue
            if plain and isinstance(mutation.source, Result):
                together.setdefault(mutation.counted, []).append(mutation)
            else:
                self.write_back(mutation)
        written = [self.name_of(m.index) for m in self.signature.mutations if m.direct and m.counted]
        if written:
            self.namespace["increment_version"] = torch._C._increment_version
            self.add(f"increment_version([{', '.join(written)}])")
        for counted, group in together.items():
            if len(group) < 3:
                for mutation in group:
                    self.write_back(mutation)
                continue
            self.namespace["foreach_copy_"] = torch._foreach_copy_
            targets = ", ".join(self.name_of(m.index) + ("" if counted else ".data") for m in group)
            self.silently(counted, f"foreach_copy_([{targets}], [{', '.join(self.base(m.source) for m in group)}])")

    def silently(self, counted: bool, line: str) -> None:
        """A write that eager made with grad mode off. (`.data` is out of autograd's sight anyway.)"""
        if self.signature.training and counted:
            self.add("set_grad_enabled(False)")
            self.add("try:")
            self.add("    " + line)
            self.add("finally:")
            self.add("    set_grad_enabled(True)")
        else:
            self.add(line)

    def write_back(self, mutation: Mutation) -> None:
        target = self.name_of(mutation.index) + ("" if mutation.counted else ".data")
        line = f"{target}.copy_({self.base(mutation.source)})"
        if mutation.under_no_grad:
            self.silently(mutation.counted, line)
        else:
            self.add(line)

    def base(self, base: Result | Input) -> str:
        return f"r{base.index}" if isinstance(base, Result) else self.name_of(base.index)

    def returned(self) -> str:
        """The returned expression; equal outputs are one object."""
        parts = []
        for k, output in enumerate(self.signature.outputs):
            parts.append(self.visible(output))
            if k in self.signature.spent:
                self.namespace["spent"] = spent
                parts[-1] = f"spent({parts[-1]})"
            if k in self.signature.leaves:
                parts[-1] = f"{parts[-1]}.requires_grad_()"
        if self.signature.single:
            return parts[0]
        return "(" + "".join(part + ", " for part in parts) + ")"

    def visible(self, output: Output) -> str:
        if not isinstance(output, Alias):
            return self.plain(output)
        key = (output.base, output.number)
        if key not in self.views:
            self.views[key] = f"v{len(self.views)}"
            self.silently(output.made == "silent", f"{self.views[key]} = {self.alias(output)}")
        return self.views[key]

    def links(self, late: bool) -> None:
        for k, link in enumerate(self.signature.links):
            if link.late is late:
                self.namespace[f"link{k}"] = linked(link)
                earlier, watched = ([self.visible(output) for output, _ in some] for some in (link.earlier, link.watched))
                results = [f"r{i}" for i in link.results]
                self.add(f"{', '.join(results)}, = link{k}(({', '.join(watched)},), {', '.join(results + earlier)})")

    def plain(self, output: Output) -> str:
        if isinstance(output, Value):
            return self.constant(output.value)
        assert isinstance(output, (Result, Input))
        return self.base(output)

    def alias(self, output: Alias) -> str:
        text = base = self.base(output.base)
        among = output.made == "among"
        steps = output.steps
        if output.via >= 0:
            before = self.signature.outputs[output.via]
            assert isinstance(before, Alias)
            text, steps = self.visible(before), steps[len(before.steps) :]
        for step in steps:
            text = self.one_of_several(text, step.among) if among and step.among else self.step(text, step, base)
        if among and not output.steps:
            return f"{base}.chunk(1)[0]"
        if among and not any(step.among for step in output.steps):
            self.namespace.update(as_one_of_several=as_one_of_several)
            return f"as_one_of_several({text})"
        if output.made == "apart":
            return text + ".data"
        if output.made == "silent":
            return text if steps else f"{text}.view_as({text})"
        if output.detached and (self.signature.training or not output.steps or isinstance(output.base, Input)):
            return text + ".detach()"
        return text if steps else f"{text}.view_as({text})"

    def one_of_several(self, subject: str, among: tuple[Any, tuple[Any, ...], int]) -> str:
        """A result of `unbind` or `split`; each result of one call serves once, as outputs are objects of their own."""
        op, args, index = among
        call = self.step(subject, ViewStep(op, args), subject)
        name, served = self.several.get(call, ("", {index}))
        if index in served:
            name, served = self.several[call] = f"s{len(self.lines)}", set()
            self.add(f"{name} = {call}")
        served.add(index)
        return f"{name}[{index}]"

    def step(self, subject: str, step: ViewStep, base: str) -> str:
        """One view step on a real tensor."""
        method = METHODS.get(step.op)
        if method is not None:
            return subject + method.format(*(self.constant(argument) for argument in step.args))
        if step.op is aten.as_strided.default:
            size, stride, offset = step.args
            place = f"{base}.storage_offset()" + (f" + {offset}" if offset else "")
            return f"{subject}.as_strided({size}, {stride}, {place})"
        name = "op_" + str(step.op).replace(".", "_")
        self.namespace[name] = step.op
        return f"{name}({', '.join([subject, *(self.constant(argument) for argument in step.args)])})"

    def constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool, str) or (type(value) in (list, tuple) and all(type(v) is int for v in value)):
            return repr(value)
        name = f"k{len(self.namespace)}"
        self.namespace[name] = value
        return name


def as_one_of_several(view: torch.Tensor) -> torch.Tensor:
    """A view that eager makes as one of several results of an operation, made alone."""
    autograd: Any = torch._C._autograd
    autograd._set_creation_meta(view, autograd.CreationMeta.MULTI_OUTPUT_NODE)
    return view
