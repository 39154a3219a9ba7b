"""Lowering of hand-built prim graphs: values against eager through the interpreter, and what becomes of them."""

from __future__ import annotations

import pytest
import torch

from magneto.inductor.loops.ir import LibraryCall, Pointwise, Reduction, ViewOf, reads
from magneto.inductor.lower import CannotLower, lower_graph
from tests.inductor.loops.interp import run_program
from tests.inductor.lower.prim_graphs import Graph, check

aten = torch.ops.aten


def kinds(program) -> str:
    """One letter per node: p r l."""
    return "".join({Pointwise: "p", Reduction: "r", LibraryCall: "l"}[type(n)] for n in program.nodes)


def test_chain_is_one_body() -> None:
    g = Graph()
    x, y = g.input(torch.randn(3, 4)), g.input(torch.randn(3, 4))
    g.output(g.tanh(g.add(g.mul(x, y), 2.0)))
    program = check(g)
    assert kinds(program) == "p"
    assert program.nodes[0].name == "buf0" and reads(program.nodes[0]) == ("x0", "x1")


def test_views_do_not_copy() -> None:
    g = Graph()
    x = g.input(torch.randn(2, 3, 4))
    v = g.reshape(g.transpose(g.reshape(x, (2, 12)), (1, 0)), (3, 4, 2))
    g.output(g.exp(g.flip(g.slice(v, (0, 1, 0), (3, 4, 2), (1, 2, 1)), (0,))))
    assert kinds(check(g)) == "p"


def test_transposed_weight_is_a_view_argument() -> None:
    g = Graph()
    x, w = g.input(torch.randn(5, 8)), g.input(torch.randn(6, 8))
    g.output(g.call(aten.mm.default, x, g.transpose(w, (1, 0))))
    program = check(g)
    assert kinds(program) == "l"
    assert program.nodes[0].args[1] == ViewOf("x1", (8, 6), (1, 8), 0, torch.float32)
    assert program.nodes[0].out_op is aten.mm.out


def test_heads_are_split_without_a_copy_but_merged_with_one() -> None:
    g = Graph()
    x, w = g.input(torch.randn(10, 8)), g.input(torch.randn(8, 8))
    q = g.transpose(g.reshape(g.call(aten.mm.default, x, w), (2, 5, 4, 2)), (0, 2, 1, 3))
    a = g.call(aten.scaled_dot_product_attention.default, q, q, q)
    merged = g.reshape(g.transpose(a, (0, 2, 1, 3)), (10, 8))
    g.output(g.call(aten.mm.default, merged, w))
    program = check(g)
    assert kinds(program) in ("llpl", "lll")  # eager's strides of the attention decide whether merging is free
    assert program.nodes[1].args[0] == ViewOf("buf0", (2, 4, 5, 2), (40, 2, 8, 1), 0, torch.float32)


def test_outputs_keep_eager_strides() -> None:
    g = Graph()
    x = g.input(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    y = g.add(x, 1.0)
    g.output(y, g.transpose(y, (0, 2, 3, 1)), g.reshape(x, (2, 60)))
    check(g)


def test_outputs_have_memory_of_their_own() -> None:
    g = Graph()
    x = g.input(torch.randn(4, 6))
    t, y = g.transpose(x, (1, 0)), g.exp(x)
    g.output(t, y, g.reshape(y, (24,)), y, x)
    program = check(g)
    names = [o.buffer for o in program.outputs]
    assert names[0] != "x0" and names[1] == names[3] != names[2] and names[4] == "x0"
    relaxed = check(g, alias_outputs=(0, 2))
    assert [o.buffer for o in relaxed.outputs] == ["x0", "buf0", "buf0", "buf0", "x0"]


def test_softmax_keeps_the_exponential() -> None:
    g = Graph()
    x = g.input(torch.randn(6, 16))
    e = g.exp(g.sub(x, g.broadcast_in_dim(g.amax(x, (1,)), (6, 16), (0,))))
    g.output(g.div(e, g.broadcast_in_dim(g.sum(e, (1,)), (6, 16), (0,))))
    assert kinds(check(g)) == "rprp"


@pytest.mark.parametrize("correction", [0, 1, 2, 7])
@pytest.mark.parametrize("dims", [(1,), (0, 2), (0, 1, 2), (3,)])
def test_var(dims: tuple[int, ...], correction: float) -> None:
    g = Graph()
    x = g.input(torch.randn(3, 4, 5, 1))
    v = g.var(x, dims, correction)
    g.output(g.item(v, 0), g.item(v, 1))
    check(g)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.float16])
