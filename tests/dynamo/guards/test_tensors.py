"""TENSOR and DISTINCT rows: what DLPack tells, and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magneto import _C
from magneto.dynamo.guards.native import build_guards
from magneto.dynamo.guards.rows import GuardSet, Kind, Row, SizesRow, TensorRow
from magneto.dynamo.guards.source import Attr, InstanceDict, Item, Local
from magneto.dynamo.guards.tensors import dlpack_code, tensor_api
from magneto.graph.resize import form_of
from tests.dynamo.guards.oracle import Both, holds

X, Y, Z = Local(0, "x"), Local(1, "y"), Local(2, "z")


def tensor_row(t, requires_grad="own", **changes):
    values = dict(cls=type(t), dtype=t.dtype, device=t.device, shape=tuple(t.shape), strides=t.stride(), inference=t.is_inference())
    values["requires_grad"] = t.requires_grad if requires_grad == "own" else requires_grad
    return TensorRow(**{**values, **changes})


class Sub(torch.Tensor):
    pass


def inference_tensor():
    with torch.inference_mode():
        return torch.ones(3, 4)


def zoo():
    base = torch.arange(24.0).reshape(2, 3, 4)
    x = torch.ones(3, 4)
    z = torch.ones(3, 4, dtype=torch.complex64)
    return {
        "plain": x,
        "grad": torch.ones(3, 4, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(3, 4)),
        "frozen parameter": nn.Parameter(torch.ones(3, 4), requires_grad=False),
        "subclass": x.as_subclass(Sub),
        "transposed": torch.ones(4, 3).t(),
        "row strides": torch.ones(3, 8)[:, ::2],
        "expanded": torch.ones(1, 4).expand(3, 4),
        "offset": base[1],
        "other shape": torch.ones(4, 4),
        "scalar": torch.ones(()),
        "three": base,
        "empty": torch.empty(0, 4),
        "empty other": torch.empty(0, 3),
        "float64": x.double(),
        "bfloat16": x.bfloat16(),
        "float16": x.half(),
        "int8": x.to(torch.int8),
        "uint8": x.to(torch.uint8),
        "int1": torch.empty(3, 4, dtype=torch.int1),
        "uint7": torch.empty(3, 4, dtype=torch.uint7),
        "bool": x.bool(),
        "float8": x.to(torch.float8_e4m3fn),
        "complex": z,
        "conj": z.conj(),
        "neg": torch._neg_view(x),
        "imag": z.conj().imag,
        "inference": inference_tensor(),
        "zero": torch._efficientzerotensor((3, 4)),
        "sparse": x.to_sparse(),
        "csr": x.to_sparse_csr(),
        "meta": torch.empty(3, 4, device="meta"),
        "mkldnn": x.to_mkldnn(),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "not a tensor": 3,
    }


STRANGE = {"conj", "neg", "imag", "zero", "sparse", "csr", "mkldnn", "quantized", "nested", "not a tensor"}


@pytest.fixture(scope="module")
def tensors():
    return zoo()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the key set lies elsewhere: guards ask in Python, which is slower and as strict")
def test_this_torch_is_known():
    assert tensor_api().native
    assert tensor_api().keys


@pytest.mark.parametrize("name", sorted(set(zoo()) - STRANGE))
def test_each_against_each(name, tensors):
    t = tensors[name]
    both = Both((Kind.TENSOR, X, tensor_row(t)))
    for other, value in tensors.items():
        if other == "not a tensor":
            assert not both.holds(value)
            continue
        same = other == name
        if not same and other not in STRANGE:
            same = tensor_row(t) == tensor_row(value)
        assert both.holds(value) is same, other


@pytest.mark.parametrize("name", sorted(STRANGE - {"not a tensor", "nested"}))
def test_strange_tensors_never_hit(name, tensors):
    t = tensors[name]
    strides = t.stride() if t.layout is torch.strided else None
    row = TensorRow(type(t), t.dtype, t.device, tuple(t.shape), strides, None)
    assert not Both((Kind.TENSOR, X, row)).holds(t)


def test_dynamic_sizes():
    x = torch.ones(3, 4)
    both = Both((Kind.TENSOR, X, tensor_row(x, shape=(None, 4))))
    assert both.holds(x)
    assert both.holds(torch.ones(7, 4))
    assert not both.holds(torch.ones(7, 5))
    loose = Both((Kind.TENSOR, X, tensor_row(x, strides=None)))
    assert loose.holds(torch.ones(4, 3).t())
    half = Both((Kind.TENSOR, X, tensor_row(x, strides=(None, 1))))
    assert half.holds(torch.ones(3, 9)[:, :4])
    assert not half.holds(torch.ones(4, 3).t())


CHANGES_IN_PLACE = {
    "resized": lambda t: t.resize_(4, 3),
    "more dimensions": lambda t: t.resize_(3, 2, 2),
    "transposed": lambda t: t.t_(),
    "strides": lambda t: t.as_strided_((3, 4), (4, 0)),
    "dtype": lambda t: setattr(t, "data", t.double()),
    "same size of element": lambda t: setattr(t, "data", t.int()),
    "no memory": lambda t: t.untyped_storage().resize_(0),
    "conj": lambda t: setattr(t, "data", torch._neg_view(t.data)),
    "requires_grad": lambda t: t.requires_grad_(),
}


@pytest.mark.parametrize("name", CHANGES_IN_PLACE)
def test_changes_in_place(name):
    """A tensor that has fitted is compared word for word afterwards: nothing may change unseen."""
    t = torch.ones(3, 4)
    both = Both((Kind.TENSOR, X, tensor_row(t)))
    assert both.holds(t)
    CHANGES_IN_PLACE[name](t)
    assert not both.holds(t)
    assert both.holds(torch.zeros(3, 4))
    assert not both.holds(t)


def test_a_row_remembers_several_tensors_in_turn():
    base = torch.ones(3, 3, 4)
    both = Both((Kind.TENSOR, X, tensor_row(base[0])))
    for t in (base[0], base[1], base[2], base[0], torch.ones(3, 4), torch.ones(12).view(3, 4)):
        assert both.holds(t)
    many = torch.ones(1, 1, 1, 1, 3, 4)
    both = Both((Kind.TENSOR, X, tensor_row(many)))
    assert both.holds(many)
    many.resize_(1, 1, 1, 1, 4, 3)  # so many sizes lie outside of the tensor's own words
    assert not both.holds(many)


def test_requires_grad():
    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    assert Both((Kind.TENSOR, X, tensor_row(x, requires_grad=None))).holds(w)
    both = Both((Kind.TENSOR, X, tensor_row(w)))
    assert both.holds(w)
    assert both.holds(w * 2)
    assert not both.holds(x)
    w.requires_grad_(False)
    assert not both.holds(w)


def test_transformed_tensors_never_hit():
    seen = []

    def inside(t):
        seen.append(
            Both((Kind.TENSOR, X, TensorRow(torch.Tensor, torch.float32, torch.device("cpu"), (3,), (1,), None))).program.check((t,), ())
        )
        return t.sum()

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(inside)(torch.ones(3))
    torch.func.functionalize(inside)(torch.ones(3))
    assert seen == [False, False, False]
    inside(torch.ones(3))
    assert seen[-1]


def test_wrapper_subclasses_never_hit():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("user code")

    wrapper = Wrapper()
    row = TensorRow(Wrapper, torch.float32, torch.device("cpu"), (2, 2), (2, 1), None)
    assert not Both((Kind.TENSOR, X, row)).program.check((wrapper,), ())


def test_codes():
    cpu = torch.device("cpu")
    assert dlpack_code(torch.float32, cpu) == (2 | 32 << 8 | 1 << 16, (1, 0), False)
    assert dlpack_code(torch.int8, cpu)[2] and dlpack_code(torch.uint8, cpu)[2]
    assert not dlpack_code(torch.bool, cpu)[2]
    assert dlpack_code(torch.float32, torch.device("meta")) is None
    keys = {
        dlpack_code(dtype, cpu)[0]
        for dtype in (torch.float16, torch.bfloat16, torch.int16, torch.uint16, torch.int64, torch.float64, torch.complex64)
    }
    assert len(keys) == 7


def test_tensor_meta():
    t = torch.ones(3, 8)[1:, ::2]
    shape, strides, key, device, pointer = _C.tensor_meta(t)
    assert (shape, strides, device, pointer) == (tuple(t.shape), t.stride(), (1, 0), t.data_ptr())
    assert key == dlpack_code(t.dtype, t.device)[0]
    with pytest.raises(TypeError):
        _C.tensor_meta(3)
    with pytest.raises(RuntimeError):
        _C.tensor_meta(t.to_sparse())


# ---- memory


def test_distinct_memory():
    base = torch.zeros(10)
    a, b = torch.zeros(3), torch.zeros(3)
    row = (Kind.DISTINCT, X, (Y, Z))
    assert holds(row, a, b, base)
    assert not holds(row, a, b, a)
    assert not holds(row, a, b, a[:2])
    assert holds(row, base[:5], base[5:], a)
    assert not holds(row, base[:6], base[5:], a)
    assert not holds(row, base[::2], base[1::2], a)  # interleaved: not told apart
    assert not holds(row, base[:6], b, base[5:])
    assert holds(row, base[:5], base[:0], base[5:])
    assert holds(row, a, torch.empty(0), torch.empty(0))
    empty = torch.empty(0)
    assert not holds(row, a, empty, empty)
    assert not holds(row, a, a.detach(), b)
    assert not holds(row, a, b, b.view(3, 1).expand(3, 5))
    assert not holds(row, a, b.to_sparse(), base)
    assert holds(row, a, 3, "x")
    many = tuple(torch.zeros(2) for _ in range(100))
    wide = Both((Kind.DISTINCT, Local(0, "t0"), tuple(Local(i, f"t{i}") for i in range(1, 100))))
    assert wide.holds(*many)
    assert not wide.holds(*many[:99], many[17].t())


def test_distinct_flipped_memory():
    """Ranges are taken with the storage offset."""
    base = torch.zeros(4, 4)
    assert holds((Kind.DISTINCT, X, (Y,)), base[:2].t(), base[2:])
    assert not holds((Kind.DISTINCT, X, (Y,)), base[:, :2], base[:, 2:])


# ---- attributes of tensors


def test_attributes_of_tensors():
    w = nn.Parameter(torch.ones(2))
    none = Both((Kind.ID_IS, Attr(X, "grad"), None))
    assert none.holds(w)
    w.grad = torch.ones(2)
    assert not none.holds(w)
    grad = Both((Kind.TENSOR, Attr(X, "grad"), tensor_row(w.grad)))
    assert grad.holds(w)
    w.grad.resize_(3)
    assert not grad.holds(w)
    w.tag = 5
    assert holds((Kind.EQUALS, Item(InstanceDict(X), "tag"), 5), w)
    assert not holds((Kind.ID_IS, Attr(X, "grad"), None), torch.ones(2).as_subclass(Sub))
    with torch.device("cpu"):
        assert not holds((Kind.ID_IS, Attr(X, "grad"), None), torch.ones(2))


# ---- modules


SELF = Local(0, "self")


def module_rows(of, module):
    yield (Kind.TYPE_IS, of, type(module))
    table = InstanceDict(of)
    yield (Kind.ID_IS, Item(table, "training"), module.training)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield (Kind.LENGTH, Item(table, hooks), 0)
    yield (Kind.KEY_ABSENT, table, "forward")
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield (Kind.TENSOR, Item(Item(table, "_parameters"), name), tensor_row(parameter))
    for name, buffer in module._buffers.items():
        yield (Kind.TENSOR, Item(Item(table, "_buffers"), name), tensor_row(buffer))
    for name, child in module._modules.items():
        yield from module_rows(Item(Item(table, "_modules"), name), child)


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


@pytest.fixture
def both(net):
    made = Both(*module_rows(SELF, net))
    assert made.holds(net)
    return made


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the key set lies elsewhere: guards ask in Python, which is slower and as strict")
def test_steady_state_of_modules(net, both):
    before = both.program.n_precise
    assert both.program.check((net,), ())
    assert both.program.n_precise == before
    assert set(both.fast()) <= {"LOCAL", "PIN", "ENTRIES", "TYPE_IS", "TENSOR"}


class Patched(nn.Linear):
    pass


MUTATIONS = {
    "eval": lambda net: net.eval(),
    "eval of one": lambda net: net[3].eval(),
    "hook": lambda net: net[3][0].register_forward_hook(lambda *a: None),
    "pre hook": lambda net: net[0].register_forward_pre_hook(lambda *a: None),
    "parameter replaced": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(5, 3))),
    "parameter removed": lambda net: setattr(net[0], "bias", None),
    "parameter deleted": lambda net: delattr(net[0], "bias"),
    "data replaced": lambda net: setattr(net[3][0].weight, "data", torch.ones(2, 5)),
    "data of another dtype": lambda net: net.double(),
    "half": lambda net: net[3].to(torch.bfloat16),
    "frozen": lambda net: net[3][0].weight.requires_grad_(False),
    "resized": lambda net: net[2].running_mean.resize_(7),
    "other strides": lambda net: setattr(net[3][0].weight, "data", torch.ones(4, 2).t()),
    "buffer replaced": lambda net: setattr(net[2], "running_mean", torch.zeros(5)),
    "module replaced": lambda net: net.__setitem__(1, nn.GELU()),
    "module replaced deeper": lambda net: net[3].__setitem__(0, nn.Linear(4, 3)),
    "class": lambda net: setattr(net[0], "__class__", Patched),
    "forward patched": lambda net: setattr(net[0], "forward", lambda x: x),
    "dictionary": lambda net: setattr(net[0], "__dict__", nn.Linear(9, 9).__dict__),
    "parameter made a tensor": lambda net: net[0]._parameters.__setitem__("weight", torch.ones(4, 3)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_of_modules(net, both, name):
    MUTATIONS[name](net)
    assert not both.holds(net)


def test_training_steps_do_not_disturb(net, both):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = both.program.n_recorded
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert both.program.check((net,), ())
    assert both.program.n_recorded == before
    assert both.holds(net)


def test_load_state_dict_and_new_data_hit(net, both):
    net.load_state_dict(net.state_dict())
    assert both.holds(net)
    net[0].weight.data = torch.ones(4, 3)
    assert both.holds(net)
    net[0].weight = nn.Parameter(torch.ones(4, 3))
    assert both.holds(net)


def test_exports_come_from_pinned_registers(net):
    weight = Item(Item(InstanceDict(Item(Item(InstanceDict(SELF), "_modules"), "0")), "_parameters"), "weight")
    made = Both(*module_rows(SELF, net), exports=[weight])
    for _ in range(3):
        assert made.program.check((net,), (), values=True) == (net[0].weight,)
    net[0].weight = nn.Parameter(torch.ones(4, 3))
    assert made.program.check((net,), (), values=True) == (net[0].weight,)


def test_sizes_that_go_together():
    asked = []
    forms = (form_of((5, 3), (3, 1), {0: (0, 0)}), form_of((2, 5), (1, 2), {1: (0, 0)}))
    both = Both((Kind.SIZES, X, SizesRow((Y,), forms, ((2, 9),), (0,), lambda sizes: asked.append(sizes) or sizes[0] != 7)))
    for n in (5, 9, 2, 5):
        assert both.holds(torch.ones(n, 3), torch.ones(n, 2).t())
    for x, y in (
        (torch.ones(5, 3), torch.ones(4, 2).t()),  # not one symbol
        (torch.ones(5, 3), torch.ones(2, 5)),  # another layout
        (torch.ones(7, 3), torch.ones(7, 2).t()),  # refused
        (torch.ones(10, 3), torch.ones(10, 2).t()),  # out of bounds
        (torch.ones(1, 3), torch.ones(1, 2).t()),
        (torch.ones(5, 4)[:, :3], torch.ones(5, 2).t()),
        (torch.ones(5), torch.ones(5, 2).t()),
        (torch.ones(5, 3, 1), torch.ones(5, 2).t()),
        (torch.ones(5, 3), 5),
    ):
        assert not both.holds(x, y)
    assert set(asked) == {(5,), (9,), (2,), (7,)}


def test_the_same_sizes_are_not_asked_about_again():
    asked = []
    row = SizesRow(
        (), (form_of((5, 3), (3, 1), {0: (0, 0), 1: (1, 0)}),), ((2, None), (2, None)), (0, 1), lambda sizes: asked.append(sizes) or True
    )
    guards = GuardSet([Row(Kind.SIZES, X, row)])
    program = build_guards(guards)
    for n in (4, 4, 4, 6, 6, 4):
        assert program.check((torch.ones(n, 3),), ())
    assert asked == [(4, 3), (6, 3), (4, 3)]
