"""Kernels that differ in numbers only are one C function: the same results, and fewer functions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import magneto
from magneto.base.events import counters
from magneto.base.flags import config
from magneto.inductor.runtime import build as building
from magneto.inductor.runtime import share, store
from magneto.inductor.runtime.share import Seen, form_of, functions, general_of, lengths_of

BODY = """int SYMBOL(void *const *p) {{
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    f32 d1 = mg_div_scale({n}.0f);
    for (i64 row = 0; row < {rows}; row++) {{
        const i64 i1 = (u32)row % {rows};
        f32 c2[{n}];
#pragma omp simd
        for (i64 j0 = 0; j0 < {n}; j0++) {{
            f32 t1 = p0[{n} * i1 + {step} * j0 + {n}];
            i32 t2 = t1 + (i32){value};
            p1[{n} * i1 + j0] = t1 / {value}.0f;
        }}
    }}
    return 0;
}}
"""


def test_what_becomes_an_argument() -> None:
    text = BODY.format(n=96, rows=5, step=1, value=4)
    form, numbers = form_of(text)
    assert (
        numbers.count("96") == 5 and numbers.count("96.0f") == 1 and numbers.count("5") == 2
    )  # not the value, the divisor, the vector's stride
    assert "1 * j0" in form and "(i32)4" in form and "/ 4.0f" in form
    other = BODY.format(n=192, rows=5, step=1, value=4)
    ((positions, made),) = functions([("k_a", text), ("k_b", other)])
    assert positions == (0, 1)
    assert "s_k_a(p, 96.0f, 96)" in made and "s_k_a(p, 192.0f, 192)" in made
    assert "f32 c2[192];" in made and "row < 5" in made and "j0 < (n1 & -16)" in made


@pytest.mark.parametrize("change", [{"step": 2}, {"value": 3}, {"n": 37}])
def test_what_stays_in_the_form(change: dict[str, int]) -> None:
    numbers = {"n": 96, "rows": 5, "step": 1, "value": 4}
    made = functions([("k_a", BODY.format(**numbers)), ("k_b", BODY.format(**numbers | change))])
    assert [positions for positions, _ in made] == [(0,), (1,)]
    assert all("s_k_" not in text for _, text in made)


Many = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def norms(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [F.layer_norm(F.gelu(x), x.shape[-1:]) for x in xs]


def softmaxes(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [F.softmax(x * 0.3, -1) for x in xs]


def columns(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.mean(0) - x.amax(0) for x in xs]


def totals(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.float().exp().sum().reshape(1) for x in xs]


def turned(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [(x.t() * 2).contiguous() for x in xs]


def joined(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([x, x[:, : x.shape[1] // 2] * 2, x.flip(0)], 1).relu() for x in xs]


def windows(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.roll(x, (2, 3), (0, 1))[1:, ::2] + F.pad(x, (1, 2))[1:, ::2][:, : (x.shape[1] + 1) // 2] for x in xs]


def strided(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.reshape(x.shape[0] // 2, 2, -1).transpose(0, 1) + x.reshape(2, x.shape[0] // 2, -1) for x in xs]


def picked(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.argmax(-1) + x[torch.arange(x.shape[0]) % 3].argmin(-1) for x in xs]


def scaled(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x * (1 / (k + 3)) + (k + 2) for k, x in enumerate(xs)]


def a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been built is forgotten."""
    for name in ("_addresses", "_seen", "_generals"):
        monkeypatch.setattr(building, name, {})


