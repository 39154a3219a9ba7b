"""What is concatenated, padded or rotated is computed by a loop for each part."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.inductor.codegen import cpp, cpp_fill

Function = Callable[..., torch.Tensor]


def rotated(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def times(t: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    angles = t[:, None].float() * f
    return torch.cat([angles.cos(), angles.sin()], -1)


def last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last)


R = torch.randn
PROGRAMS: dict[str, tuple[Function, tuple[torch.Tensor, ...], int]] = {
    "rotary": (lambda x, c, s: x * c + rotated(x) * s, (R(2, 4, 33, 64), R(33, 64), R(33, 64)), 2),
    "rotary bfloat16": (
        lambda x, c, s: x * c + rotated(x) * s,
        (R(2, 4, 33, 64).bfloat16(), R(33, 64).bfloat16(), R(33, 64).bfloat16()),
        2,
    ),
    "flat rotary": (lambda x: rotated(x.view(40, 3, 64)).reshape(40, -1) * 2, (R(40, 192).half(),), 2),
    "time embedding": (times, (torch.randint(0, 1000, (64,)), torch.rand(128)), 2),
    "padded columns": (lambda x: F.pad(x.t(), (1, 2)), (R(24, 700),), 3),
    "rolled rows of three": (lambda x: x.roll(5, 0) + 1, (R(700, 3),), 2),
    "three": (lambda x, y: torch.cat([x.exp(), y, x.log1p()], 1), (torch.rand(3, 20, 30), R(3, 7, 30)), 3),
    "channels last": (lambda x, y: torch.cat([F.gelu(x), y.sigmoid()], 1), (last(R(2, 32, 9, 9)), last(R(2, 64, 9, 9))), 2),
    "bytes": (lambda x, y: torch.cat([x + 1, y], 1), (torch.randint(9, (50, 40)).byte(), torch.randint(9, (50, 60)).byte()), 2),
    "odd": (lambda x, y: torch.cat([x, y], -1) * 2, (R(64, 37).bfloat16(), R(64, 99).bfloat16()), 2),
    "padded": (lambda x: F.pad(x.tanh(), (64, 64)), (R(40, 64),), 3),
    "images": (lambda x: F.pad(x, (1, 1, 1, 1)), (R(2, 32, 28, 28).bfloat16(),), 5),
    "a column more": (lambda x, y: torch.cat([x, y], 1), (R(64, 100).half(), R(64, 1).half()), 2),
    "masks": (lambda x: F.pad(x, (2, 2)), (R(4, 128, 60) > 0,), 3),
    "of whole batches": (lambda x, y: torch.cat([x * 2, y.sin(), x.cos()]), (R(64, 10), R(300, 10)), 3),
    "stacked": (lambda x, y: torch.stack([x.sin(), y.cos()]), (R(640, 64), R(640, 64)), 2),
    "in two dimensions": (lambda x, y: torch.cat([torch.cat([x.sin(), y], 1), torch.cat([y, x.cos()], 1)]), (R(32, 64), R(32, 64)), 4),
    "one after the other": (lambda x: torch.cat([rotated(x).exp(), x.tanh()], -1), (R(99, 64),), 3),
    "maxima of halves": (lambda x: F.max_pool2d(x, 3, 2, 1), (R(2, 3, 66, 66).bfloat16(),), 2),
    "two results": (lambda x, y: (torch.cat([x.sin(), y], 1), torch.cat([y, x.cos()], 1)), (R(64, 64), R(64, 64)), 2),  # type: ignore[dict-item]
}


def run(function: Function, *inputs: torch.Tensor) -> str:
    call = magneto.optimize("inductor", nopython=True)(function)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs), function(*inputs))
    return "".join(magneto.inspect(call).kernels)


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_past_the_caches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (cpp, cpp_fill):
        monkeypatch.setattr(module, "STREAM_FROM", 1)
    run(*PROGRAMS[name][:1], *PROGRAMS[name][1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_have_loops_of_their_own(name: str) -> None:
    function, inputs, count = PROGRAMS[name]
    text = run(function, *inputs)
    assert " ? " not in text and text.count("\n    {\n") >= count


BLOCKS: dict[str, tuple[Function, tuple[torch.Tensor, ...], int]] = {  # and in how many walks
    "images": (lambda x: F.pad(x, (1, 1, 1, 1)) * 2, (R(5, 16, 30, 30),), 1),
    "wide images": (lambda x: F.pad(x, (3, 1, 1, 2)), (R(70, 126, 508).bfloat16(),), 1),
    "few wide images": (lambda x: F.pad(x, (3, 1, 1, 2)), (R(2, 126, 508).bfloat16(),), 3),
    "rolled": (lambda x: x.roll((3, 5), (-2, -1)) + 1, (R(5, 32, 64),), 1),
    "rolled rows of 60": (lambda x: x.roll((3, 5), (-2, -1)) + 1, (R(70, 32, 60).double(),), 1),
    "mirrored": (lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), (R(35, 2, 100, 100),), 1),
    "odd": (lambda x, y: torch.cat([x, y], -1) * 2, (R(80, 370).half(), R(80, 991).half()), 1),
    "many bytes": (lambda x, y, z: torch.cat([x, y, z], 1), tuple(torch.randint(9, (300, n)).byte() for n in (77, 1301, 12)), 1),
    "short rows": (lambda x: x[:, :30, :25] + 1, (R(100, 40, 64),), 1),
    "two results": (lambda x, y: (torch.cat([x.sin(), y], 1), torch.cat([y, x.cos()], 1)), (R(64, 64), R(64, 64)), 1),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", BLOCKS)
def test_large_results_are_put_together_in_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (cpp, cpp_fill):
        monkeypatch.setattr(module, "STREAM_FROM", 1)
    function, inputs, walks = BLOCKS[name]
    text = run(function, *inputs)
    assert text.count("#pragma omp for ") == walks and text.count("omp parallel") == 1
    assert re.search(r"mg_stream\(p(\d) [^;]*, p\1s, ", text)


def test_what_is_read_at_every_point_of_a_part_is_read_ahead_of_the_loop() -> None:
    """gcc makes no vectors of a load under a condition that stays where it is."""

    def sink(x: torch.Tensor, s: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, s.view(1, -1, 1, 1).expand(2, -1, 9, 1), row[:, None, None, None].expand(2, 3, 9, 2)], -1).softmax(-1)[
            ..., :-1
        ]

    text = run(sink, R(2, 3, 9, 40), R(3), R(2))
    assert text.count("? p0[") == 4 == text.count(" ? p")  # in two walks and what is left of them


def test_ends_of_long_rows_are_no_vectors() -> None:
    """gcc would take minutes for the loops along columns that are a row's length apart."""

    def returns(r: torch.Tensor) -> torch.Tensor:
        return sum(0.9**k * F.pad(r, (0, k))[:, k : k + r.shape[1]] for k in range(4))  # type: ignore[return-value]

    text = run(returns, R(16, 700))
    assert text.count("__asm__ volatile") == 2  # of three columns the last one reads one number
    assert not re.search(r"omp simd\n *for \(i64 (j\d).*\n.*700 \* \1.*\n.*\n.*700 \* \1", text)


