"""Custom autograd functions in training: the program's own backward, in a captured graph."""

# ruff: noqa

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import magneto
from tests.compare import assert_equal
from tests.python.gradients import P, compare

SAID: list[str] = []
FACTOR = 3.0
TENSOR = torch.tensor([1.0, 2.0, 3.0])
COUNTS = {"forward": 0}


class Exp(Function):
    """A gradient that is not exp's, so that a lost backward shows."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y * 2


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.scale * g, None


class Same(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 7


class Pair(Function):
    """setup_context, two tensors and a number; one result is not differentiable."""

    @staticmethod
    def forward(a, b, k):
        return a * b, (a + b).detach(), k

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, k = inputs
        ctx.save_for_backward(a, b)
        ctx.mark_non_differentiable(output[1])
        ctx.k = k

    @staticmethod
    def backward(ctx, g, h, _):
        a, b = ctx.saved_tensors
        return g * b * 3 if ctx.needs_input_grad[0] else None, g * a * ctx.k if ctx.needs_input_grad[1] else None, None


class Double(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 5


class Outer(Function):
    """A backward that calls another custom function, and forward with modes and control flow."""

    scale = 0.25

    @staticmethod
    def forward(ctx, x, shapes, flag=True):
        assert not torch.is_grad_enabled()
        ctx.shapes = shapes
        ctx.save_for_backward(x, None)
        return Exp.apply(x) if flag else x.sum(shapes[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, nothing = ctx.saved_tensors
        assert nothing is None
        for _ in ctx.shapes:
            g = Exp.apply(g * Outer.scale)
        return g * x, None, None


class Silent(Function):
    """No gradient at all for one of two inputs; gradients not made for results without one."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * y

    @staticmethod
    def backward(ctx, g):
        if g is None:
            return None, None
        return None, g * ctx.saved_tensors[0]


