"""The text every fuzzed program starts with: classes, modules, context managers, generators and C functions that its functions use.

It is executed once per copy of the environment, so that classes and functions of the two copies are different objects.
"""

from __future__ import annotations

PRELUDE = """
import bisect, collections, contextlib, copy, dataclasses, enum, functools, itertools, math, operator, random, zlib
import torch
from torch import nn
import torch.nn.functional as F
import magneto

class Oops(Exception):
    def __init__(self, text, code=0):
        super().__init__(text)
        self.code = code

class Box:
    kind = "box"
    shared = [1, 2]
    def __init__(self, value, t):
        self.value = value
        self.t = t
        self.log = []
    @property
    def twice(self):
        return self.value * 2
    @twice.setter
    def twice(self, new):
        self.value = new // 2
    def scale(self, x):
        return x * self.value
    def push(self, item):
        self.log.append(item)
        return self
    @classmethod
    def make(cls, value):
        return cls(value, torch.ones(4) * value)
    @staticmethod
    def plain(x):
        return x + 1
    def __len__(self):
        return len(self.log)
    def __getitem__(self, i):
        return self.log[i]
    def __call__(self, x):
        return self.scale(x) + len(self.log)
    def __add__(self, other):
        return Box(self.value + (other.value if isinstance(other, Box) else other), self.t)

class Sub(Box):
    kind = "sub"
    def scale(self, x):
        return super().scale(x) - 1
    def __getattr__(self, name):
        if name.startswith("auto_"):
            return len(name)
        raise AttributeError(name)
    def __bool__(self):
        return self.value > 0

class Slotted:
    __slots__ = ("a", "b")
    def __init__(self, a, b=None):
        self.a = a
        self.b = b

@dataclasses.dataclass
class Point:
    x: int
    y: object = None
    tags: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int = 1
    t: object = None

Pair = collections.namedtuple("Pair", "left right")

class Color(enum.Enum):
    RED = 1
    BLUE = 2

class Named(str):
    pass

class Table(dict):
    def __missing__(self, key):
        return len(key)

class Items(list):
    pass

class Scope:
    def __init__(self, box, swallow=False):
        self.box = box
        self.swallow = swallow
    def __enter__(self):
        self.box.log.append("enter")
        return self.box.value
    def __exit__(self, kind, error, trace):
        self.box.log.append(kind.__name__ if kind else "exit")
        return self.swallow

@contextlib.contextmanager
def managed(box, extra):
    box.value += extra
    try:
        yield extra * 2
    except KeyError:
        box.log.append("KeyError")
    finally:
        box.value -= extra

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width * width).reshape(width, width))
        self.bias = nn.Parameter(torch.linspace(0, 1, width))
        self.register_buffer("steps", torch.zeros(()))
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width, bias=False)])
        self.act = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
        self.scale = 0.5
        self.calls = 0
        self.cache = {}
        self.mode = "both"
    def forward(self, x, n=1):
        self.calls += 1
        if self.training:
            self.steps += 1
        for i, layer in enumerate(self.layers):
            if i < n or self.mode == "both":
                x = layer(x) * self.scale
        if self.mode == "cached":
            self.cache["last"] = x
        return F.linear(self.act(x), self.weight, self.bias)

def counter(n):
    for i in range(n):
        got = yield i * 2
        if got:
            yield got

def pieces(x):
    yield x[0]
    try:
        yield x[1] * 2
    finally:
        x = x[2]
    yield x

def both(x):
    yield from pieces(x)
    yield x.sum(0)
    return 5

def fails(n):
    if n > 2:
        raise Oops("too large: %d" % n, n)
    return n + 1

def adder(start):
    total = start
    def add(value):
        nonlocal total
        total = total + value
        return total
    return add

def apply(fn, *args, **kwargs):
    return fn(*args, **kwargs)

def shows(text):
    print(text)
    return len(text)

def variadic(a, /, b=2, *rest, c=3, **more):
    return a * b + c + len(rest) + sum(more.values())
"""
