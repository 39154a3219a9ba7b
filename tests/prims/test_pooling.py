"""Pooling over small windows and enlargement by whole factors are loops: the same numbers at every size, padding, layout and dtype."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.prims.decompose import decompose
from tests.ops.checking import run_graph
from tests.prims.test_decompose import Recorder, targets

aten = torch.ops.aten


def images(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Odd and even sizes; contiguous, channels-last, with gaps, without a batch; few numbers, so that many are equal."""
    x = torch.randint(-4, 5, (2, 3, 9, 40), generator=torch.Generator().manual_seed(3)).to(dtype)
    return [x, x.to(memory_format=torch.channels_last), x[:, :, ::2, 1:-2], x[1], x[:, :, :3, :3]]


POOLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max_overlapping": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_same_size": lambda x: F.max_pool2d(x, 3, 1, 1),
    "max_oblong": lambda x: F.max_pool2d(x, (1, 3), (2, 1), (0, 1)),
    "max_ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max_ceil_unpadded": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    "max_large_same_size": lambda x: F.max_pool2d(x, 5, 1, 2),
    "max_large_apart": lambda x: F.max_pool2d(x, (3, 8), (3, 8), (1, 4)),
    "max_large_dilated": lambda x: F.max_pool2d(x, (4, 5), (2, 3), 2, (2, 1), ceil_mode=True),
    "max_long": lambda x: F.max_pool2d(x, (1, 31), (1, 6), (0, 15)),
    "max_of_rows": lambda x: F.max_pool1d(x.flatten(-2)[..., ::2], 4),
    "max_of_long_rows": lambda x: F.max_pool1d(x.flatten(0, -2), 31, 1, 15),
    "max_of_one_window": lambda x: F.max_pool1d(x.flatten(1, -2).transpose(-1, -2), x.shape[-2] * 3 if x.ndim > 3 else x.shape[-2]),
    "max_of_negatives": lambda x: -F.max_pool2d(-x, 5, 1, 2),
    "average": lambda x: F.avg_pool2d(x, 2),
    "average_same_size": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "average_of_inside": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average_ceil_of_inside": lambda x: F.avg_pool2d(x, (2, 3), 2, (1, 0), ceil_mode=True, count_include_pad=False),
    "average_divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_pools_against_eager(name: str, dtype: torch.dtype) -> None:
    fn = POOLS[name]
    compiled = magneto.optimize("inductor", nopython=True)(fn)
    with torch.no_grad():
        for x in images(dtype):
            found, expected = compiled(x), fn(x)
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [n for n in POOLS if n.startswith("max")])
def test_maxima_of_infinities_and_nan(name: str) -> None:
    x = images()[0].clone()
    x[0, 0], x[0, 1, 3, 5], x[0, 2, 0, 0], x[1, 0, -1, -1], x[1, 1] = -float("inf"), float("nan"), float("nan"), float("nan"), -0.0
    with torch.no_grad():
        found, expected = magneto.optimize("inductor", nopython=True)(POOLS[name])(x), POOLS[name](x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.filterwarnings("ignore::magneto.MagnetoWarning")
def test_whole_numbers_in_one_dimension_raise_as_in_eager() -> None:
    texts = []
    for call in (F.max_pool1d, magneto.optimize("inductor")(lambda *args: F.max_pool1d(*args))):
        with pytest.raises(RuntimeError) as error:
            call(torch.arange(12).view(1, 2, 6), 2)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_gradients_still_have_their_indices() -> None:
    x, y = (images()[0].clone().requires_grad_() for _ in range(2))
    fn = POOLS["max_overlapping"]
    magneto.optimize("inductor", nopython=True)(fn)(x).sum().backward()
    fn(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("indices", [False, True])
def test_maxima_without_indices_are_no_library_call(indices: bool, size: int) -> None:
    r = Recorder(images()[0])
    pair = r(aten.max_pool2d_with_indices.default, r.nodes[0], [size, size], [2, 2], [1, 1])
    results = [r(operator.getitem, pair, k) for k in range(1 + indices)]
    graph = decompose(r.output(*results))
    r.check(graph)
    assert ("aten.max_pool2d_with_indices.default" in targets(graph)) == indices


@pytest.mark.parametrize(
    ("args", "loops"), [(([2, 2],), True), (([3, 3], [1, 1], [1, 1]), True), (([5, 5],), False), (([3, 3], [2, 2], [0, 0], True), False)]
)
def test_large_windows_and_odd_divisors_stay_library_calls(args: tuple[Any, ...], loops: bool) -> None:
    r = Recorder(images()[0])
    graph = decompose(r.output(r(aten.avg_pool2d.default, r.nodes[0], *args)))
    r.check(graph)
    assert ("aten.avg_pool2d.default" not in targets(graph)) == loops


@pytest.mark.parametrize("scale", [2, 3, 1.5, (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_nearest_enlargement(scale: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=scale) + 1

    for x in images(torch.float32)[:3]:
        x = x.to(dtype)
        found, expected = magneto.optimize("inductor", nopython=True)(fn)(x), fn(x)
        assert found.stride() == expected.stride() and torch.equal(found, expected)


@pytest.mark.parametrize(("size", "loops"), [([18, 80], True), ([9, 120], True), ([10, 40], False), ([4, 20], False)])
def test_only_whole_factors_are_loops(size: list[int], loops: bool) -> None:
    r = Recorder(images()[0])
    graph = decompose(r.output(r(aten.upsample_nearest2d.default, r.nodes[0], size)))
    r.check(graph)
    assert ("aten.upsample_nearest2d.default" not in targets(graph)) == loops


# ---- gradients, as on a GPU ----------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from magneto.prims.decompositions import pooling

    monkeypatch.setattr(pooling, "on_gpu", lambda x: True)


WINDOWS: list[tuple[Any, ...]] = [
    ([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([3, 3], [1, 1], [1, 1]), ([1, 3], [2, 1], [0, 1]), ([2, 2], [3, 3]), ([3, 3], [2, 2], [1, 1], True),
]  # fmt: skip


def no_library_calls(graph: Any) -> None:
    assert not [name for name in targets(graph) if name.startswith("aten.")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("args", WINDOWS, ids=str)
def test_gradients_of_maxima(args: tuple[Any, ...], dtype: torch.dtype, gpu: None) -> None:
    size, step, pad, ceil = (*args, [0, 0], False)[:4] if len(args) < 3 else (*args, False)[:4]
    for x in images(dtype):
        values, indices = aten.max_pool2d_with_indices(x, size, step, pad, [1, 1], ceil)
        r = Recorder(torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(values), x, indices)
        g, v, i = r.nodes
        graph = decompose(r.output(r(aten.max_pool2d_with_indices_backward.default, g, v, size, step, pad, [1, 1], ceil, i)))
        no_library_calls(graph)
        check_sums(r, graph)


def last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last)


def check_sums(r: Recorder, graph: Any) -> None:
    """As `check`; the library's kernels on the CPU add up in the tensors' own type, so that half types are compared with what it makes of floats."""
    (old,) = r.graph.output_node().args[0]
    args = torch.fx.node.map_arg(old.args, lambda n: v.float() if (v := r.values[n]).is_floating_point() else v)
    (found,) = run_graph(graph, r.inputs)
    torch.testing.assert_close(found, old.target(*args).to(found.dtype))
    assert r.values[old].stride() == graph.output_node().args[0][0].meta["val"].strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("args", [*WINDOWS[:5], ([3, 3], [2, 2], [1, 1], False, True, 7)], ids=str)
def test_gradients_of_averages(args: tuple[Any, ...], dtype: torch.dtype, gpu: None) -> None:
    rest = (*args, *([0, 0], False, True, None)[len(args) - 2 :])
    for x in images(dtype):
        grad = torch.randn(aten.avg_pool2d(x, *args).shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        r = Recorder(grad, x)
        graph = decompose(r.output(r(aten.avg_pool2d_backward.default, *r.nodes, *rest)))
        no_library_calls(graph)
        check_sums(r, graph)


@pytest.mark.parametrize("size", [[18, 80], [9, 120], [27, 40]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_enlargement(size: list[int], dtype: torch.dtype) -> None:
    for memory in (torch.contiguous_format, torch.channels_last):
        r = Recorder(torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype).to(memory_format=memory))
        graph = decompose(r.output(r(aten.upsample_nearest2d_backward.default, r.nodes[0], size, [2, 3, 9, 40])))
        no_library_calls(graph)
        check_sums(r, graph)


def test_on_the_cpu_windows_that_meet_go_to_the_library_channels_last() -> None:
    x = torch.randn(2, 3, 12, 16)
    for given, size, step, loops in (
        (x, [2, 2], [2, 2], True), (last(x), [2, 2], [2, 2], True), (x, [3, 3], [1, 1], True), (last(x), [3, 3], [1, 1], False),
    ):  # fmt: skip
        r = Recorder(aten.avg_pool2d(given, size, step), given)
        graph = decompose(r.output(r(aten.avg_pool2d_backward.default, *r.nodes, size, step, [0, 0], False, True, None)))
        assert (targets(graph) != ["aten.avg_pool2d_backward.default"]) is loops
        if loops:
            check_sums(r, graph)


# ---- maxima with indices, as on a GPU ------------------------------------------------------------------------------------

TRAINED: list[tuple[Any, ...]] = [
    ((3, 3), (2, 2), (1, 1), (1, 1), False), ((2, 2), (2, 2), (0, 0), (1, 1), False), ((3, 2), (1, 2), (1, 1), (2, 1), False), ((3, 3), (2, 2), (1, 1), (1, 1), True),
    ((2, 2), (3, 3), (0, 0), (1, 1), True), ((3, 3), (1, 1), (1, 1), (2, 2), True), ((1, 3), (2, 1), (0, 1), (1, 1), False),
]  # fmt: skip


def numbers(dtype: torch.dtype) -> list[torch.Tensor]:
    """Many equal ones; several NaN in one window, at edges; windows of -inf alone."""
    x = torch.randn(2, 3, 9, 12, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 0], x[0, 1, 3, 5], x[0, 1, 4, 4:6], x[1, 2, 0, 0], x[1, 1, -1, -1] = (
        -float("inf"),
        float("nan"),
        float("nan"),
        float("nan"),
        float("nan"),
    )
    return [images(dtype)[0], x, x.to(memory_format=torch.channels_last), x[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("args", TRAINED, ids=str)
def test_maxima_and_their_gradients(args: tuple[Any, ...], dtype: torch.dtype, gpu: None) -> None:
    """Indices that somebody sees are eager's; those that only a gradient reads are places in the windows."""

    def train(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d((x * 2).relu(), *args) * 3

    both = magneto.optimize("inductor", nopython=True)(lambda x: F.max_pool2d(x, *args, return_indices=True))
    trained = magneto.optimize("inductor", nopython=True)(train)
    for x in numbers(dtype):
        for found, wanted in zip(both(x), F.max_pool2d(x, *args, return_indices=True), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            assert found.stride() == wanted.stride()
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, wanted = trained(a), train(b)
        weight = torch.randint(-3, 4, wanted.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        found.backward(weight)
        wanted.backward(weight)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "pool", [lambda x: F.max_pool1d(x[0], 3, 2, 1), lambda x: F.max_pool3d(x, 2), lambda x: F.max_pool3d(x, (1, 3, 3), 2, (0, 1, 1))]
)
def test_one_and_three_dimensions(pool: Callable[[torch.Tensor], torch.Tensor], gpu: None) -> None:
    x = images()[0]
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = magneto.optimize("inductor", nopython=True)(pool)(a), pool(b)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_a_training_graph_keeps_a_byte_for_each_maximum(gpu: None) -> None:
    """Norm, relu and pool are one kernel that writes the maxima and their places; neither indices nor what the relu gives are in memory."""
    from magneto.aot_autograd.decomposed import decompose_joint
    from magneto.aot_autograd.joint import trace_joint
    from magneto.aot_autograd.partition import partition
    from magneto.inductor.loops.ir import LibraryCall
    from magneto.inductor.lower import lower_graph
    from magneto.inductor.schedule.kernel import FusedKernel
    from magneto.inductor.schedule.schedule import schedule
    from magneto.inductor.schedule.split import split_reductions

    def stem(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = torch.relu(F.batch_norm(F.conv2d(x, w, stride=2, padding=3), None, None, scale, bias, training=True))
        return F.conv2d(F.max_pool2d(x, 3, 2, 1), v)

    inputs = torch.randn(4, 3, 256, 256), torch.randn(16, 3, 7, 7), torch.randn(16), torch.randn(16), torch.randn(8, 16, 1, 1)
    cut = partition(decompose_joint(trace_joint(torch.fx.symbolic_trace(stem), [t.requires_grad_(k > 0) for k, t in enumerate(inputs)])))
    kept = [node.meta["val"] for node in cut.forward.output_node().args[0]]
    assert [(m.shape, m.dtype) for m in kept if m.dtype not in (torch.float32,)] == [((4, 16, 64, 64), torch.int8)]
    for graph in (cut.forward, cut.backward):
        plan = schedule(split_reductions(lower_graph(graph, on_gpu=True)), training=True)
        assert not [step for step in plan.steps if isinstance(step, LibraryCall) and "pool" in str(step.op)]
        written = [[plan.buffers[n].shape for n in step.stored] for step in plan.steps if isinstance(step, FusedKernel)]
        if graph is cut.forward:
            assert [shapes for shapes in written if any(len(s) == 4 for s in shapes)] == [[(4, 16, 64, 64)] * 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(3, 5), (9, 40), (1, 8), (2, 8)], ids=str)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_averages_of_equal_parts(size: tuple[int, int], dtype: torch.dtype, where: str, request: pytest.FixtureRequest) -> None:
    if where == "cuda":
        request.getfixturevalue("gpu")
    for x in images(dtype)[:4]:
        if x.shape[-2] % size[0] or x.shape[-1] % size[1]:
            r = Recorder(x)
            assert "aten._adaptive_avg_pool2d.default" in targets(
                decompose(r.output(r(aten._adaptive_avg_pool2d.default, r.nodes[0], size)))
            )
            continue
        r = Recorder(x, torch.randn(*x.shape[:-2], *size, generator=torch.Generator().manual_seed(1)).to(dtype))
        for op, nodes in (
            (aten._adaptive_avg_pool2d.default, (r.nodes[0], size)),
            (aten._adaptive_avg_pool2d_backward.default, r.nodes[::-1]),
        ):
            one = Recorder(*r.inputs)
            graph = decompose(one.output(one(op, *[one.nodes[r.nodes.index(n)] if n in r.nodes else n for n in nodes])))
            no_library_calls(graph)
            check_sums(one, graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [[1, 1], [2, 4], [4, 2]], ids=str)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_adaptive_maxima(size: list[int], dtype: torch.dtype, where: str, request: pytest.FixtureRequest) -> None:
    """On the CPU with their places where one window is a whole image: the library takes others."""
    if where == "cuda":
        request.getfixturevalue("gpu")
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 0, 1, 2:4], x[0, 1, 0, 0], x[1, 0], x[1, 2, 3, 3] = torch.nan, torch.inf, 2.0, torch.nan
    x[1, 1] = -torch.inf
    for given in (x, x.to(memory_format=torch.channels_last), x[0]):
        r = Recorder(given)
        values, places = aten.adaptive_max_pool2d(given, size)
        found = r(aten.adaptive_max_pool2d.default, r.nodes[0], size)
        wanted = (values, places) if where == "cuda" or size == [1, 1] else (values,)
        parts = [r._keep(r.graph.call_function(operator.getitem, (found, k)), t) for k, t in enumerate(wanted)]
        graph = decompose(r.output(*parts))
        no_library_calls(graph)
        for node, ours, eagers in zip(graph.output_node().args[0], run_graph(graph, r.inputs), wanted, strict=True):
            torch.testing.assert_close(ours, eagers, rtol=0, atol=0, equal_nan=True)
            assert node.meta["val"].strides == eagers.stride()


def test_adaptive_maxima_of_unequal_windows_stay_the_librarys(gpu: None) -> None:
    r = Recorder(torch.randn(2, 3, 5, 8))
    graph = decompose(r.output(r(aten.adaptive_max_pool2d.default, r.nodes[0], [2, 2])))
    assert "aten.adaptive_max_pool2d.default" in targets(graph)


OF_A_GPU: dict[str, Callable[[torch.Tensor], Any]] = {
    "large windows apart": lambda x: F.max_pool2d(x, (3, 8)),
    "large windows apart, a rest": lambda x: F.max_pool2d(x, (2, 11)),
    "averages of large windows apart": lambda x: F.avg_pool2d(x, (3, 8)),
    "averages of large windows apart, a rest and a divisor": lambda x: F.avg_pool2d(x, (2, 11), divisor_override=5),
    "one dimension": lambda x: F.max_pool1d(x[..., 0, :], 20),
    "averages of one dimension": lambda x: F.avg_pool1d(x[..., 0, :], 19),
    "averages of three dimensions": lambda x: F.avg_pool3d(x, (1, 3, 3), 2, (0, 1, 1)),
    "averages of three dimensions, inside": lambda x: F.avg_pool3d(x, (1, 3, 3), 2, (0, 1, 1), ceil_mode=True, count_include_pad=False),
    "local response norm": lambda x: F.local_response_norm(x, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_A_GPU)
def test_what_a_gpu_has_as_loops(name: str, dtype: torch.dtype, gpu: None) -> None:
    if dtype is torch.bfloat16 and ("three" in name or "norm" in name):
        pytest.skip("eager has no such kernel on a CPU")
    compiled = magneto.optimize("inductor", nopython=True)(OF_A_GPU[name])
    with torch.no_grad():
        for x in images(dtype)[:3]:
            found, wanted = compiled(x), OF_A_GPU[name](x)
            assert found.stride() == wanted.stride() and found.dtype is wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=1e-6)
        if name.startswith("large"):
            y = images(dtype)[0].clone()
            y[0, 0], y[0, 1, 3, 5], y[1, 1] = -float("inf"), float("nan"), -0.0
            torch.testing.assert_close(compiled(y), OF_A_GPU[name](y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.max_pool2d_with_indices.default, ([3, 8],)),
        (aten.avg_pool2d.default, ([3, 8],)),
        (aten.avg_pool3d.default, ([1, 3, 3], [1, 2, 2])),
    ],
)
def test_on_a_gpu_these_are_no_library_calls(target: Any, args: tuple[Any, ...], gpu: None) -> None:
    r = Recorder(images()[0])
    node = r(target, r.nodes[0], *args)
    graph = decompose(r.output(r(operator.getitem, node, 0) if "max" in str(target) else node))
    r.check(graph)
    assert str(target) not in targets(graph)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [[2, 3, 7, 10], [1, 1, 1, 5], [3, 2, 4, 1]], ids=str)
def test_grids_of_matrices(size: list[int], corners: bool, gpu: None) -> None:
    theta = torch.randn(size[0], 2, 3, generator=torch.Generator().manual_seed(1))
    r = Recorder(theta)
    node = r(aten.affine_grid_generator.default, r.nodes[0], size, corners)
    graph = decompose(r.output(node))
    assert not [name for name in targets(graph) if name.startswith("aten.")]
    (found,), wanted = run_graph(graph, r.inputs), r.values[node]
    exact = aten.affine_grid_generator(theta.double(), size, corners)
    assert graph.output_node().args[0][0].meta["val"].strides == wanted.stride() and found.dtype is wanted.dtype  # type: ignore[index, union-attr]
    assert (found - exact).abs().max() <= 2 * (wanted - exact).abs().max() + 3e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exponent", [3, 4, 5, 6, 7, 8, -3, -4, -6, 4.0, -3.0])
def test_whole_powers(exponent: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU by products; float32 within four units of float64, as the library's are there."""
    from magneto.prims.decompositions import pointwise

    monkeypatch.setattr(pointwise, "on_gpu", lambda x: True)
    x = torch.cat([torch.randn(500) * 3, torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-3, -1e4])]).to(
        dtype
    )
    found, wanted = magneto.optimize("inductor", nopython=True)(lambda x: x**exponent)(x), x**exponent
    assert found.dtype is wanted.dtype
    narrow = {torch.float32: 5e-7, torch.float64: 1e-15, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(found, wanted, rtol=narrow, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() & (wanted == 0), wanted.signbit() & (wanted == 0))