def test_reductions(name: str, dims: tuple[int, ...], dtype: torch.dtype) -> None:
    g = Graph()
    x = g.input((torch.rand(3, 1, 4) * 3).to(dtype))
    g.output(getattr(g, name)(x, dims))
    check(g, 1e-2 if dtype.itemsize == 2 else 1e-5)


def chosen(g: Graph, place: torch.Tensor, value: torch.Tensor, each: bool = False):
    """(4, 3, 7): `value` where an index along the second dimension is `place`; `each`: the value differs along it too."""
    along = g.broadcast_in_dim(g.iota(3, place.dtype, place.device), (4, 3, 7), (1,))
    spread = (0, 1, 2) if each else (0, 2)
    return g.where(
        g.eq(g.broadcast_in_dim(g.input(place), (4, 3, 7), (0, 2)), along), g.broadcast_in_dim(g.input(value), (4, 3, 7), spread), 0.0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_that_meets_one_element_is_no_reduction(dtype: torch.dtype) -> None:
    """Places outside choose nothing, infinities reach their row alone, and -0 becomes 0."""
    g = Graph()
    place, value = torch.arange(28).reshape(4, 7) % 5 - 1, torch.randn(4, 7).to(dtype)
    value[0, :4] = torch.tensor([float("inf"), -0.0, float("nan"), float("inf")])
    x, y, z = (chosen(g, place.to(kind), value) for kind in (torch.int64, torch.int32, torch.int64))
    g.output(g.sum(x, (1,)), g.sum(g.transpose(y, (1, 2, 0)), (0,)), g.sum(g.convert_element_type(z, torch.float64), (1,)))
    program = check(g)
    assert kinds(program) == "ppp"
    assert not any(found[0, 1].signbit() for found in run_program(program, *g.inputs)[::2])


def test_other_sums_of_chosen_elements_are_reductions() -> None:
    g = Graph()
    place, each = torch.arange(28).reshape(4, 7) % 3, torch.randn(4, 3, 7)
    of_one = [(g.sum, (1, 2)), (g.sum, (0,)), (g.amax, (1,)), (g.prod, (1,))]
    g.output(g.sum(chosen(g, place, each, True), (1,)), *[reduced(chosen(g, place, each[:, 0]), dims) for reduced, dims in of_one])
    assert kinds(check(g)) == "rrrrr"


def test_any_all_arg() -> None:
    g = Graph()
    x = g.input(torch.tensor([[0.0, 2.0, float("nan")], [0.0, 0.0, 0.0], [5.0, 5.0, 1.0]]))
    b = g.gt(x, 0.5)
    g.output(g.any(b, (1,)), g.all(b, (0, 1)), g.argmax(x, 1), g.argmin(x, 0), g.amax(x, (1,)))
    check(g)


def test_half_sum_accumulates_in_float32() -> None:
    g = Graph()
    x = g.input(torch.full((4096,), 0.1, dtype=torch.bfloat16))
    g.output(g.sum(x, (0,)))
    program = check(g, 1e-2)
    assert program.nodes[0].acc_dtype is torch.float32 and program.nodes[0].dtype is torch.bfloat16


def test_cat_of_few_and_of_many() -> None:
    g = Graph()
    xs = [g.input(torch.randn(2, n, 3)) for n in (1, 0, 4, 2)]
    g.output(g.exp(g.cat(xs, 1)))
    assert kinds(check(g)) == "p"
    g = Graph()
    xs = [g.input(torch.randn(2, n, 3)) for n in (1, 2, 3, 4, 5)]
    g.output(g.exp(g.cat(xs, 1)))
    assert kinds(check(g)) == "p"
    for sizes, dim, made in (
        ([6] * 5, 1, "l"),
        ([1] * 5, 2, "p"),
        ([1] * 9, 2, "p"),
        ([1] * 10, 2, "l"),
    ):  # runs of 18 elements, and of one
        g = Graph()
        g.output(g.cat([g.input(torch.randn(2, n, 3) if dim == 1 else torch.randn(2, 3, n)) for n in sizes], dim))
        assert kinds(check(g)) == made


def test_slice_of_cat_reads_one_piece() -> None:
    g = Graph()
    a, b = g.input(torch.randn(2, 3)), g.input(torch.randn(2, 4))
    g.output(g.exp(g.slice(g.cat([a, b], 1), (0, 3), (2, 6), (1, 1))))
    assert reads(check(g).nodes[0]) == ("x1",)


def test_pad() -> None:
    g = Graph()
    x = g.input(torch.randn(3, 4))
    p = g.pad(g.exp(x), (0, 1), (2, 3), 7.5)
    g.output(g.sum(p, (1,)), g.reshape(p, (40,)))
    check(g)


def test_causal_mask_is_an_index_comparison() -> None:
    g = Graph()
    x = g.input(torch.randn(5, 5))
    i = g.iota(5, torch.int64, torch.device("cpu"))
    row, column = g.broadcast_in_dim(i, (5, 5), (0,)), g.broadcast_in_dim(i, (5, 5), (1,))
    minus = g.full((), float("-inf"), torch.float32, torch.device("cpu"))
    g.output(g.where(g.le(column, row), x, g.broadcast_in_dim(minus, (5, 5), ())))
    program = check(g)
    assert kinds(program) == "p" and "i1 < i0 + 1" in repr(program.nodes[0].body)


def test_lookups_are_fused_where_loops_read_them() -> None:
    g = Graph()
    table = g.input(torch.randn(9, 4))
    known = g.add(g.iota(5, torch.int64, torch.device("cpu")), 2)
    g.output(g.exp(g.index_select(table, 0, known)))
    assert kinds(check(g)) == "p"
    g = Graph()
    table, index = g.input(torch.randn(9, 4)), g.input(torch.tensor([1, 8, 0]))
    column = g.reshape(index, (3, 1))
    g.output(g.exp(g.index_select(table, 0, index)), g.gather(table, 0, column), g.sum(g.gather(table, 0, column), (0,)))
    assert kinds(check(g)) == "rpp"


def test_wrong_index_raises_eagers_error() -> None:
    g = Graph()
    table, index = g.input(torch.randn(9, 4)), g.input(torch.tensor([1, 8, 0]))
    g.output(g.index_select(table, 0, index), g.exp(g.index_select(table, 0, index)))
    from tests.inductor.loops.interp import run_program

    with pytest.raises(IndexError):
        run_program(lower_graph(g.fx), torch.randn(9, 4), torch.tensor([1, 9, 0]))


def test_addmm_bias_joins_the_epilogue() -> None:
    g = Graph()
    b, x, w = g.input(torch.randn(6)), g.input(torch.randn(5, 8)), g.input(torch.randn(8, 6))
    y = g.call(aten.addmm.default, b, x, w)
    g.output(g.tanh(g.reshape(y, (5, 3, 2))))
    program = check(g)
    assert kinds(program) == "lp" and program.nodes[0].op is aten.mm.default
    g = Graph()
    b, x, w = g.input(torch.randn(6)), g.input(torch.randn(5, 8)), g.input(torch.randn(8, 6))
    g.output(g.call(aten.addmm.default, b, x, w))
    assert check(g).nodes[0].op is aten.addmm.default


def test_library_call_gets_eager_strides() -> None:
    """A convolution's output layout follows its input's: an argument whose strides differ from eager's is copied."""
    g = Graph()
    x, w = g.input(torch.randn(2, 6, 6, 3)), g.input(torch.randn(4, 3, 3, 3))
    nchw = g.call(aten.clone.default, g.transpose(x, (0, 3, 1, 2)), memory_format=torch.contiguous_format)
    y = g.call(aten.convolution.default, nchw, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    g.output(g.maximum(y, g.broadcast_in_dim(g.full((), 0.0, torch.float32, torch.device("cpu")), (2, 4, 4, 4), ())))
    assert kinds(check(g)) == "plp"


def test_library_call_gets_a_row_that_all_share_dense() -> None:
    """A position bias: looked up with the heads last, made contiguous, and the same for all samples. Attention on a GPU refuses another last dimension."""
    g = Graph()
    table = g.input(torch.randn(16, 3))
    heads_first = g.call(
        aten.clone.default, g.transpose(g.reshape(table, (1, 4, 4, 3)), (0, 3, 1, 2)), memory_format=torch.contiguous_format
    )
    g.output(g.call(aten.logcumsumexp.default, g.broadcast_in_dim(heads_first, (5, 3, 4, 4), (0, 1, 2, 3)), 3))
    (call,) = [node for node in check(g).nodes if isinstance(node, LibraryCall)]
    assert call.args[0].strides == (0, 16, 4, 1)


def test_several_outputs_of_a_call() -> None:
    g = Graph()
    x = g.input(torch.randn(3, 8))
    top = g.call(aten.topk.default, x, 3)
    pool = g.call(aten.max_pool2d_with_indices.default, g.reshape(x, (1, 3, 2, 4)), [2, 2])
    g.output(g.exp(g.item(top, 0)), g.item(top, 1), g.item(pool, 0))
    assert kinds(check(g)) == "llp"


def test_shared_cheap_work_is_repeated_and_dear_work_is_kept() -> None:
    g = Graph()
    x = g.input(torch.randn(4, 4))
    cheap = g.mul(x, 2.0)
    g.output(g.exp(cheap), g.sin(cheap))
    assert kinds(check(g)) == "pp"
    g = Graph()
    x = g.input(torch.randn(4, 4))
    dear = g.erf(x)
    g.output(g.exp(dear), g.sin(dear))
    assert kinds(check(g)) == "ppp"


def test_mutating_call_comes_after_lazy_readers() -> None:
    g = Graph()
    buffer, x = g.input(torch.zeros(4)), g.input(torch.randn(4))
    doubled = g.add(buffer, 1.0)
    inputs = [t.clone() for t in g.inputs]
    g.call(aten.copy_.default, buffer, x)
    g.output(g.exp(doubled))
    g.inputs = inputs
    program = check(g)
    assert kinds(program) == "plp" and program.nodes[1].mutates == ("x0",)


def test_prim_without_a_loop_form_is_called() -> None:
    g = Graph()
    x = g.input(torch.randn(3, dtype=torch.complex64))
    g.output(g.mul(g.exp(x), x))
    assert kinds(check(g)) == "ll"


def test_constant_attribute() -> None:
    from torch import fx

    from magneto.graph.meta import TensorMeta

    g = Graph()
    x = g.input(torch.randn(3))
    root = torch.nn.Module()
    root.lifted = torch.arange(3.0)
    node = g.fx.get_attr("lifted")
    g.values[node] = root.lifted
    node.meta["val"] = TensorMeta.of(root.lifted)
    g.output(g.add(x, node))
    g.fx = fx.GraphModule(root, g.fx).graph
    assert [c.buffer.name for c in check(g).constants] == ["lifted"]


def test_empty_tensors() -> None:
    g = Graph()
    x = g.input(torch.randn(0, 4))
    g.output(g.exp(x), g.sum(x, (0,)), g.sum(x, (1,)), g.reshape(x, (4, 0)), g.cat([x, x], 0))
    check(g)


def test_unused_scalar_input_and_none_outputs() -> None:
    g = Graph()
    x = g.input(torch.randn(3))
    scalar = g.fx.placeholder("n")
    scalar.meta["val"] = 3
    g.inputs.append(3)
    g.output(None, g.exp(x), 5)
    assert check(g).inputs[1] is None


def test_nonsense_is_refused() -> None:
    g = Graph()
    x = g.input(torch.randn(3))
    g.output(x)
    g.fx.nodes  # noqa: B018
    bad = Graph()
    y = bad.input(torch.randn(3))
    bad.output(bad.call(torch.relu, y))
    with pytest.raises(CannotLower, match="neither a prim nor an ATen overload"):
        lower_graph(bad.fx)


def test_wide_bodies_are_bounded() -> None:
    g = Graph()
    x = g.input(torch.randn(4))
    y = x
    for _ in range(300):
        y = g.add(g.mul(y, 0.5), x)
    g.output(y)
    program = check(g)
    assert 5 <= len(program.nodes) <= 20


def test_dtypes_without_loops_are_viewed_and_cloned() -> None:
    g = Graph()
    x = g.input(torch.randn(3, 4, dtype=torch.complex64))
    g.output(g.transpose(x, (1, 0)), g.reshape(g.transpose(g.exp(x), (1, 0)), (12,)), g.reshape(x, (2, 6)))
    assert kinds(check(g)) == "lllll"


def test_repeated_dimensions_of_outputs_are_stored_once() -> None:
    g = Graph()
    x = g.input(torch.randn(3, 1))
    g.output(g.broadcast_in_dim(x, (3, 5), (0, 1)), g.broadcast_in_dim(g.exp(x), (2, 3, 5), (1, 2)))
    program = check(g)
    assert [n.ranges for n in program.nodes] == [(3, 1), (3, 1)]


def test_symbolic_sizes() -> None:
    """A graph whose metas have symbolic sizes lowers to loops over them."""
    from torch import fx

    from magneto.graph.meta import TensorMeta
    from magneto.symbolic import Sym
    from tests.inductor.loops.interp import run_program
    from tests.inductor.lower.prim_graphs import Prim

    s = Sym("s0", 2)
    graph = fx.Graph()

    def call(name: str, shape: tuple, strides: tuple, *args: object) -> fx.Node:
        node = graph.call_function(Prim(name), args)
        node.meta["val"] = TensorMeta(shape, strides, torch.float32)
        return node

    x = graph.placeholder("x")
    x.meta["val"] = TensorMeta((s, 4, 2), (8, 2, 1), torch.float32)
    flat = call("reshape", (s, 8), (8, 1), x, (s, 8))
    turned = call("transpose", (8, s), (1, 8), flat, (1, 0))
    e = call("exp", (8, s), (1, 8), turned)
    total = call("sum", (8,), (1,), e, (1,))
    wide = call("broadcast_in_dim", (8, s), (1, 0), total, (8, s), (0,))
    graph.output((call("div", (8, s), (1, 8), e, wide), call("reshape", (s * 8,), (1,), e, (s * 8,))))
    program = lower_graph(graph)
    value = torch.randn(3, 4, 2)
    result, line = run_program(program, value, sizes={"s0": 3})
    expected = value.reshape(3, 8).t().exp()
    torch.testing.assert_close(result, expected / expected.sum(1, keepdim=True))
    torch.testing.assert_close(line, expected.reshape(24))


def test_embedding_of_a_matrix_of_indices() -> None:
    g = Graph()
    table, index = g.input(torch.randn(9, 4)), g.input(torch.tensor([[1, 8], [0, 2]]))
    rows = g.call(aten.embedding.default, table, index)
    g.output(g.call(aten.embedding.default, table, index), g.sum(g.add(rows, 1.0), (2,)))
    assert kinds(check(g)) == "rp"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mul", "div", "add", "sub", "lt", "pow", "maximum"])
def test_numbers_beside_half_tensors_are_rounded_as_in_eager(name: str, dtype: torch.dtype) -> None:
    g = Graph()
    x = g.input(torch.randn(500).abs().to(dtype))
    if name == "maximum":
        g.output(g.maximum(x, g.full((500,), 0.1, dtype, torch.device("cpu"))))
    else:
        g.output(getattr(g, name)(x, 0.1 if name != "lt" else g.inputs[0][3].item() * (1 + 1e-4)))
    check(g, 0.0 if name != "pow" else 1e-2)


def test_every_prim_has_a_row() -> None:
    from magneto.inductor.lower import PRIM_ROWS
    from magneto.prims.table import PRIMS

    assert set(PRIMS) == set(PRIM_ROWS)


@pytest.mark.parametrize(
    "op", [aten.scatter.src, aten.scatter_add.default, aten.index_add.default, aten.index_copy.default, aten.index_put.default]
)
def test_what_is_written_in_place_is_no_other_argument(op) -> None:
    """The source is the same value: PyTorch refuses to write what it reads, and the region ran in eager once more."""
    g = Graph()
    y = g.mul(g.input(torch.randn(6, 4)), 2.0)
    flat, order = torch.randperm(6), torch.rand(6, 4).argsort(0)
    if op is aten.index_put.default:
        g.output(g.call(op, y, [g.input(flat)], y))
    else:
        g.output(g.call(op, y, 0, g.input(flat if "index" in str(op) else order), y))
    program = check(g)
    (call,) = [n for n in program.nodes if isinstance(n, LibraryCall) and n.mutates]
    assert len({view.buffer for view in call.views}) == 3
