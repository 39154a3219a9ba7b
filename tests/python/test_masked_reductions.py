"""What a boolean mask selects, reduced: no break, eager's numbers, gradients and errors, also where nothing is selected. Other uses break where the mask is the index."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from tests.compare import assert_equal

BACKENDS = ("aot_eager", "inductor", "eager")
X, Y, NONE = object(), object(), object()

# x, y: (5, 4); w: (4,); m: masks of (5, 4); r: masks of (5,); k: labels (5,)
CAPTURED: dict[str, Any] = {
    "mean": lambda x, y, w, m, r, k: x[m].mean(),
    "sum": lambda x, y, w, m, r, k: (x[m].sum(), torch.sum(x[m]), x[x > 0].sum(), x[m].sum(dtype=torch.float64)),
    "distance": lambda x, y, w, m, r, k: (x[m] - y[m]).abs().mean(),
    "squares of rows": lambda x, y, w, m, r, k: ((x[r] - y[r]) ** 2).sum(-1).mean(),
    "columns": lambda x, y, w, m, r, k: (x[r].sum(0), x[r].mean(dim=0, keepdim=True), x[r].mean((0, 1)), x[r].mean(-1).sum()),
    "log where it is none": lambda x, y, w, m, r, k: (x[x > 0].log().sum(), x[m & (x > 0)].sqrt().mean(), (1 / x[x != 0]).sum()),
    "products": lambda x, y, w, m, r, k: (x[m].prod(), x[r].prod(0), x[r].prod(dim=1).sum()),
    "decided": lambda x, y, w, m, r, k: ((x[m] > 0).any(), (x[m] > -9).all(), x[r].gt(0).any(0), x[m].count_nonzero(), x[r].gt(0).all(dim=1).sum()),
    "norms": lambda x, y, w, m, r, k: (x[m].norm(), x[m].norm(p=1), torch.norm(x[r], dim=-1).mean(), torch.norm(x[r], dim=0)),
    "logsumexp": lambda x, y, w, m, r, k: (x[m].logsumexp(0), torch.logsumexp(x[r], dim=-1).sum(), x[r].logsumexp(0)),
    "mse": lambda x, y, w, m, r, k: (F.mse_loss(x[m], y[m]), F.mse_loss(x[r], y[r], reduction="sum"), torch.nn.MSELoss()(x[m], y[m])),
    "l1": lambda x, y, w, m, r, k: (F.l1_loss(x[m], y[m]), F.smooth_l1_loss(x[m], y[m], beta=0.5), F.huber_loss(x[r], y[r])),
    "bce": lambda x, y, w, m, r, k: F.binary_cross_entropy(torch.sigmoid(x[m]) * 0.9, y[m].sigmoid()),
    "bce outside of what it takes": lambda x, y, w, m, r, k: F.binary_cross_entropy(x[(x > 0) & (x < 1)], y[(x > 0) & (x < 1)].clamp(0, 1)),
    "bce with logits": lambda x, y, w, m, r, k: (
        F.binary_cross_entropy_with_logits(x[m], y[m].sigmoid()),
        F.binary_cross_entropy_with_logits(x[r], y[r].sigmoid(), pos_weight=w.detach().abs()),
        F.binary_cross_entropy_with_logits(x[m], (y[m] > 0).float(), weight=y[m].detach().abs(), reduction="sum"),
    ),
    "cross entropy": lambda x, y, w, m, r, k: (
        F.cross_entropy(x[r], k[r]),
        F.cross_entropy(x[r], k[r], weight=w.detach().abs() + 1, label_smoothing=0.1),
        F.cross_entropy(x[r], k[r], reduction="sum", ignore_index=2),
        F.cross_entropy(x[r], k[r], reduction="none").mean(),
    ),
    "cross entropy of pixels": lambda x, y, w, m, r, k: _pixels(torch.stack([x, y, x * y], -1), k[:, None].clamp(max=2).expand(5, 4), m),
    "nll": lambda x, y, w, m, r, k: (F.nll_loss(x[r].log_softmax(-1), k[r]), F.nll_loss(F.log_softmax(x, -1)[r], k[r])),
    "kl": lambda x, y, w, m, r, k: F.kl_div(x[r].log_softmax(1), y[r].softmax(1), reduction="batchmean"),
    "masked select": lambda x, y, w, m, r, k: (torch.masked_select(x, m).sum(), x.masked_select(x > 0).mean()),
    "divided by the count": lambda x, y, w, m, r, k: (x[m].sum() / m.sum(), x[m].sum() / x[m].numel(), x[r].sum() / max(len(x[r]), 1)),
    "counted": lambda x, y, w, m, r, k: (x[m].numel(), len(x[r]), x[r].shape, x[r].size(1), x[r].size(-2), x[m].dim(), x[r].ndim, x[m].dtype),
    "learned": lambda x, y, w, m, r, k: ((x[r] * w).sum(), (x[m].clamp(min=0.1).log() * w[0] + w[1]).mean(), ((x[r] - w) ** 2).mean()),
    "learned where it is infinite": lambda x, y, w, m, r, k: (w[0] * (x[m] - 1).log().abs()).nan_to_num(0, 0, 0).sum() + (w / (x[r] - 1)).sum(),
    "cosine": lambda x, y, w, m, r, k: (1 - F.cosine_similarity(x[r], y[r], dim=-1)).mean() + F.normalize(x[r], dim=1).sum(),
    "hits": lambda x, y, w, m, r, k: (x[r].argmax(-1) == k[r]).float().mean(),
    "picked": lambda x, y, w, m, r, k: -x[r].log_softmax(-1).gather(1, k[r].unsqueeze(1)).squeeze(1).mean(),
    "parts": lambda x, y, w, m, r, k: (x[r][:, 0].sum(), x[r][..., 1:].mean(), (x[r][:, None] * y[r][:, :, None].detach()).sum()),
    "extremes": lambda x, y, w, m, r, k: (x[r].max(-1).values.sum(), x[r].min(dim=1)[0].sum(), torch.maximum(x[m], y[m]).sum()),
    "types": lambda x, y, w, m, r, k: (x[m].double().mean(), x[m].to(torch.float64).sum(), x[m].bfloat16().mean(), (x[m] * 9).long().sum(), x[m].half().sum()),
    "written": lambda x, y, w, m, r, k: _written(x.clone(), m, w),
    "detached": lambda x, y, w, m, r, k: (x[m].detach() * y[m]).sum(),
    "spread": lambda x, y, w, m, r, k: (x[m].std(), x[m].var(), x[r].var(0), x[r].std(dim=0, keepdim=True), torch.std(x[m], unbiased=False), x[m].var(correction=0)),
    "no spread": lambda x, y, w, m, r, k: ((x[m] * 0).std(), (x[r] * 0 + 2).std(0).sum()),
    "masks made twice": lambda x, y, w, m, r, k: (x[(x > 0) & m] * y[(x > 0) & m]).sum(),
    "transposed": lambda x, y, w, m, r, k: (x.t()[m.t()].mean(), x.t()[:, r].sum() if False else x.t().contiguous()[m.t()].sum()),
}  # fmt: skip


def _pixels(x, k, m):
    picked = x.log_softmax(-1)[m].gather(-1, k[m].unsqueeze(-1)).squeeze(-1)
    return F.cross_entropy(x[m], k[m]), (F.cross_entropy(x[m], k[m], reduction="none") * x[m, 0].detach()).mean(), picked.sum()


def _written(x, m, w):
    x[m] *= w[0]
    chosen = x[m]
    chosen *= 2
    return chosen.sum()


COUNTED_TWICE = ("masks made twice", "bce outside of what it takes")
"""By the backend whose graphs hold sizes from data: it does not see that they are the same."""
NEED_SOME: dict[str, Any] = {
    "largest": lambda x, y, w, m, r, k: (x[m].max(), torch.max(x[m]), x[m].min(), x[m].amax(), x[r].amax(0), x[r].amin((0, 1)), (k[r] + 1).max()),
    "asserted": lambda x, y, w, m, r, k: _asserted(x, m),
}  # fmt: skip


def test_in_a_whole_step() -> None:
    model = torch.nn.Linear(4, 4)

    def step(x, k):
        opt.zero_grad()
        out, known = model(x), k > 0
        loss = F.cross_entropy(out[known], k[known]) + out[known].std() + (out[out > 0] - 1).square().mean()
        loss.backward()
        opt.step()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    found = []
    for form in (step, magneto.optimize("inductor", nopython=True)(step)):
        model.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found.append([form(x, k.abs() % 4) for x, *_, k in map(_arguments, range(4))])
    assert_equal(found[1], found[0], 1e-5)


def _asserted(x, m):
    if not x[m].numel() > 0:
        raise ValueError("nothing")
    return x[m].sum()


BREAKING: dict[str, Any] = {
    "of other masks": lambda x, y, w, m, r, k: x[m].sum() if x[m].numel() != x[m].numel() else (x[m].sum(), _try(lambda: x[m] + x[~m])),
    "returned": lambda x, y, w, m, r, k: x[m] * 2,
    "sorted": lambda x, y, w, m, r, k: (x[m].sort().values, x[m].mean()),
    "median": lambda x, y, w, m, r, k: (x[r].sum(), x[r].flatten().sum(), x[r].t().sum()),
    "unequal": lambda x, y, w, m, r, k: (_try(lambda: x[m] + x[r]), _try(lambda: F.mse_loss(x[r], k[r].float()).item())),
    "of integers": lambda x, y, w, m, r, k: (_try(lambda: k[r].mean()), k[r].sum(), k[r].float().mean()),
    "out of range": lambda x, y, w, m, r, k: (_try(lambda: x[m].sum(1)), _try(lambda: x[r].sum((0, 0)))),
    "labels out of range": lambda x, y, w, m, r, k: _try(lambda: F.cross_entropy(x[r], k[r] + 3)),
    "bce out of range": lambda x, y, w, m, r, k: _try(lambda: F.binary_cross_entropy(x[m] * 9, y[m])),
    "a view written": lambda x, y, w, m, r, k: _view(x[r]),
    "branch": lambda x, y, w, m, r, k: x[m].sum() if x[m].numel() > 3 else x.sum(),
    "the mask changes": lambda x, y, w, m, r, k: _changed(x, m.clone()),
    "as integers": lambda x, y, w, m, r, k: (x[m].sum() / len(x[r]), k[r] * len(x[r]), range(len(x[r])), [1] * len(x[r])),
    "over the selection": lambda x, y, w, m, r, k: (x[r].softmax(0), x[r].max(0), x[m].argmax(), x[r].cumsum(0), x[m].all() and 1),
}  # fmt: skip


def _view(t):
    first = t[:, 0]
    t *= 2
    return first.sum()


def _changed(x, m):
    t = x[m]
    m.logical_not_()
    return (t + 1).sum()


def _try(thunk):
    try:
        return thunk()
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error).__name__


def _arguments(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Third: nothing is selected; fourth: everything; fifth: NaN and infinities where nothing is selected."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(5, 4, generator=generator).to(dtype) for _ in range(2))
    m, r = torch.rand(5, 4, generator=generator) > 0.5, torch.tensor([True, False, True, True, False])
    if seed in (2, 3):
        m, r = torch.full((5, 4), seed == 3), torch.full((5,), seed == 3)
    if seed == 4:
        m &= r[:, None]
        x[~r], y[~r] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], dtype=dtype), torch.nan
    k = torch.randint(0, 4, (5,), generator=generator)
    if seed != 3:
        k[1] = -1 - seed * 50
    return [x, y, torch.randn(4, generator=generator).to(dtype), m, r, k]


def _outcome(fn: Any, args: list[torch.Tensor], training: bool) -> Any:
    args = copy.deepcopy(args)
    for one in args[:3]:
        one.requires_grad_(training)
    try:
        result = fn(*args)
        parts = [
            part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, torch.Tensor) and part.requires_grad
        ]
        if training and parts:
            sum((part.double() * (i + 1)).sum() for i, part in enumerate(parts)).backward()
    except Exception as error:
        return type(error), str(error)
    return result, [one.grad for one in args[:3]]


@pytest.mark.parametrize("name", [*CAPTURED, *NEED_SOME, *BREAKING])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", (False, True), ids=("inference", "training"))
def test_same(name: str, backend: str, training: bool) -> None:
    fn = {**CAPTURED, **NEED_SOME, **BREAKING}[name]
    compiled = magneto.optimize(backend, nopython=name in CAPTURED and (backend != "eager" or name not in COUNTED_TWICE))(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (0, 1, 4, 3, 2, 5):
            args = _arguments(seed)
            plain, ours = _outcome(fn, args, training), _outcome(compiled, args, training)
            tolerance = 4e-3 if name == "types" else 2e-6
            assert_equal(ours, plain, tolerance, f"{name} {seed}")
            assert seed or name not in NEED_SOME or backend == "eager" or magneto.stats()["breaks"] == 0
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize(("classes", "breaks"), [(200, 0), (300, 2)])
def test_losses_of_vocabularies_compute_the_selected_rows_alone(classes: int, breaks: int) -> None:
    x, labels, rows = torch.randn(6, classes), torch.randint(0, classes, (6,)), torch.tensor([True, False, False, True, False, False])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x * 2)[rows], labels[rows])

    magneto.reset()
    torch.testing.assert_close(magneto.compile(loss)(x), loss(x))
    assert magneto.stats()["breaks"] == breaks
