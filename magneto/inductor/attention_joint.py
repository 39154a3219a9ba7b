"""Attention that a program writes out and trains: `fuse_joint_attention(graph)`, forward and backward as one call each.

    weights = softmax(q @ k.t() * scale + bias), weights @ v, and their gradients      becomes      the calls that scaled_dot_product_attention makes, forward and backward

No weights are kept between the two. What flows back must be autograd's formulas, through the same factor, with nobody else reading it (a bias that learns does).
What kernels would not train as the formula does, queries that may see no key and masks of large numbers, is in `attention_rows.py`. Otherwise as in `attention.py`.
"""

from __future__ import annotations

import operator
from math import isclose, prod
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.joint import JointGraph, trace_joint
from magneto.aot_autograd.trace import drop_dead
from magneto.base.dataclass import dataclass, replace
from magneto.base.varying import any_size, sizes_vary
from magneto.graph.append import append_copy
from magneto.graph.attention import ATTENTION
from magneto.graph.narrow import narrow_types
from magneto.inductor.attention import Masks, Operands, is_fused, operands, shown, traced
from magneto.inductor.rewrite import Adding, copied, laid_out
from magneto.inductor.scores import Known, only_brings, order_of, scores_behind

aten = torch.ops.aten
LARGE = 1 << 18  # scores of a head, from which on the CPU's kernels are faster with float32 (their backward in other types never is)
TURNED = [0, 2, 1]


@dataclass(frozen=True, slots=True)
class Flow:
    """What flows back through an attention: the result's gradient, and the products that give those of queries, of keys' transpose and of values."""

    gradient: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    first: fx.Node  # product with the gradient
    readers: frozenset[fx.Node]  # of weights, beside the forward
    scale: float


def fuse_joint_attention(graph: fx.Graph) -> fx.Graph:
    """A joint graph with attention as calls; `graph` itself where there is none."""
    known = Known()
    if not any(_pays(node) and _flow(node, known) for node in graph.nodes):
        return graph
    made, known, masks, done = copied(graph), Known(), Masks(), False
    for node in list(made.nodes):
        flow = _flow(node, known) if _pays(node) else None
        if flow is not None:
            done = _replace(made, node, flow, known, masks) or done
    if done:
        drop_dead(made)
    return made if done else graph


def _replace(made: fx.Graph, node: fx.Node, flow: Flow, known: Known, masks: Masks) -> bool:
    known.apart = flow.readers
    scores = scores_behind(node, known)
    if scores is None or not _transposes(flow.key.args[0], scores.first) or not _transposes(flow.query.args[1], scores.second):
        return False
    if not isclose(scores.scale, flow.scale):
        return False
    with made.inserting_before(node):
        add = Adding(made, node)
        given = operands(add, node, scores, known, masks, True)
        if given is None or (given.mask.bias is not None and given.fits):
            return False
        rows = given.mask.rows
        if rows is not None:
            given = replace(given, query=rows.query(add, given.query))
        joint = traced(lambda plain, tensors: trace_joint(plain, _needing_gradients(tensors)), given)
        if not is_fused(joint.graph):
            return False
        env = dict(zip(joint.graph.find_nodes(op="placeholder"), given.tensors, strict=False))
        _append(add, [n for n in joint.graph.nodes if n.meta["stage"] == "forward"], env, given)
        out = env[joint.results[0]]
        result = shown(add, out if rows is None else rows.out(add, out), node.meta["val"].shape)
    with made.inserting_before(min(flow.first, flow.value)):
        _flow_back(Adding(made, flow.value), joint, flow, env, given)
    node.replace_all_uses_with(result)
    return True


def _needing_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.requires_grad_(k < 3) for k, tensor in enumerate(tensors)]


def _flow_back(add: Adding, joint: JointGraph, flow: Flow, env: dict[fx.Node, fx.Node], given: Operands) -> None:
    (tangent,), gradient = joint.tangents, flow.gradient
    flowing, rows = add(aten.view.default, _contiguous(add, gradient), list(tangent.meta["val"].shape)), given.mask.rows
    if rows is not None:
        flowing = rows.gradient(add, flowing)
        env.update((sums, rows.sums(add, env[sums])) for sums in _sums(joint.graph))
    env[tangent] = laid_out(add, flowing, tangent.meta["val"])
    _append(add, [n for n in joint.graph.nodes if n.meta["stage"] != "forward"], env, given)
    query, key, value = (env[found] for found in joint.gradients[:3] if found is not None)
    if rows is not None:
        query, key, value = rows.gradients(add, query, key, value)
    key = add(aten.transpose.int, key, 2, 3)
    for one, other in ((query, flow.query), (key, flow.key), (value, flow.value)):
        other.replace_all_uses_with(shown(add, one, other.meta["val"].shape))


