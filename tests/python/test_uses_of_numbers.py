"""Every use of a number that capture may not know: what Python does with it, and the error where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto

STATE = {"n": 2, "f": 3.0}
NUMBERS = {
    "item": ("x.argmax().item()", "x.sum().item()"),
    "int": ("int(x.argmax())", "float(x.sum())"),
    "tolist": ("x.long().tolist()[2]", "x.tolist()[1] + 2"),
    "size": ("x.nonzero().shape[0]", "x.nonzero().shape[0] * 1.5"),
    "array": ("x.argmax().numpy()", "x.sum().numpy()"),
    "numpy": ("x.numpy().argmax()", "x.numpy().sum()"),
    "tensor": ("x.argmax()", "x.sum()"),
    "changing": ("STATE['n']", "STATE['f']"),
    "bool": ("bool(x.argmax() > 0)", "(x.sum() > 1).item()"),
    "any": ("x.any().item()", "x.mean().item()"),
}
USES = [
    "range(n)",
    "list(range(0, 5, n))",
    "[1, 2, 3][n]",
    "'abcdef'[n:]",
    "'ab' * n",
    "n * [1]",
    "hex(n)",
    "chr(65 + n)",
    "n.bit_length()",
    "n // 2",
    "n % 2",
    "n ** 3",
    "2 ** n",
    "1 << n",
    "n & 1",
    "n | 8",
    "n ^ 3",
    "~n",
    "bytes(n)",
    "f'{n:04d}'",
    "math.sqrt(f)",
    "math.factorial(n)",
    "math.gcd(n, 4)",
    "math.floor(f)",
    "math.isnan(f)",
    "complex(f, 1)",
    "str(f) + 'a'",
    "'a' + str(n)",
    "{1: 2, 2: 3}[n]",
    "{n}",
    "n in (1, 2)",
    "isinstance(n, int)",
    "math.comb(5, n)",
    "round(f, n)",
    "list(itertools.repeat(1, n))",
    "list(itertools.islice(range(10), n))",
    "list(enumerate('ab', n))",
    "divmod(7, n)",
    "sum([n, 1])",
    "max(n, 1)",
    "sorted([3, n, 1])",
    "min(n, 5, key=lambda v: -v)",
    "all([n, 1])",
    "functools.reduce(operator.add, [n, 2])",
    "list(map(str, [n]))",
    "','.join([str(n)])",
    "str(f).split('.')",
    "int(f)",
    "int(str(n))",
    "float(str(f))",
    "math.trunc(f)",
    "torch.zeros(n)",
    "x.topk(n)",
    "x[:n]",
    "x.narrow(0, 0, n)",
    "x.split(n)",
    "collections.deque([1, 2, 3], n)",
    "collections.Counter({'a': n})",
    "(1, 2, 3)[-n]",
    "[1, 2, 3].__setitem__(n, 4)",
    "[1, 2, 3].pop(n)",
    "[1, 2].insert(n, 3)",
    "[1, 2, 3].__delitem__(n)",
    "[1, 2].count(n)",
    "[1, 2].index(n)",
    "slice(n).indices(5)",
    "callable(n)",
    "getattr(n, 'real')",
    "n.numerator",
    "f.as_integer_ratio()",
    "f.hex()",
    "n.conjugate()",
    "bool(n) and 3",
    "n + 'a'",
    "len(n)",
    "n[0]",
    "n()",
    "n.foo",
    "f << 1",
    "[1][f]",
    "iter(n)",
    "range(f)",
    "1 in n",
    "{**n}",
    "[*n]",
    "'%d %d' % n",
    "'%d' % n",
    "'{:>5}'.format(n)",
    "format(f, '.2f')",
    "f > 2 and n < 3",
    "n is None",
    "n == None",
    "-n * 1.5 / 2",
]
# numpy's scalars have a `__getitem__` that is no sequence's: their errors have another text
NOT = {("numpy", "1 in n"), ("numpy", "[*n]")}
PROGRAM = """
import collections, functools, itertools, math, operator
import torch

def plain(x):
    n, f = {integer}, {real}
    log = []
    try:
        log.append(repr({use}))
    except Exception as error:
        log.append(repr(error))
    return log
"""


@pytest.mark.parametrize("kind", NUMBERS)
def test_each_use_of_a_number(kind: str) -> None:
    integer, real = NUMBERS[kind]
    wrong = []
    for use in USES:
        if (kind, use) in NOT:
            continue
        namespace: dict[str, Any] = {"STATE": STATE}
        exec(PROGRAM.format(integer=integer, real=real, use=use), namespace)
        plain = namespace["plain"]
        magneto.reset()
        optimised = magneto.optimize("eager")(plain)
        for turn in range(3):
            STATE.update(n=1 + turn % 2, f=2.0 + turn)
            x = torch.arange(3.0) if turn % 2 == 0 else torch.arange(3.0).flip(0)
            expected, found = plain(x.clone()), optimised(x.clone())
            if expected != found:
                wrong.append((use, turn, expected, found))
    assert not wrong, "\n".join(map(str, wrong))
