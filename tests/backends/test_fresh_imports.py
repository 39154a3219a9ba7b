"""Compiling, training included, imports nothing of the incumbent: seen in a fresh process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch
import torch.nn.functional as F
from torch import fx
before = set(sys.modules)  # torch itself brings some of them
from magneto.backends import lookup_backend

def f(x, w, b, t):
    y = F.layer_norm(F.gelu(F.linear(x, w, b)), (8,))
    y = F.dropout(y + 1, 0.1, True)
    return F.cross_entropy(y, t), y.detach()

inputs = [torch.randn(4, 6), torch.randn(8, 6, requires_grad=True), torch.randn(8, requires_grad=True), torch.zeros(4, dtype=torch.long)]
for backend in ("aot_eager", "inductor"):
    compiled = lookup_backend(backend)(fx.symbolic_trace(f), inputs)
    compiled(*inputs)[0].backward()
    with torch.no_grad():
        lookup_backend(backend)(fx.symbolic_trace(f), inputs)(*inputs)
assert inputs[1].grad is not None
before.add("torch.fx.experimental._constant_symnode")  # small: torch 2.15 imports it with its nested tensors
forbidden = ("torch._dynamo", "torch._inductor", "torch._subclasses", "torch._decomp", "torch._refs", "torch.fx.experimental", "sympy")
print([name for name in sys.modules if name.startswith(forbidden) and name not in before])
"""


def test_nothing_of_the_incumbent_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", done.stdout
