"""The table of prims: complete, and its torch, numpy and shape meanings agree."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from magneto.graph import TensorMeta
from magneto.prims import PRIMS, Prim, prims

CONTRACT = Path(__file__).resolve().parents[2] / "docs" / "design" / "interfaces.md"


def contract_names() -> set[str]:
    """The names that interfaces.md lists under "prims"."""
    section = CONTRACT.read_text(encoding="utf-8").split("\n## prims")[1].split("\n## ")[0]
    names: set[str] = set()
    for line in section.splitlines():
        head, _, rest = line.partition(":")
        if re.match(r"- (unary|binary|ternary|reductions|shape|index)", head):
            text = re.sub(r"\([^)]*\)", " ", rest if "reductions" not in head else rest.split("(sum of half")[0])
            names |= {word for word in re.findall(r"[a-z_0-9]+", text)} & (set(PRIMS) | set(text.split()))
    return names


def test_every_name_of_the_contract_is_a_prim() -> None:
    missing = contract_names() - set(PRIMS) - {"by", "two", "pass", "mean", "also", "embedding", "var,", "-", "non", "negative"}
    assert not {name for name in missing if name.isidentifier() and name not in ("Welford", "without", "keepdim")}


def test_categories_have_the_contracts_members() -> None:
    by_category = {c: {p.name for p in PRIMS.values() if p.category == c} for c in {p.category for p in PRIMS.values()}}
    assert by_category["ternary"] == {"where"} and by_category["convert"] == {"convert_element_type"}
    assert by_category["reduction"] == {"sum", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "var"}
    assert by_category["shape"] == {"broadcast_in_dim", "reshape", "transpose", "slice", "flip", "cat", "pad"}
    assert by_category["index"] == {"iota", "full", "index_select", "gather"} and by_category["window"] == {"window_max", "window_argmax"}
    assert len(by_category["unary"]) == 35 and len(by_category["binary"]) == 22


def test_prims_are_found_and_copied_by_name() -> None:
    assert prims.add is PRIMS["add"] and prims.add.__name__ == "add" and repr(prims.add) == "prims.add"
    assert pickle.loads(pickle.dumps(prims.add)) is prims.add
    assert copy.deepcopy(prims.add) is prims.add
    with pytest.raises(AttributeError, match="no prim 'nothing'"):
        prims.nothing  # noqa: B018


X = torch.tensor([[0.5, -1.5, 2.0], [3.25, -0.0, 0.75]])
Y = torch.tensor([[1.5, 2.0, -0.5], [-2.0, 3.0, 0.25]])
N = torch.tensor([[5, -3, 2], [0, 7, -1]])
INDEX = torch.tensor([2, 0, 1])
WINDOWS = [(x, (3,), (2,), (1,), (1,), (2,)) for x in (X, N.float(), X.half(), X * float("nan"))] + [
    (X, (1, 2), (1, 1), (0, 1), (1, 2), (2, 3))
]
OTHERS: dict[str, list[tuple[Any, ...]]] = {
    "where": [(X > 0, X, Y), (X > 0, X, 1.5), (X > 0, 0.0, Y)],
    "convert_element_type": [(X, torch.int32), (N, torch.float64), (X, torch.bool), (X, torch.float16)],
    "argmax": [(X, 1), (N, 0)],
    "argmin": [(X, 1), (N, 0)],
    "var": [(X, (1,), 0.0), (X, (0, 1), 1.0), (X.half(), (1,), 0.0)],
    "broadcast_in_dim": [(X, (4, 2, 3), (1, 2)), (X[:, :1], (2, 3), (0, 1)), (X[0], (3, 2), (0,)), (X.t(), (2, 5, 3), (2, 0))],
    "reshape": [(X, (3, 2)), (X.t(), (6,))],
    "transpose": [(X, (1, 0))],
    "slice": [(X, (0, 1), (2, 3), (1, 2)), (X, (1, 0), (1, 3), (1, 1))],
    "flip": [(X, (0, 1))],
    "cat": [([X, Y], 1), ([X, X, Y], 0)],
    "pad": [(X, (1, 0), (0, 2), 1.5)],
    "iota": [(5, torch.int64, torch.device("cpu")), (3, torch.float32, torch.device("cpu"))],
    "full": [((2, 3), 1.5, torch.float32, torch.device("cpu")), ((), 2, torch.int64, torch.device("cpu"))],
    "window_max": WINDOWS,
    "window_argmax": WINDOWS,
    "index_select": [(X, 1, INDEX), (X, 0, torch.tensor([[1, 0], [0, 0]]))],
    "gather": [(X, 1, torch.tensor([[2, 0, 1, 1], [0, 0, 2, 2]])), (X, 0, torch.tensor([[1, 0]]))],
}
INTEGER_ONLY = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right"}


def cases(prim: Prim) -> list[tuple[Any, ...]]:
    if prim.name in OTHERS:
        return OTHERS[prim.name]
    if prim.category == "reduction":
        return [
            (x, dims)
            for x in (X, N, X.half(), X > 0)
            for dims in ((0,), (1,), (0, 1))
            if x.dtype is not torch.bool or "a" not in prim.name[:2]
        ]
    if prim.name in INTEGER_ONLY:
        return [(N,)] if prim.category == "unary" else [(N, N.abs()), (N, 2)]
    if prim.category == "unary":
        return [(X,), (X.half(),), (X.double(),)]
    return [(X, Y), (X, 1.5), (1.5, Y), (X.half(), Y.half()), *([(N, 3)] if prim.name not in ("div", "atan2", "pow") else [])]


def numpy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return [v.numpy() for v in value] if isinstance(value, list) else value


def meta_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorMeta.of(value)
    return [TensorMeta.of(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", list(PRIMS))
def test_meanings_agree(name: str) -> None:
    prim = PRIMS[name]
    for args in cases(prim):
        results = prim(*args)
        arrays = prim.numpy_meaning(*map(numpy_of, args))
        metas = prim.meta(*map(meta_of, args))
        several = isinstance(results, tuple)
        for result, array, meta in zip(results, arrays, metas, strict=True) if several else [(results, arrays, metas)]:
            assert tuple(result.shape) == meta.shape == np.shape(array) and result.dtype is meta.dtype, (args, meta, result)
            tolerance = 2e-3 if result.dtype is torch.float16 else 1e-5
            assert torch.from_numpy(np.array(array)).dtype is result.dtype
            torch.testing.assert_close(torch.from_numpy(np.array(array)), result, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_mistakes_are_noticed() -> None:
    a, b = TensorMeta.of(X), TensorMeta.of(N)
    for call in (
        lambda: prims.add.meta(a, b),
        lambda: prims.add.meta(a, TensorMeta.of(X[0])),
        lambda: prims.where.meta(a, a, a),
        lambda: prims.reshape.meta(a, (5,)),
        lambda: prims.transpose.meta(a, (0, 0)),
        lambda: prims.slice.meta(a, (0, 0), (3, 3), (1, 1)),
        lambda: prims.cat.meta([a, b], 0),
        lambda: prims.broadcast_in_dim.meta(a, (5, 3), (0, 1)),
    ):
        with pytest.raises(ValueError):
            call()