def test_short_parts_stay_one_loop() -> None:
    """What is side by side in few places."""
    text = run(lambda x, y: torch.stack([x.exp(), y, y + 1], 2), R(64, 100), R(64, 100))
    assert " ? " not in text and text.count("mg_exp_f32(") == text.count("#pragma omp simd") == 1


def test_results_in_the_memory_of_inputs() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x.copy_(torch.cat([x[:, :64].sin() + y, x[:, 64:] * 2], 1))

    x, y = R(64, 128), R(64, 64)
    ours, eager = x.clone(), x.clone()
    call = magneto.optimize("inductor")(step)
    for _ in range(2):
        call(ours, y)
        step(eager, y)
    torch.testing.assert_close(ours, eager)


def test_an_error_in_what_is_not_chosen() -> None:
    def chosen(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(128) < 64, x // y, x.expand(64, 128).contiguous() * 3)

    x, y = torch.randint(9, (64, 128)), torch.ones(64, 128, dtype=torch.int64)
    call = magneto.optimize("inductor", nopython=True)(chosen)
    assert torch.equal(call(x, y), chosen(x, y))
    y[3, 100] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        call(x, y)


def test_gradients_of_parts() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.cat([rotated(x).sin(), y.exp()], -1) ** 2).sum()

    grads = []
    for call in (loss, magneto.optimize("inductor", nopython=True)(loss)):
        torch.manual_seed(0)
        x, y = R(50, 64, requires_grad=True), R(50, 32, requires_grad=True)
        call(x, y).backward()
        grads.append((x.grad, y.grad))
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("seed", range(12))
def test_random_pieces(seed: int) -> None:
    """Slices, pads and concatenations one after the other, in both dimensions."""
    draw = random.Random(seed)
    plan = [(draw.choice("cpsr"), draw.randrange(2), draw.randrange(1, 40)) for _ in range(draw.randrange(2, 5))]

    def program(x: torch.Tensor) -> torch.Tensor:
        for kind, dim, n in plan:
            if kind == "c":
                x = torch.cat([x.sin(), x.narrow(dim, 0, min(n, x.shape[dim])) * 2], dim)
            elif kind == "p":
                x = F.pad(x, (n, 3) if dim else (0, 0, 2, n)) + 1
            elif kind == "s":
                x = x.narrow(dim, min(n, x.shape[dim] // 2), x.shape[dim] // 2).abs()
            else:
                x = torch.roll(x, n, dim) - 1
        return x

    run(program, R(70, 90).to(draw.choice([torch.float32, torch.bfloat16, torch.float64])))