SIZES = ((40, 64), (48, 96), (50, 112), (50, 100), (600, 128), (36, 800), (60, 1200), (400, 320), (250, 77), (36, 56))
PROGRAMS: tuple[Many, ...] = (norms, softmaxes, columns, totals, turned, joined, windows, strided, picked, scaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_many_sizes(program: Many, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_new_process(monkeypatch)
    config.cache_dir = str(tmp_path)
    served: list[int] = []

    def counted(kernels: list[tuple[str, str]], seen: Seen) -> list[tuple[tuple[int, ...], str]]:
        made = functions(kernels, seen)
        served.extend(len(positions) for positions, _ in made)
        return made

    monkeypatch.setattr(building, "functions", counted)
    torch.manual_seed(0)
    xs = [torch.randn(size).to(dtype) for size in SIZES]
    compiled = magneto.compile(program)(xs)
    exact = program([x.double() if dtype is torch.float32 and program is not picked else x for x in xs])
    for got, want in zip(compiled, exact, strict=True):
        near = {torch.float32: 2e-5, torch.float16: 4e-3}.get(
            dtype
        )  # gelu of halves may be a unit from eager's, which a norm behind it makes two
        torch.testing.assert_close(got, want.to(got.dtype), rtol=near, atol=near and min(near, 1e-3))
    assert max(served) > 1 or dtype is not torch.float32 or program in (totals, windows, picked), "nothing was shared"


def test_short_loops_of_kernels_that_take_no_time() -> None:
    cheap = '__attribute__((optimize("O1"))) '
    texts = [BODY.format(n=n, rows=5, step=step, value=4) for n, step in ((37, 1), (21, 3))]
    assert len(functions([(f"k_{k}", text) for k, text in enumerate(texts)])) == 2
    ((positions, made),) = functions([(f"k_{k}", cheap + text) for k, text in enumerate(texts)])
    assert positions == (0, 1) and "s_k_0(p, 37.0f, 37, 1)" in made and "s_k_0(p, 21.0f, 21, 3)" in made


def test_places_beside_indices_of_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of attention side by side again: one function for windows of all widths."""
    a_new_process(monkeypatch)
    config.cache_dir = str(tmp_path)
    served: list[int] = []
    monkeypatch.setattr(building, "functions", lambda kernels, seen: [served.append(len(p)) or (p, t) for p, t in functions(kernels, seen)])

    def program(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.transpose(1, 2).reshape(x.shape[0] * 49, -1).contiguous() for x in xs]

    xs = [torch.randn(windows, heads, 49, 32) for windows, heads in ((18, 3), (8, 6), (5, 12), (2, 24))]
    for got, want in zip(magneto.compile(program)(xs), program(xs), strict=True):
        assert torch.equal(got, want)
    assert served == [4]


def test_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers that are values stay: they are computed in their own width."""
    a_new_process(monkeypatch)
    config.cache_dir = str(tmp_path)
    big = 2**31 - 5

    def program(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(x + big // (k + 1)) * 3 // (k + 2) for k, x in enumerate(xs)]

    xs = [torch.arange(n, dtype=torch.int32) - 7 for n in (64, 80, 96, 100)]
    for got, want in zip(magneto.compile(program)(xs), program(xs), strict=True):
        assert torch.equal(got, want)


def test_a_form_is_the_text() -> None:
    """What is taken out of a text, put back, gives the text."""
    text = BODY.format(n=96, rows=5, step=1, value=4)
    form, numbers = form_of(text)
    for mark, number in zip([c for c in form if c in share.MARKS], numbers, strict=True):
        form = form.replace(mark, number, 1) if form.index(mark) == min(form.index(c) for c in share.MARKS if c in form) else form
    assert form == text


# ---- kernels of other sizes, one graph after the other -----------------------------------------------------------------------


def test_which_numbers_a_function_takes() -> None:
    (form, one), (same, two), (_, wide) = (
        form_of(BODY.format(n=n, rows=rows, step=1, value=4)) for n, rows in ((96, 5), (96, 7), (192, 7))
    )
    assert form == same and lengths_of(form, one) == lengths_of(form, two) == ("0", "96") != lengths_of(form, wide)
    assert general_of(form, [one, wide], "k_a") is None
    general = general_of(form, [one, two], "k_a")
    assert general is not None and general.types == ("i64",) and general.symbol == "g_k_a"

    def passed(body: str, **changes: int) -> tuple[int, ...] | None:
        given = {"n": 96, "rows": 9, "step": 1, "value": 4} | changes
        found, numbers = form_of(body.format(**given))
        return general.numbers(numbers) if found == form else None

    assert passed(BODY) == (9,)
    assert passed(BODY, n=160) is None and passed(BODY, value=5) is None and passed(BODY, step=2) is None
    assert passed(BODY.replace("% {rows}", "% 9")) == (9,) and passed(BODY.replace("% {rows}", "% 8")) is None  # two places, one argument
    assert (
        passed(BODY.replace("c2[{n}]", "c2[80]")) == (9,) and passed(BODY.replace("c2[{n}]", "c2[97]")) is None
    )  # the array is long enough, or not


@pytest.mark.parametrize(
    ("text", "type", "bits"),
    [("7", "i64", 7), ("160.0f", "f32", 0x4064 << 48), ("0x1.8p-1f", "f32", 0x3FE8 << 48), ("0.1", "f64", 0x3FB999999999999A)],
)
def test_numbers_as_bits(text: str, type: str, bits: int) -> None:
    assert share._bits(text, type) == bits
    assert share._bits("0.1f", "f32") is None  # rounded once by C, twice here
    assert share._bits(text, "f64" if type != "f64" else "i64") is None


@pytest.mark.parametrize("program", [norms, softmaxes, joined, windows, strided, scaled], ids=lambda p: p.__name__)
def test_one_size_after_the_other(program: Many, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_new_process(monkeypatch)
    config.cache_dir = str(tmp_path)
    torch.manual_seed(0)
    xs = [torch.randn(rows, 128) for rows in (300, 400, 340, 512, 256, 402, 1000, 258)]
    made = []
    for process in range(2):
        magneto.reset()
        ours = magneto.compile(program, dynamic=False)  # each size for itself
        for x in xs:
            for _ in range(2):  # the fourth size and those behind it are compiled at their second call
                for got, want in zip(ours([x]), program([x]), strict=True):
                    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
            made.append(counters().get("kernels_compiled", 0))
        assert magneto.stats()["fallbacks"] == 0 and (counters().get("kernels_by_numbers", 0) >= 2) == (process == 0)
        a_new_process(monkeypatch)
        if process == 0:
            monkeypatch.setattr(building, "compile_units", None)  # the store has all
    assert made[len(xs) - 1] - made[2] <= 1 and made[2] <= 3 * made[0], "later sizes need no compiler"
    assert made[-1] in (0, made[len(xs) - 1])


def test_a_backward_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_new_process(monkeypatch)
    config.cache_dir = str(tmp_path)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
    ours, made = magneto.compile(net, dynamic=False), []
    for rows in (300, 400, 340, 500, 700):
        for _ in range(2):
            x = torch.randn(rows, 64)
            grads = []
            for fn in (net, ours):
                net.zero_grad()
                fn(x).square().sum().backward()
                grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=5e-4)
        made.append(counters().get("kernels_compiled", 0))
    assert counters()["kernels_by_numbers"] >= 4, made


def test_one_size_has_kernels_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_new_process(monkeypatch)
    config.cache_dir = str(tmp_path)
    for rows in (300, 400, 340):  # other programs, as far as anybody knows
        magneto.compile(lambda x: (x * 2).softmax(-1))(torch.randn(rows, 128))
    assert counters().get("kernels_by_numbers", 0) == 0 and counters()["kernels_compiled"] == 3


def test_what_kernels_pass_fits_the_unit_that_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel compiled once more, by a process that knows no other size, is text of its own: the function for all sizes stays where others look for it."""
    xs = [torch.randn(rows, 128) for rows in (300, 400, 340)]
    for process, sizes in enumerate(((300, 400, 340), (400,), (340,))):
        a_new_process(monkeypatch)
        magneto.reset()
        config.cache_dir = str(tmp_path / str(process))  # whose libraries are not loaded yet
        if process:
            shutil.copytree(tmp_path / str(process - 1), config.cache_dir)
        before = dict(counters())
        ours = magneto.compile(norms, dynamic=False)
        for x in (x for x in xs if x.shape[0] in sizes):
            torch.testing.assert_close(ours([x]), norms([x]), rtol=2e-5, atol=2e-5)
        made, numbers = (counters().get(name, 0) - before.get(name, 0) for name in ("kernels_compiled", "kernels_by_numbers"))
        assert (made > 0, numbers > 0) == ((True, True), (True, False), (False, False))[process]
        if process == 0:  # what leaves a full store first
            for path in (tmp_path / "0/kernel").rglob("*"):
                if path.is_file() and b" " not in path.read_bytes()[: -store.TRAILER]:
                    path.unlink()
