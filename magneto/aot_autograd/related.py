"""Which results are computed from other tensors that the caller gets, as autograd has recorded it while the graph was traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from magneto.aot_autograd.signature import Alias, Input, Link, Output, Result, Signature


def find_links(
    carriers: Mapping[int, torch.Tensor], signature: Signature, values: Sequence[Any], tensors: Sequence[Any]
) -> tuple[tuple[Output, ...], tuple[Link, ...]]:
    """The outputs, with `via` of views that are made of others, and the links in the order in which they are made. `carriers`: the traced tensors whose gradients are the results';
    `values`: what the captured graph returned; `tensors`: what it was given."""
    recorded = {m.index: m.source for m in signature.mutations if not m.under_no_grad}
    shown: dict[int, Output] = {~index: Input(index) for index in recorded}
    seen = {_edge(tensors[index]): ~index for index in recorded}
    for place, (value, output) in enumerate(zip(values, signature.outputs, strict=True)):
        if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None and not isinstance(output, Input):
            shown[seen.setdefault(_edge(value), place)] = output
    if len(seen) < 2:
        return signature.outputs, ()
    outputs = tuple(_chained(k, signature.outputs, values, seen) for k in range(len(values)))
    shown.update((place, outputs[place]) for place in shown if place >= 0)
    sources = {source.index for source in recorded.values() if isinstance(source, Result)}
    earlier = {index: _earlier(carrier, seen) for index, carrier in carriers.items()}
    depth: dict[int, tuple[bool, int]] = {}

    def base(place: int) -> tuple[int | None, bool]:
        """The result that is made before this output, and whether an input is written before."""
        output = shown[place]
        found = output.base if isinstance(output, Alias) else output
        late = isinstance(found, Input) and found.index in recorded
        found = recorded[found.index] if late else found  # type: ignore[union-attr]
        return (found.index if isinstance(found, Result) else None), late

    def visit(index: int) -> tuple[bool, int]:
        """Whether the result is linked after the inputs are written, and how many links lie before it."""
        if index not in depth:
            depth[index] = (False, 0)
            below = [(late, (False, 0) if before is None else visit(before)) for before, late in map(base, earlier.get(index, ()))]
            late = any(late or after for late, (after, _) in below)
            if late and index in sources:  # it is written before what it is computed from is there
                earlier[index] = {}
            elif below:
                depth[index] = (late, 1 + max(deep for _, (_, deep) in below))
        return depth[index]

    groups: dict[tuple[bool, int], list[int]] = {}
    for index in earlier:
        when = visit(index)
        if earlier[index]:
            groups.setdefault(when, []).append(index)
    links: list[Link] = []
    for when, results in [(when, one) for when, some in sorted(groups.items()) for one in _apart(some, earlier)]:
        found = {place: None for index in results for place in earlier[index]}
        watched, todo = dict(found), list(found)
        while todo:
            place = todo.pop()
            one, of = values[place] if place >= 0 else tensors[~place], base(place)[0]
            new = {*_earlier(one, seen), *(k for link in links if of in link.results for _, k in link.watched)} - watched.keys()
            watched.update(dict.fromkeys(new))
            todo += new
        links.append(Link(tuple(results), tuple((shown[k], k) for k in found), tuple((shown[k], k) for k in watched), when[0]))
    return outputs, tuple(links)


def _apart(results: Sequence[int], earlier: Mapping[int, Mapping[int, None]]) -> list[list[int]]:
    """The results, those together that are computed from one tensor: a link leads from each of its results to what the others are computed from."""
    found: list[list[int]] = []
    for index in results:
        tied = [one for one in found if any(earlier[index].keys() & earlier[k].keys() for k in one)]
        found = [one for one in found if one not in tied] + [[*(k for one in tied for k in one), index]]
    return found


def _edge(tensor: torch.Tensor) -> tuple[Any, int]:
    return tensor.grad_fn, tensor.output_nr


def _earlier(carrier: torch.Tensor, seen: Mapping[Any, int]) -> dict[int, None]:
    """Of the tensors `seen` those that the carrier is computed from, with no other of them in between."""
    found: dict[int, None] = {}
    todo, known = [carrier.grad_fn], {carrier.grad_fn}
    while todo:
        for edge in getattr(todo.pop(), "next_functions", ()):
            if edge in seen:
                found.setdefault(seen[edge])
            elif edge[0] is not None and edge[0] not in known:
                known.add(edge[0])
                todo.append(edge[0])
    return found


def _chained(k: int, outputs: Sequence[Output], values: Sequence[Any], seen: Mapping[Any, int]) -> Output:
    """Output `k`; when it is a view of another output: made of that one."""
    output = outputs[k]
    if isinstance(output, Alias) and not output.made and not output.detached and _edge(values[k]) in seen:
        for place in _earlier(values[k], seen):
            other = outputs[place] if place >= 0 else None
            if isinstance(other, Alias) and (other.base, other.made, other.detached) == (output.base, "", False):
                if other.steps and other.steps == output.steps[: len(other.steps)]:
                    return replace(output, via=place)
    return output
