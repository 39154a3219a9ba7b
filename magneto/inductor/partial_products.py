"""A weight that is used many times gets one product for its gradient: `join_products(graph)`.

    x1.t() @ y1 + x2.t() @ y2 + ...      becomes      cat(x1, x2, ...).t() @ cat(y1, y2, ...)

The steps of a recurrent network written out give a gradient of the whole weight each; all of them would be written, held until they are added up, and read again. Their operands are joined while they
take no more memory than two results; the products of several such groups are added up by the library (`addmm`). Sums become exacter, in another order than eager's. On GPUs, where it was counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.trace import drop_dead
from magneto.base.flags import config
from magneto.inductor.rewrite import copied
from magneto.prims import PRIMS

aten = torch.ops.aten
ADD, TRANSPOSE = PRIMS["add"], PRIMS["transpose"]
LEAST = 4  # products


def join_products(graph: fx.Graph) -> fx.Graph:
    """A graph with fewer products; `graph` itself when there is nothing to gain."""
    if config.numerics == "eager" or sum(map(_partial, graph.nodes)) < LEAST:
        return graph
    made = copied(graph)
    places = {node: k for k, node in enumerate(made.nodes)}
    for node in list(made.nodes):
        if node.target is ADD and not (len(node.users) == 1 and next(iter(node.users)).target is ADD):
            terms = list(_terms(node, node))
            products = sorted((n for n in terms if _partial(n)), key=places.__getitem__)
            if len(products) >= LEAST:
                _join(made, node, products, [n for n in terms if not _partial(n)], places)
    drop_dead(made)
    return made


def _partial(node: Any) -> bool:
    """A product over the rows of both operands, which are smaller than the result, that is added to something and not read otherwise?"""
    if not isinstance(node, fx.Node) or node.target is not aten.mm.default or [user.target for user in node.users] != [ADD]:
        return False
    a, b = node.args
    if a.target is not TRANSPOSE or a.args[1] != (1, 0):  # type: ignore[union-attr]
        return False
    meta, rows = node.meta["val"], b.meta["val"].shape[0]  # type: ignore[union-attr]
    return bool(meta.dtype.is_floating_point and rows * sum(meta.shape) <= meta.numel)


def _terms(node: Any, root: fx.Node) -> Iterator[Any]:
    """What is added up, where the sums so far have no other reader, nor another shape or type."""
    same = isinstance(node, fx.Node) and (m := node.meta["val"], r := root.meta["val"]) and (m.shape, m.dtype) == (r.shape, r.dtype)
    if same and node.target is ADD and (node is root or len(node.users) == 1):
        for arg in node.args:
            yield from _terms(arg, root)
    else:
        yield node


def _join(graph: fx.Graph, root: fx.Node, products: list[fx.Node], others: list[Any], places: dict[fx.Node, int]) -> None:
    groups: list[list[fx.Node]] = []
    total = size = 2 * root.meta["val"].numel
    for product in products:
        rows = sum(n.meta["val"].numel for n in _operands(product))
        if total + rows > size:
            groups, total = [*groups, []], 0
        groups[-1].append(product)
        total += rows
    found: fx.Node | None = None
    for group in groups:
        after = max(group, key=places.__getitem__)
        with graph.inserting_before(after.next):
            found = _product(graph, group, found)
        places[found] = places[after]
    result = found
    with graph.inserting_before(root):
        for other in others:
            result = graph.call_function(ADD, (result, other))
            result.meta = dict(root.meta)
    assert result is not None
    root.replace_all_uses_with(result)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    return product.args[0].args[0], product.args[1]  # type: ignore[union-attr,return-value]


def _product(graph: fx.Graph, group: list[fx.Node], before: fx.Node | None) -> fx.Node:
    """The products of a group, added to those before."""
    first = group[0]

    def joined(parts: list[fx.Node]) -> fx.Node:
        if len(parts) == 1:
            return parts[0]
        made = graph.call_function(aten.cat.default, (parts, 0))
        meta = parts[0].meta["val"]
        rows = sum(n.meta["val"].shape[0] for n in parts)
        made.meta = {**first.meta, "val": meta.contiguous((rows, meta.shape[1]), meta.dtype, meta.device)}
        return made

    x, y = (joined([_operands(product)[k] for product in group]) for k in range(2))
    turned = graph.call_function(TRANSPOSE, (x, (1, 0)))
    meta = x.meta["val"]
    turned.meta = {**first.meta, "val": replace(meta, shape=meta.shape[::-1], strides=meta.strides[::-1])}
    made = (
        graph.call_function(aten.mm.default, (turned, y))
        if before is None
        else graph.call_function(aten.addmm.default, (before, turned, y))
    )
    made.meta = dict(first.meta)
    return made


__all__ = ["join_products"]