def _sums(graph: fx.Graph) -> list[fx.Node]:
    """The logarithms of sums that kernels answer beside the result."""
    return [n for n in graph.nodes if n.target is operator.getitem and n.args[1] == 1 and n.meta["stage"] == "forward"]


def _append(add: Adding, nodes: list[fx.Node], env: dict[fx.Node, fx.Node], given: Operands) -> None:
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:  # ours tells rows of nothing but NaN
            env[node] = add(ATTENTION, given.query, given.key, given.value, given.mask.bias, given.mask.causal, given.scale)
        else:
            env[node] = append_copy(add.graph, node, env.__getitem__)
            env[node].meta.update(add.meta)


def _contiguous(add: Adding, node: fx.Node) -> fx.Node:
    return node if node.meta["val"].is_contiguous() else add(aten.clone.default, node, memory_format=torch.contiguous_format)


def _pays(node: fx.Node) -> bool:
    if node.target is not aten.bmm.default:
        return False
    meta = node.meta["val"]
    if meta.device.type != "cpu":
        return not torch.are_deterministic_algorithms_enabled()  # kernels add up gradients of queries as they come
    long = prod(node.args[0].meta["val"].shape[1:]) >= LARGE  # type: ignore[union-attr]
    return long and meta.dtype in (torch.float32, *narrow_types()) and not any_size() and not sizes_vary()


# ---- what flows back ---------------------------------------------------------------------------------------------------


def _flow(node: fx.Node, known: Known) -> Flow | None:
    """The formulas of autograd for `node`, if it multiplies weights by values."""
    if node.target is not aten.bmm.default:
        return None
    weights, values = node.args
    turned = _only(user for user in weights.users if order_of(user) == TURNED)  # type: ignore[union-attr]
    value = None if turned is None else _only(turned.users)
    if value is None or value.target is not aten.bmm.default or value.args[0] is not turned:
        return None
    at, gradient = weights, value.args[1]
    while only_brings(at):
        at = at.args[0]
    inner = _only(u for u in at.users if u.target is aten._softmax_backward_data.default and u.args[1] is at)  # type: ignore[union-attr]
    if inner is None:
        return None
    first = inner.args[0]
    while only_brings(first) and len(first.users) == 1:
        first = first.args[0]
    if not _product_with(first, gradient, values):
        return None
    end = _through_scores(inner, known)
    products = _of_queries_and_keys(end[0]) if end is not None else None
    if end is None or products is None:
        return None
    return Flow(gradient, *products, value, first, frozenset({turned, inner}), end[1])  # type: ignore[arg-type]


def _only(nodes: Any) -> Any:
    found = list(nodes)
    return found[0] if len(found) == 1 else None


def _product_with(node: Any, gradient: Any, values: Any) -> bool:
    """The gradient times the transpose of the values, which one reader has?"""
    if not isinstance(node, fx.Node) or node.target is not aten.bmm.default or len(node.users) != 1:
        return False
    first, second = node.args
    return first is gradient and _transposes(second, values)


def _transposes(one: Any, other: Any) -> bool:
    """Is either made by transposing the other's matrices?"""
    return any(order_of(x) == TURNED and x.args[0] is y for x, y in ((one, other), (other, one)))


def _through_scores(node: fx.Node, known: Known) -> tuple[fx.Node, float] | None:
    """The gradient of the product of queries and keys, and the factor on the way there."""
    factor = 1.0
    while len(node.users) == 1:
        (user,) = node.users
        name, args = str(user.target).removeprefix("aten."), user.args
        by: float | None = 1.0
        if name in ("mul.Tensor", "div.Tensor") and args[0] is node:
            by = known.number(args[1])
            by = by if by is None or name == "mul.Tensor" else 1 / by
        elif name in ("masked_fill.Scalar", "where.self", "where.ScalarOther", "where.ScalarSelf"):
            others = [x for x in args[-2:] if x is not node] if name != "masked_fill.Scalar" else [args[2]]
            by = 1.0 if node in args and all(known.number(x) == 0 for x in others) else None
        elif not only_brings(user):
            by = None
        if by is None:
            return None
        node, factor = user, factor * by
    return node, factor


def _of_queries_and_keys(scores: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two products that read the gradient of the scores: `scores @ k`, `q.t() @ scores`."""
    readers = list(scores.users)
    query = _only(u for u in readers if u.target is aten.bmm.default and u.args[0] is scores)
    key = _only(u for u in readers if u.target is aten.bmm.default and u.args[1] is scores)
    return None if query is None or key is None or len(readers) != 2 or query is key else (query, key)
