"""The text every fuzzed program starts with: classes, modules, context managers, generators and C functions that its functions use.

It is executed once per copy of the environment, so that classes and functions of the two copies are different objects.
"""

from __future__ import annotations

PRELUDE = """
import bisect, collections, heapq, pickle, re, contextlib, copy, dataclasses, enum, functools, inspect, itertools, logging, math, operator, random, types, typing, warnings, zlib
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
import magneto

lib = types.ModuleType("lib")
lib.factor = 2
lib.widen = lambda z: z * lib.factor

class Prints(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage())

LOG = logging.Logger("fuzz")
LOG.addHandler(Prints())

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

class Checked:
    def __set_name__(self, owner, name):
        self.name = "_" + name
    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name, 0)
    def __set__(self, obj, value):
        if value > 99:
            raise ValueError(f"{self.name[1:]} too large")
        setattr(obj, self.name, value)

class Meta(type):
    made = 0
    def __call__(cls, *args, **kwargs):
        obj = super().__call__(*args, **kwargs)
        cls.made += 1
        return obj
    def __len__(cls):
        return cls.made

class Cache(metaclass=Meta):
    # Keys and values by layer, like a language model's.
    level = Checked()
    def __init__(self, limit=4):
        self.keys, self.values, self.seen, self.limit = [], [], 0, limit
        self.by_name = collections.defaultdict(list)
    def update(self, key, value, layer=0):
        if len(self.keys) <= layer:
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key], dim=0)[-self.limit:]
            self.values[layer] = torch.cat([self.values[layer], value], dim=0)[-self.limit:]
        if layer == 0:
            self.seen += key.shape[0]
        return self.keys[layer], self.values[layer]
    @functools.cached_property
    def size(self):
        return self.limit * 2
    def __iter__(self):
        for key, value in zip(self.keys, self.values):
            yield key, value
    def __contains__(self, layer):
        return layer < len(self.keys)

class Fixed:
    # A cache of fixed size, written in place.
    def __init__(self, rows=6, width=4):
        self.buffer = torch.zeros(rows, width)
        self.at = 0
    def update(self, rows):
        n = rows.shape[0]
        self.buffer[self.at : self.at + n] = rows
        self.at += n
        return self.buffer[: self.at]
    def __getattribute__(self, name):
        if name == "end":
            return object.__getattribute__(self, "at") - 1
        return object.__getattribute__(self, name)
    def __setattr__(self, name, value):
        object.__setattr__(self, name, min(value, 6) if name == "at" else value)

class Output(collections.OrderedDict):
    # Fields as items and as attributes.
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name)
    def __setattr__(self, name, value):
        self[name] = value
    def to_tuple(self):
        return tuple(self[k] for k in self)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, factor=2):
        ctx.factor = factor
        ctx.save_for_backward(z)
        return z * factor
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor + 0 * ctx.saved_tensors[0], None

class Tagged(torch.Tensor):
    used = 0
    @classmethod
    def __torch_function__(cls, func, kinds, args=(), kwargs=None):
        cls.used += 1
        return super().__torch_function__(func, kinds, args, kwargs or {})

class Stack(nn.Sequential):
    def forward(self, z, n=1):
        for layer in self:
            z = layer(z) * n
        return z

def traced(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return fn(*args, **kwargs)
    wrapper.calls = 0
    return wrapper

@traced
def halved(z, *, by=2):
    return z / by

@functools.lru_cache(maxsize=4)
def memo(n):
    return n * 3 + 1

@functools.singledispatch
def sized(value):
    return 1

@sized.register
def _(value: int):
    return value + 10

@sized.register(list)
def _(value):
    return len(value) + 20

def deep(z, n):
    return z if n <= 0 else deep(z + n, n - 1)

def nested(tree, fn):
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {k: nested(v, fn) for k, v in tree.items()}
    return type(tree)(nested(v, fn) for v in tree)

def flat(tree):
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from flat(item)
    elif isinstance(tree, dict):
        yield from flat(list(tree.values()))
    else:
        yield tree

@functools.total_ordering
class Ranked:
    # Compared, hashed, used as an index, formatted, subscripted, iterated over.
    def __init__(self, n):
        self.n = n
    def __eq__(self, other):
        return isinstance(other, Ranked) and self.n == other.n
    def __lt__(self, other):
        return self.n < other.n
    def __hash__(self):
        return hash(("ranked", self.n))
    def __index__(self):
        return self.n % 3
    def __format__(self, spec):
        return f"<{self.n}{spec}>"
    def __iter__(self):
        return Countdown(self.n % 4)
    def __class_getitem__(cls, item):
        return cls(item)
    def __rmul__(self, other):
        return other * self.n

class Countdown:
    def __init__(self, left):
        self.left = left
    def __iter__(self):
        return self
    def __next__(self):
        if self.left <= 0:
            raise StopIteration
        self.left -= 1
        return self.left

class Registered:
    known = []
    def __init_subclass__(cls, rank=0, **rest):
        super().__init_subclass__(**rest)
        cls.rank = rank
        Registered.known.append(cls.__name__)

class First(Registered, rank=2):
    def __delattr__(self, name):
        object.__setattr__(self, name, None)

class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3

class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()

class Row(typing.NamedTuple):
    t: object
    n: int = 2
    def scaled(self):
        return self.t * self.n

class Duck:
    # No tensor, but torch's functions ask it.
    def __init__(self, t):
        self.t = t
    @classmethod
    def __torch_function__(cls, func, kinds, args=(), kwargs=None):
        plain = [a.t if isinstance(a, Duck) else a for a in args]
        return Duck(func(*plain, **(kwargs or {})))

class Parts(nn.Module):
    # Containers, parametrisation, running statistics, a table, hooks of state dicts.
    def __init__(self):
        super().__init__()
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.LayerNorm(4)})
        self.listed = nn.ParameterList([nn.Parameter(torch.linspace(0, 1, 4)), nn.Parameter(torch.ones(4))])
        self.norm = nn.BatchNorm1d(4)
        self.table = nn.Embedding(5, 4)
        self.chain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.seen = 0
    def forward(self, z, n=0):
        self.seen += 1
        z = z.reshape(-1, 4) if z.numel() % 4 == 0 else torch.ones(2, 4)
        for name, part in self.named.items():
            z = part(z) + len(name)
        for p in self.listed:
            z = z * p
        z = self.chain[: 1 + n % 3 if n % 3 != 1 else 3](z)[..., :4]
        return self.norm(z) + self.table(torch.tensor(n % 5)) if z.shape[0] > 1 else z

@magneto.disable
def outside(z, n=1):
    return z * n + 1

def averaging():
    total, n = 0, 0
    while True:
        try:
            value = yield (total / n if n else None)
        except ValueError:
            total, n = 0, 0
        else:
            total, n = total + value, n + 1
"""
