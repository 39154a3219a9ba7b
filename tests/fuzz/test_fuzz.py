"""The fuzzer in CI: a bounded set of seeds, whether it still tests anything, and every failure it has found, made small."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.execute import Counts, run_case
from tests.fuzz.grammar import Case, Generator, case_of
from tests.fuzz.shrink import shrink

SETUP = (
    "net = Net(); x = torch.arange(12.0).reshape(3, 4); box = Box(2, torch.ones(4)); G_N = 1; items = [x]; table = {}; n = 2; flag = True"
)
CALL = "out = entry(x)"

# name -> (program, steps); the setup is SETUP
FOUND: dict[str, tuple[str, tuple[str, ...]]] = {
    "a size and a tuple that holds a tensor": (
        "def main(x):\n    return (x.shape + (n,))[-1]",
        ("n = torch.tensor(2)", CALL, "n = 'a'", CALL),
    ),
    "a read-only view of a dictionary": (
        "def main(x):\n    return type(table).__name__, isinstance(table, dict), table.get('a')",
        ("table = types.MappingProxyType({'a': 1})", CALL, CALL),
    ),
    "a write through a read-only view": ("def main(x):\n    table['a'] = 3", ("table = types.MappingProxyType({'a': 1})", CALL)),
    "the type of autocast behind an error in its block": (
        "def main(x):\n    with torch.autocast('cpu', dtype=torch.float16):\n        x.view(-1)[::2].mul_(2)",
        ("x.requires_grad_()", CALL, CALL),
    ),
    "the history of a transposed matrix": ("def main(x):\n    return net.weight.T", (CALL, CALL)),
    "a write through .data leaves the version of the tensor alone": (
        "def main(x):\n    net.weight.data.mul_(0.5)\n    d = x.data\n    d.add_(1)\n    return d",
        (CALL, CALL),
    ),
    "setdefault relies on the key being there, though nobody reads its value": (
        "def main(x):\n    table.setdefault('a', 0)\n    return x + 1",
        (CALL, CALL, "table = {'k': 1}", CALL),
    ),
    "a look-up that is not used may raise": (
        "def main(x):\n    try:\n        table['a']\n    except KeyError:\n        return x - 1\n    return x + 1",
        ("table['a'] = 1", CALL, "table.clear()", CALL),
    ),
    "a block entered in a region remembers the grad mode of its own place": (
        "def main(x):\n    with torch.no_grad():\n        random.random()\n    with torch.no_grad():\n        m -= m",
        (CALL, CALL),
    ),
    "detach_ of a view raises": ("def main(x):\n    x.detach_()\n    return x + 1", (CALL, "x = x.t()", CALL, "x = x.clone()", CALL)),
    "copies of a tensor count their versions from 1, a deep copy begins where the tensor does": (
        "def main(x):\n    items[0] = copy.copy(x.sum())\n    box.t = copy.deepcopy(x[1])\n    return copy.deepcopy(x)",
        (CALL, CALL, "x = x.t()", CALL),
    ),
    "the length of a class comes from its metaclass": ("def main(x):\n    return x * len(Cache)", (CALL, CALL, "Cache.made = 5", CALL)),
    "a leaf made in the region gets its gradient beside parameters": (
        "def main(x):\n    leaf = torch.ones(4, requires_grad=True)\n    (leaf * net.weight[0]).sum().backward()\n    return leaf.grad",
        (CALL, CALL),
    ),
    "a change of a tensor subclass in place calls its __torch_function__ once": (
        "def main(x):\n    x.swapaxes_(0, 1)\n    return 1",
        ("x = x.as_subclass(Tagged)", CALL, CALL),
    ),
    "to explain a miss calls nothing of the program's": (
        "def main(x):\n    n + 1\n    return items[0] + 1",
        ("items[0] = items[0].as_subclass(Tagged)", CALL, CALL, "items[0] = items[0].t()", CALL),
    ),
    "where an input begins in its storage is not guarded": (
        "def main(x):\n    return x[1:].storage_offset(), x.clone()[1:].storage_offset()",
        ("x = x[:2]", CALL, "x = torch.ones(4, 4)[2:]", CALL),
    ),
    "T of a number is another tensor": ("def main(x):\n    t = x.sum()\n    return t, t.T", (CALL, CALL)),
    "the truth of a constant tensor raises at its own line": (
        "def main(x):\n    left = 1\n    x = x + 1\n    while left > 0 and torch.arange(4) * x.is_leaf:\n        left -= 1\n    return x",
        (CALL, CALL),
    ),
    "an error in a graph takes versions back with the values": (
        "def main(x):\n    net.weight.data.mul_(0.5)\n    net.steps.add_(1)\n    x.add_(1)\n    x.detach().add_(x.view(7))",
        (CALL, CALL),
    ),
    "an error behind a write that autograd recorded": (
        "def main(x):\n    items[1] += 1\n    box.t[:2] = x[0, :2]\n    box.value = 5\n    x.view(-1)[0] = 3",
        ("x.requires_grad_(); items.append(0)", CALL, CALL, "backward(box.t)"),
    ),
    "an index out of range behind a write to a tensor with a history": (
        "def main(x):\n    G_H.add_(x[0])\n    box.value = 5\n    try:\n        return G_H[(x[0] * 0).long() + 9]\n    except IndexError:\n        return G_H * 2",
        ("x.requires_grad_(); G_H = box.t * x.sum()", CALL, CALL, "backward(out)"),
    ),
    "what an assumption that fails has written is put back with its version": (
        "def main(x):\n    x.add_(1)\n    assert x.sum() < 100, 'large'\n    x.mul_(2)\n    return x",
        (CALL, "x.mul_(50)", CALL, CALL),
    ),
    "a write under no_grad to a view with a history, before an error": (
        "def main(x):\n    with torch.no_grad():\n        G_V.add_(1)\n    box.value = 7\n    return G_V[(x[0] * 0).long() + 9]",
        ("x.requires_grad_(); G_V = (x * 2)[0]", CALL, CALL),
    ),
    "a class with __torch_function__ hears of iteration, of len and of conversions": (
        "def main(x):\n    rows = [row for row in x]\n    a, b, c = x\n    return len(x), float(x[0, 0]), int(x[0, 1]), rows[0] + a if x.sum() > 0 else b",
        ("x = x.as_subclass(Tagged)", CALL, CALL, "x = x - 9", CALL),
    ),
    "attributes that differ in the getter alone": (
        "def main(x):\n    return x.requires_grad, x.grad, x.is_leaf, x.dtype, x.ndim",
        ("x = x.as_subclass(Tagged)", CALL, CALL, "x = x.detach().requires_grad_(); x.sum().backward()", CALL),
    ),
    "an array keeps the shape that its tensor had": (
        "def main(x):\n    b = x.numpy()\n    x.t_()\n    return b.shape, b, x.numpy().shape",
        (CALL, CALL),
    ),
    "numpy's scalars say of which type a tensor is": (
        "def main(x):\n    return torch.tensor([np.float64(1)]), torch.tensor(np.int32(4)), torch.as_tensor([[np.float16(1)]]), torch.tensor([1, np.float32(2)])",
        (CALL, CALL),
    ),
    "numpy's float32 is not stored into a tensor": ("def main(x):\n    x[0] = np.float64(2)\n    x[1] = np.float32(1)", (CALL, CALL)),
    "== by name declines": ("def main(x):\n    return x.__eq__(None), x.__ne__('a'), x == None", (CALL, CALL)),
    "a weak set of what the function makes": (
        "def main(x):\n    import weakref\n    found = weakref.WeakSet()\n    b = Box(1, x)\n    found.add(b)\n    n = len(found)\n    b = None\n    return n, len(found)",
        (CALL, CALL),
    ),
    **{
        f"{text} is no flag": (f"def main(x):\n    box.log.append(1)\n    with {text}:\n        return x * 2", (CALL, CALL))
        for text in ("torch.set_grad_enabled(1)", "torch.autocast('cpu', enabled=1)", "(x * 2).requires_grad_(1)")
    },
    "inference mode inside autocast is left first": (
        "def main(x):\n    with torch.autocast('cpu'):\n        y = x + 1\n        with torch.inference_mode():\n            items[5]\n    return y",
        (CALL, CALL),
    ),
    "a tensor keeps its version counter when it is given other memory": (
        "def main(x):\n    x.add_(1)\n    x.data = net.weight[0]\n    x.chunk(2, -1)[0].zero_()\n    x.data = box.t\n    x.mul_(2)\n    return x.data",
        (CALL, CALL),
    ),
    "a tuple that the program makes is another one at each call, a constant tuple is one object": (
        "def main(x):\n    items.append((n, (n, 3)))\n    a = (1, (2, 'b'))\n    random.random()\n    items.append(a)\n    return a, Oops('here', 3).args",
        (CALL, CALL, CALL),
    ),
    **{
        f"writes of views that leave a graph: {text}, {written}": (
            f"def main(x):\n    {text}",
            ("x.requires_grad_()", CALL, CALL, f"out[{written}].add_(1)", f"out[{written}]._version", "backward(out[1])"),
        )
        for written in (0, 1)
        for text in (
            "a = x * 2\n    return a.unbind(0)[1], a.unbind(0)[1], a",
            "a = x * 2\n    return a[0], a.unbind(0)[0], a.chunk(2)[1].t()",
            "return x.unbind(0)[0], x[0]",
            "return x.chunk(2, -1)[1][0], x",
            "return x.chunk(1)[0], x.split([1, 2])[1]",
            "return (x[:1] * 2).unbind(0)[0], 1",
            "a = x * 2\n    with torch.no_grad():\n        v = a[0]\n    return v, a",
            "with torch.no_grad():\n        v = x[0]\n    return v, x",
            "return x.data[0], x",
        )
        if written == 0 or not text.endswith("1")
    },
    **{
        f"a class with __torch_function__ hears of {text}": (f"def main(x):\n    return {text}", ("x = x.as_subclass(Tagged)", CALL, CALL))
        for text in (
            "torch.func.vmap(torch.mul, in_dims=(0, None))(x, 2.0)",
            "torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]",
            "torch.func.grad(lambda z: z.sum())(x)",
        )
    },
    "a view made without gradients whose base has been written since": (
        "def main(x):\n    with torch.no_grad():\n        if not items:\n            items.append(net.weight[0])\n        items[0].add_(1)\n    return items[0]",
        ("items = []", CALL, CALL),
    ),
    "backward in inference mode": ("def main(x):\n    with torch.inference_mode():\n        net(x).sum().backward()", (CALL, CALL)),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    program, steps = FOUND[name]
    for backend in ("eager", "aot_eager"):
        assert run_case(Case(0, program, SETUP, steps, backend)) is None


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_seeds(first):
    counts = Counts()
    for seed in range(first, first + 20):
        assert run_case(Generator(seed).case(seed, "eager"), counts) is None, f"python -m tests.fuzz.run --case {seed}"
    assert counts.events["graph"] > 10
    assert sum(counts.raised.values()) < counts.calls * 0.9


def test_programs_depend_on_the_seed_alone():
    assert case_of(7) == case_of(7) != case_of(8)


def test_a_difference_is_found_and_made_small():
    """An optimised program sees other globals than the plain one: the fuzzer says so, and keeps what matters."""
    program = "def main(x):\n    if x.dim() > 1:\n        x = x + 1\n        y = x * 2\n    return magneto.is_compiling()"
    case = Case(0, program, SETUP, (CALL, "n = 3", CALL))
    found = run_case(case)
    assert found is not None and "state" in found
    small = shrink(case, lambda candidate: run_case(candidate) is not None)
    assert len(small.program.splitlines()) == 2 and len(small.steps) == 1
