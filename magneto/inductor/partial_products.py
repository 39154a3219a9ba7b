"""A weight that is used many times gets few products, and one for its gradient: `join_products(graph)`.

    x[:, 0] @ w, x[:, 1] @ w, ...        becomes      parts of cat(x[:, 0], x[:, 1], ...) @ w
    x1.t() @ y1 + x2.t() @ y2 + ...      becomes      cat(x1, x2, ...).t() @ cat(y1, y2, ...)

Products with few rows leave most of a GPU idle; parts of an input are joined to `ROWS` rows at a time. The steps of a recurrent network written out give a gradient of the whole weight each; all of them would be written, held until they are added up, and read again. Their operands are joined while they
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
from magneto.prims.prim import Prim

aten = torch.ops.aten
ADD, TRANSPOSE, SLICE = PRIMS["add"], PRIMS["transpose"], PRIMS["slice"]
VIEWS = frozenset({SLICE, PRIMS["reshape"], TRANSPOSE})
LEAST = 4  # products
ROWS = 512


def join_products(graph: fx.Graph) -> fx.Graph:
    """A graph with fewer products; `graph` itself when there is nothing to gain."""
    if config.numerics == "eager":
        return graph
    if sum(map(_of_input, graph.nodes)) >= LEAST:
        graph = _rows_joined(copied(graph))
    return _sums_joined(copied(graph)) if sum(map(_partial, graph.nodes)) >= LEAST else graph


# ---- products of parts of an input ---------------------------------------------------------------------------------------


def _of_input(node: fx.Node) -> bool:
    """A product of a view of an input, with a vector as bias if any, that only loops read?"""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs or not all(isinstance(u.target, Prim) for u in node.users):
        return False
    x, meta = node.args[-2], node.meta["val"]
    while isinstance(x, fx.Node) and x.target in VIEWS:
        x = x.args[0]
    shapes = [n.meta["val"].ndim for n in node.all_input_nodes if n not in node.args[-2:]]
    dense = meta.strides == meta.contiguous_strides(meta.shape) and 0 < meta.shape[0] <= ROWS // LEAST
    return bool(isinstance(x, fx.Node) and x.op == "placeholder" and dense and shapes in ([], [1]))


def _rows_joined(graph: fx.Graph) -> fx.Graph:
    alike: dict[Any, list[list[fx.Node]]] = {}
    for node in filter(_of_input, graph.nodes):
        groups = alike.setdefault((node.target, *node.args[:-2], node.args[-1], node.meta["val"].dtype), [[]])
        if sum(n.meta["val"].shape[0] for n in (*groups[-1], node)) > ROWS:
            groups.append([])
        groups[-1].append(node)
    for group in (group for groups in alike.values() for group in groups if len(group) >= LEAST):
        with graph.inserting_before(group[0]):
            target: Any = group[0].target
            x = _cat(graph, group[0], [_again(graph, n.args[-2]) for n in group])
            joined = graph.call_function(target, (*group[0].args[:-2], x, group[0].args[-1]))
            meta, end = group[0].meta["val"], 0
            joined.meta = {**group[0].meta, "val": replace(meta, shape=(sum(n.meta["val"].shape[0] for n in group), meta.shape[1]))}
            for node in group:
                begin, end = end, end + node.meta["val"].shape[0]
                part = graph.call_function(SLICE, (joined, (begin, 0), (end, meta.shape[1]), (1, 1)))
                part.meta = dict(node.meta)
                node.replace_all_uses_with(part)
    drop_dead(graph)
    return graph


def _again(graph: fx.Graph, view: Any) -> fx.Node:
    """A view of an input, made here."""
    return view if view.op == "placeholder" else graph.node_copy(view, lambda n: _again(graph, n))


def _cat(graph: fx.Graph, like: fx.Node, parts: list[fx.Node]) -> fx.Node:
    if len(parts) == 1:
        return parts[0]
    made = graph.call_function(aten.cat.default, (parts, 0))
    meta = parts[0].meta["val"]
    rows = sum(n.meta["val"].shape[0] for n in parts)
    made.meta = {**like.meta, "val": meta.contiguous((rows, meta.shape[1]), meta.dtype, meta.device)}
    return made


# ---- sums of products ----------------------------------------------------------------------------------------------------


def _sums_joined(made: fx.Graph) -> fx.Graph:
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
    x, y = (_cat(graph, first, [_operands(product)[k] for product in group]) for k in range(2))
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
