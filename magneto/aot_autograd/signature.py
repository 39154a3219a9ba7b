"""What the compiled functional graph's inputs and outputs mean to the caller. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.aot_autograd.views import ViewStep
from magneto.base.dataclass import dataclass, replace


@dataclass(frozen=True, slots=True)
class Result:
    """Output `index` of the functional graph, as it is."""

    index: int


@dataclass(frozen=True, slots=True)
class Input:
    """Input `index`: the very object the caller passed."""

    index: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A view of an input or of a result: `steps` applied to `base`. `detached`: eager's result does not require grad though the base does.

    `made`: as what autograd knows the view: "among" several results of one operation, "silent" (in no_grad),
    neither of which the program may write; "apart" (`.data`) writes do not raise the base's version counter. `via`: the output, a view on the way to this one, that it is made of."""

    base: Result | Input
    steps: tuple[ViewStep, ...]
    detached: bool = False
    made: str = ""
    number: int = 0  # two user outputs are the same object exactly when everything here is equal
    via: int = -1


@dataclass(frozen=True, slots=True)
class Value:
    """Not a tensor: returned as it is."""

    value: Any


Output = Result | Input | Alias | Value


@dataclass(frozen=True, slots=True)
class Mutation:
    """Input `index` receives the numbers of `source` (a result, or another input that is not written).

    `counted`: eager raises the input's version counter; `under_no_grad`: autograd has not seen eager's write (grad mode off, `.data`, a detached alias). `direct`: the compiled graph has written
    the input's memory itself.
    """

    index: int
    source: Result | Input
    counted: bool = True
    under_no_grad: bool = False
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """The `results` are computed from what the caller gets as `earlier` (with its place among the captured graph's outputs, or -1: an input that is written), with nothing of it in between.
    `watched`: these, and what they are computed from. `late`: after the inputs are written."""

    results: tuple[int, ...]
    earlier: tuple[tuple[Output, int], ...]
    watched: tuple[tuple[Output, int], ...]
    late: bool = False


@dataclass(frozen=True, slots=True)
class Apart:
    """None of the inputs `written` may share memory with another of `inputs`, which reach over `spans` bytes each. `trusted`: written inputs that are
    apart from each other as long as the caller does nothing odd (parameters)."""

    inputs: tuple[int, ...]
    spans: tuple[int, ...]
    written: frozenset[int]
    trusted: frozenset[int] = frozenset()

    def holds(self, starts: tuple[int, ...]) -> bool:
        """Whether they are apart, `starts` being the inputs' first bytes."""
        reach = reach_written = 0
        for start, index, span in sorted(zip(starts, self.inputs, self.spans, strict=True)):
            if not span:
                continue
            writes = index in self.written
            if start < (reach if writes else reach_written):
                return False
            reach = max(reach, start + span)
            if writes:
                reach_written = max(reach_written, start + span)
        return True


@dataclass(frozen=True, slots=True)
class Signature:
    """The functional graph takes `n_inputs` inputs of the caller and then `n_constants` constants, and returns `n_results` tensors.

    `single`: the captured graph returned one value instead of a tuple. `training`: results may require grad, so that aliases and write-backs
    are recorded by autograd. `effects`: the graph must be called even for no results (it draws random numbers). `spent`: outputs that require grad
    and whose backward has run inside already. `leaves`: outputs that the graph has made to gather gradients. `gaps`: results that the caller gets laid out with these strides, which leave gaps.
    `links`: results that are computed from others.
    """

    n_inputs: int
    n_constants: int
    n_results: int
    outputs: tuple[Output, ...]
    mutations: tuple[Mutation, ...] = ()
    single: bool = False
    training: bool = False
    effects: bool = True
    apart: Apart | None = None
    spent: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    gaps: tuple[tuple[int, tuple[int, ...]], ...] = ()
    links: tuple[Link, ...] = ()

    def written_directly(self, results: frozenset[int]) -> Signature:
        """For a compiled graph that writes these results into the inputs themselves: their order is no longer the program's, so nothing is trusted."""
        mutations = tuple(
            replace(m, direct=True) if isinstance(m.source, Result) and m.source.index in results else m for m in self.mutations
        )
        apart = None if self.apart is None else replace(self.apart, written=self.apart.written | self.apart.trusted, trusted=frozenset())
        return replace(self, mutations=mutations, apart=apart)

    @property
    def direct(self) -> frozenset[int]:
        """The results that the compiled graph has written into inputs."""
        return frozenset(m.source.index for m in self.mutations if m.direct and isinstance(m.source, Result))

    @property
    def trivial(self) -> bool:
        """Whether the compiled functional graph already is what the caller wants."""
        return (
            not self.mutations
            and not self.n_constants
            and not self.single
            and not self.spent
            and not self.leaves
            and not self.gaps
            and not self.links
            and self.outputs == tuple(Result(i) for i in range(self.n_results))
        )


def written_results(signature: Signature, inputs: Sequence[Any]) -> dict[int, int]:
    """Results that serve for nothing but to be copied into an input, out of autograd's sight, with that input."""
    shown = [o.base if isinstance(o, Alias) else o for o in signature.outputs]
    used = {base.index for base in shown if isinstance(base, Result)}
    found: dict[int, int] = {}
    for mutation in signature.mutations:
        plain = mutation.under_no_grad or not signature.training
        if isinstance(mutation.source, Result) and plain and mutation.source.index not in used:
            tensor = inputs[mutation.index] if mutation.index < len(inputs) else None
            if isinstance(tensor, torch.Tensor) and tensor.is_inference():
                continue  # writing it may raise
            if mutation.source.index in found:  # two inputs get the same numbers
                used.add(mutation.source.index)
                del found[mutation.source.index]
                continue
            found[mutation.source.index] = mutation.index
    return found