class Unmaterialised(Function):
    """A gradient that is missing is not the same as zeros."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        places = (x > 0).long()
        ctx.mark_non_differentiable(places)
        return x * y, x + y, places

    @staticmethod
    def backward(ctx, g, h, nothing):
        assert nothing is None
        x, y = ctx.saved_tensors
        if h is None:
            return g * 100, None
        if g is None:
            return h * 1000, h
        return g * y + h, g * x + h


class Says(Function):
    @staticmethod
    def forward(ctx, x):
        SAID.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class SaysBack(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        SAID.append("backward")
        return g * 2


class Reads(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin() * FACTOR

    @staticmethod
    def backward(ctx, g):
        return g * FACTOR


class Inherited(Exp):
    @classmethod
    def make(cls, x):
        return cls.apply(x)

    @staticmethod
    def backward(ctx, g):
        return Exp.backward(ctx, g) + 1


class Amp(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g * 2


class Values(Function):
    """Reads numbers: cannot be captured inside."""

    @staticmethod
    def forward(ctx, x):
        ctx.n = x.sum().item()
        return x * ctx.n

    @staticmethod
    def backward(ctx, g):
        return g * ctx.n * 2


class Wrong(Function):
    @staticmethod
    def forward(ctx, x):
        raise ValueError("never")

    @staticmethod
    def backward(ctx, g):
        return g


exp = Exp.apply


def simple(x):
    return Exp.apply(x.sin()).cos()


def twice(x):
    return Exp.apply(Exp.apply(x)) + exp(x)


def reverse_inside(x):
    return Reverse.apply(x * 2, 0.5).exp()


def same_inside(x):
    y = x * 2
    z = Same.apply(y)
    return z.sin() + y, z is y


def pair(a, b):
    return Pair.apply(a, b, 4)


def pair_of_one(a, b):
    x, y, k = Pair.apply(a, b.detach(), 4)
    return x + y * k


def dirty(x):
    y = x * 3
    z = Double.apply(y)
    return z + 1, z is y


def outer(x):
    return Outer.apply(x, (0, 1))


def silent(x, y):
    return Silent.apply(x, y)


def inherited(x):
    return Inherited.make(x) + Inherited.apply(x)


def amp(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return Amp.apply(x @ w.t(), w)


def amp_outside(x, w):
    return Amp.apply(x, w)


def closure(x):
    def run(f, *args):
        return f(*args)

    return run(Exp.apply, x) * run(lambda v: Reverse.apply(v.sin(), 2.0), x)


def in_a_loop(x):
    for n in range(3):
        x = Reverse.apply(x.sin(), float(n + 1)) * 2
    return x


def without_gradients(x):
    with torch.no_grad():
        a = Exp.apply(x)
    return a + Exp.apply(x), Exp.apply(x.detach())


def same_without_gradients(x):
    y = x.detach()
    z = Same.apply(y)
    return z is y, z + 1


@pytest.mark.parametrize(
    "fn, shapes",
    [
        (simple, [(3, 4)]),
        (twice, [(3, 4)]),
        (reverse_inside, [(3, 4)]),
        (same_inside, [(3, 4)]),
        (pair, [(3, 4), (3, 4)]),
        (pair, [(3, 4), (4,)]),
        (pair_of_one, [(3, 4), (3, 4)]),
        (dirty, [(3, 4)]),
        (outer, [(3, 4)]),
        (silent, [(3,), (3,)]),
        (inherited, [(3,)]),
        (amp, [(4, 4), (4, 4)]),
        (amp_outside, [(4, 4), (4, 4)]),
        (closure, [(3, 4)]),
        (in_a_loop, [(3, 4)]),
        (without_gradients, [(3, 4)]),
        (same_without_gradients, [(3, 4)]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_captured(fn, shapes):
    compare(fn, *[P(*shape) for shape in shapes], graphs=1)


def test_inductor():
    compare(in_a_loop, P(3, 4), graphs=1, backends=("inductor",))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.apply_exp = Exp.apply

    def forward(self, x):
        return self.apply_exp(Reverse.apply(self.linear(x).tanh(), 2.0))


def test_in_a_module():
    torch.manual_seed(0)
    layer = Layer()
    compare(lambda x, layer: layer(x), P(2, 4), layer, graphs=1)


def _of_input(x):
    return Reverse.apply(x, 2.0)


def _same_of_input(x):
    return Same.apply(x), x


def _both(x):
    y = x * 1
    return y, Reverse.apply(y, 2.0)


@pytest.mark.filterwarnings("default::magneto.base.errors.MagnetoWarning")
@pytest.mark.parametrize("fn", [_of_input, _same_of_input, _both])
def test_result_on_memory_of_another_tensor(fn):
    compare(fn, P(3), graphs=1, fallback="memory")


def _says(x):
    return Says.apply(x) * 2


def _says_back(x):
    return SaysBack.apply(x) * 2


def _counts(x):
    made = []

    class_ = Exp
    made.append(class_)
    return class_.apply(x) * len(made)


def _writes_input(x, y):
    return Double.apply(y.view(-1)), x * 2


def _reads(x):
    return Reads.apply(x) * 2


class ReadsTensor(Reads):
    @staticmethod
    def backward(ctx, g):
        return g * TENSOR


def _reads_tensor(x):
    return ReadsTensor.apply(x) * 2


class ManyUnmaterialised(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3, x * 4, x * 5

    @staticmethod
    def backward(ctx, *gradients):
        return sum(g for g in gradients if g is not None)


def _many_unmaterialised(x):
    return ManyUnmaterialised.apply(x)


def _values(x):
    return Values.apply(x.sin()) + 1


def _wrong(x):
    return Wrong.apply(x * 2)


@pytest.mark.parametrize(
    "fn, args, reason",
    [
        (_says, (P(3),), "side effect"),
        (_says_back, (P(3),), "side effect"),
        (_reads_tensor, (P(3),), "may change before it runs"),
        (_many_unmaterialised, (P(3),), "None in place of many gradients"),
        (_values, (P(3),), "item"),
        (_wrong, (P(3),), "it raises ValueError('never')"),
        (_writes_input, (P(3), torch.ones(2, 2)), "writes to a tensor made outside"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_breaks(fn, args, reason):
    if fn is _writes_input:
        args = (args[0], args[1].clone())
        fn = lambda x, y: _writes_input(x, (y + x.sum() * 0).detach())  # noqa: E731
        compare(fn, *args, graphs=None)
    else:
        compare(fn, *args, graphs=None, breaks=reason, said=SAID)


def test_writes_to_a_leafs_view():
    def fn(x):
        return Double.apply(x.view(-1)) * 2

    compare(fn, P(3), graphs=None)


def test_captured_value_in_a_list_made_here():
    compare(_counts, P(3), graphs=1)


def test_state_of_the_region_is_not_changed():
    """What a break at the call finds must be the state before it."""

    def fn(x):
        seen = []

        def note(v):
            seen.append(1)
            return v

        y = Noting.apply(x, note)
        return y * len(seen)

    compare(fn, P(3), graphs=None)


class Noting(Function):
    @staticmethod
    def forward(ctx, x, note):
        return note(x) * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


def test_a_changed_class_is_seen():
    class Changing(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 3

    def fn(x):
        return Changing.apply(x)

    compiled = magneto.optimize("aot_eager")(fn)
    x = P(3)
    compiled(x).sum().backward()
    assert x.grad.tolist() == [3.0] * 3
    Changing.backward = staticmethod(lambda ctx, g: g * 5)
    x.grad = None
    compiled(x).sum().backward()
    assert x.grad.tolist() == [5.0] * 3


def test_double_backward():
    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            return g * 3 * ctx.saved_tensors[0] ** 2

    def fn(x):
        return Cube.apply(x).sum()

    for backend in ("eager", "aot_eager"):
        x = P(3)
        (first,) = torch.autograd.grad(magneto.optimize(backend, nopython=True)(fn)(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.allclose(second, 6 * x)


_USES = {
    "first": (lambda a, b: (a * 2).sum(), 0),
    "second": (lambda a, b: b.exp().sum(), 0),
    "both": (lambda a, b: (a * b).sum(), 0),
    "written": (lambda a, b: a.sum(), 4),
    "large and written": (lambda a, b: b.sum(), 1 << 17),
}


@pytest.mark.filterwarnings("ignore:.*told which gradients are missing")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", list(_USES))
def test_a_backward_that_is_told_which_gradients_are_missing(name, inside, backend):
    """The backward is traced with all of them; where some are missing outside, the graph runs again in eager, or is left to it where it cannot."""
    use, large = _USES[name]
    buffers = torch.ones(2, large)

    def results(x, y, buffer):
        buffer.mul_(1.5)
        return Unmaterialised.apply(x.sin() * (buffer.mean() if large else 1), y)

    def loss(x, y, buffer):
        return use(*results(x, y, buffer)[:2])

    def step(x, y, buffer):
        loss(x, y, buffer).backward()

    compiled = magneto.optimize(backend, nopython=True)(step if inside else results)
    for seed in range(2):
        found = []
        for fn, buffer in ((None, buffers[0]), (compiled, buffers[1])):
            torch.manual_seed(seed)
            x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
            if fn is None or inside:
                (fn or step)(x, y, buffer)
            else:
                a, b, places = fn(x, y, buffer)
                assert not places.requires_grad
                use(a, b).backward()
            found.append([x.grad, y.grad, buffer])
        assert_equal(found[1], found[0], 1e-5)
    refused = large > 4 and not inside and backend != "eager"
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"] > 0) == (0, refused)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_number_that_backward_reads(backend, monkeypatch):
    """It is part of the graph; a backward that finds another one runs the program's own function."""
    compare(_reads, P(3), graphs=1, backends=(backend,))
    compiled = magneto.optimize(backend, nopython=True)(_reads)
    for later in (3.0, 5.0, 3.0):
        x = P(3)
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        y = compiled(x).sum()
        monkeypatch.setitem(globals(), "FACTOR", later)
        y.backward()
        assert torch.equal(x.grad, torch.full((3,), 2 * later))


def test_gradient_needed_or_not_are_two_variants():
    compiled = magneto.optimize("aot_eager", nopython=True)(simple)
    x = P(3)
    y = compiled(x)
    assert y.requires_grad
    with torch.no_grad():
        assert not compiled(x).requires_grad
    assert torch.equal(compiled(x.detach()), y.detach())
    (g,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.allclose(g, torch.autograd.grad(simple(x).sum(), x)[0])
