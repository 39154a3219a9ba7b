"""`flex_attention` and `create_block_mask`: captured as their mathematics, with eager's numbers, gradients of what the program's functions hold, layouts and errors."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, create_mask, flex_attention, or_masks

import magneto
from tests.compare import assert_equal

pytestmark = pytest.mark.slow  # eager traces at each call: two minutes and a half
BACKENDS = ("aot_eager", "inductor", "eager")
GENERATOR = torch.Generator().manual_seed(0)
TABLE, SLOPES = torch.randn(4, 31, generator=GENERATOR), torch.rand(4, generator=GENERATOR)
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3])


def _q(seed: int = 0, heads: int = 4, length: int = 16, width: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, heads, length, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return q - k < 5


def documents(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def blind(b, h, q, k):
    return (q > 3) & (k <= q)


def _bias(s, b, h, q, k, amount=0.5):
    return s + amount * (k - q)


class Capped:
    def __init__(self, cap):
        self.cap = cap

    def __call__(self, s, b, h, q, k):
        return torch.tanh(s / self.cap) * self.cap


def _alibi(s, b, h, q, k):
    s += SLOPES[h] * (k - q)
    return s


SCORES: dict[str, Any] = {
    "none": None,
    "alibi": _alibi,
    "table": lambda s, b, h, q, k: s + TABLE[h, q - k + 15],
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "blind": lambda s, b, h, q, k: torch.where(q > 4, s * 2, -float("inf")),
    "partial": functools.partial(_bias, amount=0.25),
    "constant": lambda s, b, h, q, k: TABLE[h, k],
    "of places": lambda s, b, h, q, k: (q * k + h).float() / 9 + b,
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal,
    "both": and_masks(causal, window),
    "either": or_masks(documents, blind),
    "documents": and_masks(causal, documents),
    "blind": blind,
    "heads": lambda b, h, q, k: (h > 0) | (k < 3),
    "batches": lambda b, h, q, k: (b > 0) | (k < 3),
}


def _outcome(fn: Any, *args: Any, learned: torch.Tensor | None = None) -> Any:
    try:
        result = fn(*args)
    except Exception as error:
        return type(error), str(error)
    if learned is None:
        return result
    learned.grad = None
    (result[0] if isinstance(result, tuple) else result).square().sum().backward()
    return result, learned.grad


def _compare(fn: Any, compiled: Any, *args: Any, tolerance: float = 2e-6, learned: torch.Tensor | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = _outcome(fn, *args, learned=learned)
        ours = _outcome(compiled, *args, learned=learned)
    assert_equal(ours, plain, tolerance)
    for one, other in zip(*[part if isinstance(part, tuple) else (part,) for part in (ours, plain)], strict=True):
        if isinstance(one, torch.Tensor):
            assert one.stride() == other.stride()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, backend: str) -> None:
    def attend(q, k, v):
        return flex_attention(q * 1, k, v, score_mod=SCORES[name])

    compiled = magneto.optimize(backend, nopython=True)(attend)
    for seed in range(2):
        _compare(attend, compiled, _q(seed), _q(seed + 1), _q(seed + 2, width=6))
    _compare(attend, compiled, *[_q(seed, dtype=torch.float64) for seed in range(3)])
    _compare(attend, compiled, *[_q(seed, dtype=torch.bfloat16) for seed in range(3)], tolerance=2e-2)
    strided = _q(5, heads=16, length=4).transpose(1, 2)
    _compare(attend, compiled, strided, strided * 2, strided.contiguous())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, backend: str) -> None:
    """Made outside, and made in the region."""
    mask = MASKS[name]

    def attend(q, k, blocks):
        if blocks is None and mask is not None:
            blocks = create_block_mask(mask, 2, 4, 16, 16, device="cpu", BLOCK_SIZE=4)
        out, aux = flex_attention(q, k, k * 2, block_mask=blocks, scale=0.3, return_aux=AuxRequest(lse=True))
        return (
            out,
            aux.lse,
            blocks if blocks is None else [blocks.kv_num_blocks, blocks.kv_indices, blocks.q_indices, blocks.full_kv_num_blocks],
        )

    compiled = magneto.optimize(backend, nopython=True)(attend)
    blocks = None if mask is None else create_block_mask(mask, 2, 4, 16, 16, device="cpu")
    for given in (None, blocks, None):
        _compare(attend, compiled, _q(1), _q(2), given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_heads_and_sums(backend: str) -> None:
    def attend(q, k):
        return flex_attention(q, k, k, score_mod=Capped(2.0), enable_gqa=True, return_lse=True)

    compiled = magneto.optimize(backend, nopython=True)(attend)
    for heads in (2, 4, 1):
        _compare(attend, compiled, _q(), _q(3, heads))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", (None, blind))
def test_gradients_of_what_a_function_holds(backend: str, mask: Any) -> None:
    learned = torch.nn.Parameter(TABLE.clone())
    blocks = mask and create_block_mask(mask, None, None, 16, 16, device="cpu")

    def attend(q, k):
        def score(s, b, h, i, j):
            return torch.where(i - j > 9, -torch.inf, s * learned[h, 3] + learned[h, i - j + 15])

        return flex_attention(q, k, k, score_mod=score, block_mask=blocks)

    compiled = magneto.optimize(backend, nopython=True)(attend)
    for seed in range(2):
        _compare(attend, compiled, _q(seed), _q(seed + 1), learned=learned, tolerance=1e-5)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("name", ("none", "table", "blind"))
@pytest.mark.parametrize("mask", ("none", "blind"))
def test_gradients_of_the_formula(mask: str, name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that eager has on a GPU: it refuses them on the CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda q, k, v: None)
    blocks = MASKS[mask] and create_block_mask(MASKS[mask], 1, 1, 16, 16, device="cpu")

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=SCORES[name], block_mask=blocks, enable_gqa=True, return_lse=True)

    found = []
    for form in (attend, magneto.optimize(backend, nopython=True)(attend)):
        args = [_q(seed, heads).requires_grad_() for seed, heads in ((1, 4), (2, 2), (3, 2))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out, sums = form(*args)
        (out.square().sum() + sums.nan_to_num(0, 0, 0).sin().sum()).backward()
        found.append([out, sums, *[arg.grad for arg in args]])
    assert_equal(found[1], found[0], 5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_functions_that_change(backend: str) -> None:
    def attend(q, score, blocks):
        return flex_attention(q, q, q, score_mod=score, block_mask=blocks)

    compiled = magneto.optimize(backend, nopython=True)(attend)
    for length in (3, 5, 8, 9, 12, 16):
        _compare(
            attend, compiled, _q(length, length=length), SCORES["table"], create_block_mask(causal, 1, 1, length, length, device="cpu")
        )
    for score, mask in (
        (SCORES["alibi"], window),
        (None, documents),
        (SCORES["partial"], causal),
        (functools.partial(_bias, amount=2), causal),
    ):
        _compare(attend, compiled, _q(), score, create_block_mask(mask, 1, 1, 16, 16, device="cpu"))


@pytest.mark.parametrize("name", ("causal", "heads", "batches"))
def test_masks_of_elements(name: str) -> None:
    def made(n):
        return create_mask(MASKS[name], 2, 3, n, 16, device="cpu"), create_mask(SCORES["blind"], None, 3, n, 7, device="cpu")

    _compare(made, magneto.optimize("aot_eager", nopython=True)(made), 5)


def test_under_autocast() -> None:
    def attend(q):
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, q, q, score_mod=_alibi)

    _compare(attend, magneto.optimize("aot_eager", nopython=True)(attend), _q(), tolerance=2e-2)


def _row(s, b, h, q, k):
    return s + TABLE[h].sum()


def _branch(s, b, h, q, k):
    return s + 1 if q > k else s


def _whole(s, b, h, q, k):
    return s - s.max()


def _no_tensor(s, b, h, q, k):
    return 1.0


def _of_another_kind(s, b, h, q, k):
    return s.view(1)


def _drawing(s, b, h, q, k):
    return s + torch.rand(())


COUNTER = torch.zeros(())


def _counting(s, b, h, q, k):
    COUNTER.add_(1)
    return s + COUNTER


WRONG: dict[str, Any] = {
    "heads": lambda q: flex_attention(q, q[:, :2], q[:, :2]),
    "groups": lambda q: flex_attention(q, q[:, :3], q[:, :3], enable_gqa=True),
    "widths": lambda q: flex_attention(q, q[..., :3], q),
    "gradients": lambda q: flex_attention(q.clone().requires_grad_(), q, q),
    "lengths": lambda q: flex_attention(q, q, q, block_mask=create_block_mask(causal, 1, 1, 8, 8, device="cpu")),
    "sliced": lambda q: flex_attention(q, q, q, block_mask=create_block_mask(causal, 2, 1, 16, 16, device="cpu")[0]),
    "both sums": lambda q: flex_attention(q, q, q, return_lse=True, return_aux=AuxRequest(lse=True)),
    "largest": lambda q: flex_attention(q, q, q, return_aux=AuxRequest(max_scores=True)),
    "of a row": lambda q: flex_attention(q, q, q, score_mod=_row),
    "a branch": lambda q: flex_attention(q, q, q, score_mod=_branch),
    "of all": lambda q: flex_attention(q, q, q, score_mod=_whole),
    "no tensor": lambda q: flex_attention(q, q, q, score_mod=_no_tensor),
    "another kind": lambda q: flex_attention(q, q, q, score_mod=_of_another_kind),
    "a score's mask": lambda q: create_block_mask(_row, 1, 1, 8, 8, device="cpu"),
    "random": lambda q: flex_attention(q, q, q, score_mod=_drawing),
    "writing": lambda q: (COUNTER.zero_(), flex_attention(q, q, q, score_mod=_counting))[1],
    "no mask": lambda q: create_mask(lambda b, h, i, j: i - j, 1, 1, 3, 3, device="cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    fn = WRONG[name]
    compiled = magneto.optimize("aot_eager")(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, ours = _outcome(fn, _q()), _outcome(compiled, _q())
    if isinstance(plain, tuple) and isinstance(plain[0], type):
        assert ours[0] is plain[0]
        assert ours[1] == plain[1] or plain[0].__module__.startswith("torch._dynamo")  # with lines of its own
    else:
        assert_equal(ours, plain, 2e-6)
