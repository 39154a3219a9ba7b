"""Classes and instances: attributes, properties, descriptors, inheritance, special methods, dataclasses, enumerations, instances made inside and outside."""

# ruff: noqa

from __future__ import annotations

import dataclasses
import enum
import functools
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import pytest
import torch

import magneto

from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()
T = TypeVar("T")


class Base:
    count = 0
    table: ClassVar[dict[str, int]] = {"a": 1}

    def __init__(self, value, bias=0):
        self.value = value
        self.bias = bias

    def compute(self, x):
        return x * self.value + self.bias

    @property
    def double(self):
        return self.value * 2

    @double.setter
    def double(self, new):
        self.value = new / 2

    @staticmethod
    def plain(x):
        return x + 1

    @classmethod
    def make(cls, value):
        return cls(value, bias=cls.table["a"])

    @functools.cached_property
    def expensive(self):
        return self.value * 10

    def __repr__(self):
        return f"Base({self.value})"


class Derived(Base):
    def __init__(self, value, bias=1):
        super().__init__(value, bias)
        self.extra = 5

    def compute(self, x):
        return super().compute(x) + self.extra


@programs.add(X, Base(3, 1))
def reading_an_argument_object(x, obj):
    return (
        obj.compute(x) + obj.double + obj.count + obj.table["a"] + obj.plain(1),
        type(obj).__name__,
        hasattr(obj, "nothing"),
        getattr(obj, "zip", 4),
    )


@programs.add(X, Base(3, 1))
def writing_an_argument_object(x, obj):
    obj.value = obj.value + 1
    obj.new = x * 2
    obj.double = 20
    del obj.bias
    return obj.value * x, obj.new, obj.expensive


@programs.add(X, Base(3, 1))
def counting_in_an_object(x, obj):
    for _ in range(3):
        obj.bias += 1
    obj.history = getattr(obj, "history", [])
    obj.history.append(obj.bias)
    return x * obj.bias


@programs.add()
def making_instances(x):
    a = Base(2)
    b = Derived(3)
    c = Base.make(4)
    d = Derived.make(1)
    a.tag = "t"
    return (
        a.compute(x),
        b.compute(x),
        c.compute(x),
        d.compute(x),
        a.expensive,
        a.double,
        repr(a),
        f"{b}",
        isinstance(b, Base),
        issubclass(Derived, Base),
    )


@programs.add()
def returning_an_instance(x):
    obj = Derived(x * 2)
    obj.items = [obj.value, 1]
    obj.self = None
    return obj


@programs.add(X, Derived(2))
def dispatch_on_types(x, obj):
    if type(obj) is Derived and isinstance(obj, (int, Base)) and not isinstance(obj, str):
        return x + 1
    return x - 1


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


@programs.add()
def slots(x):
    s = Slotted(x)
    s.b = s.a + 1
    try:
        s.c = 1
    except AttributeError as error:
        text = str(error)
    return s.b, text, hasattr(Slotted(1), "b")


class Vector:
    def __init__(self, *items):
        self.items = list(items)

    def __add__(self, other):
        return Vector(*(a + b for a, b in zip(self.items, other.items)))

    def __mul__(self, k):
        return Vector(*(a * k for a in self.items))

    def __rmul__(self, k):
        return self * k

    def __neg__(self):
        return Vector(*(-a for a in self.items))

    def __iadd__(self, other):
        self.items = [a + b for a, b in zip(self.items, other.items)]
        return self

    def __eq__(self, other):
        return isinstance(other, Vector) and len(self.items) == len(other.items)

    def __lt__(self, other):
        return len(self.items) < len(other.items)

    def __hash__(self):
        return 7

    def __getitem__(self, i):
        return self.items[i]

    def __setitem__(self, i, v):
        self.items[i] = v

    def __delitem__(self, i):
        del self.items[i]

    def __contains__(self, v):
        return any(v is item for item in self.items)

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)

    def __call__(self, x):
        return sum(a * x for a in self.items)

    def __bool__(self):
        return bool(self.items)

    def __abs__(self):
        return len(self.items)

    def __format__(self, spec):
        return f"V{spec}"


@programs.add()
def special_methods(x):
    v = Vector(x, x + 1)
    w = v + v * 2 + 3 * v
    w += -v
    v[0] = x * 5
    del w[1]
    return (
        w.items,
        v.items,
        v == w,
        v != w,
        w < v,
        v[1],
        x in v,
        len(v),
        [*v],
        v(2),
        bool(Vector()),
        not v,
        abs(v),
        f"{v:>3}",
        hash(v),
        sorted([v, w])[0].items,
    )


class Dynamic:
    def __init__(self):
        self.data = {"k": 3}

    def __getattr__(self, name):
        if name in self.__dict__.get("data", {}):
            return self.data[name]
        raise AttributeError(f"no {name}")

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value if name == "data" else (name, value))


@programs.add()
def dynamic_attributes(x):
    d = Dynamic()
    d.z = x
    try:
        d.missing
    except AttributeError as error:
        text = str(error)
    return d.k * x, d.z, text, getattr(d, "other", 1), hasattr(d, "k"), hasattr(d, "q"), vars(d)["data"]


class Positive:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name, 1)

    def __set__(self, obj, value):
        if value < 0:
            raise ValueError("negative")
        setattr(obj, self.name, value)


class WithDescriptor:
    size = Positive()


@programs.add()
def descriptors(x):
    w = WithDescriptor()
    first = w.size
    w.size = 5
    try:
        w.size = -1
    except ValueError as error:
        text = str(error)
    return x * w.size, first, text


@dataclasses.dataclass
class Record:
    x: Any
    scale: float = 2.0
    tags: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.scaled = self.x * self.scale


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: int = 2


@programs.add()
def dataclass_instances(x):
    r = Record(x)
    r.tags.append(1)
    f = Frozen(1)
    try:
        f.a = 3
    except dataclasses.FrozenInstanceError as error:
        text = str(error)
    return (
        r.scaled,
        r,
        f,
        f == Frozen(1),
        f < Frozen(2),
        text,
        [field.name for field in dataclasses.fields(f)],
        dataclasses.replace(f, b=5),
        repr(f),
    )


@programs.add(X, Record(1.5))
def dataclass_argument(x, r):
    r.scale = r.scale * 2
    return x * r.scale + r.scaled


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"

    @property
    def upper(self):
        return self.name.upper() + "!"

    def describe(self):
        return f"{self.name}={self.value}"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@programs.add(X, Color.BLUE)
def enumerations(x, c):
    if c is Color.BLUE and c != Color.RED:
        x = x + Level.HIGH
    return (
        x,
        c.value,
        c.name,
        c.upper,
        c.describe(),
        Color("blue"),
        Color["RED"],
        Level.LOW < Level.HIGH,
        [m.name for m in Color],
        Color.RED in (Color.RED,),
        {Color.RED: 1}[Color.RED],
        isinstance(Level.LOW, int),
    )


class Shape(ABC, Generic[T]):
    @abstractmethod
    def area(self): ...

    def twice(self):
        return self.area() * 2


class Square(Shape[int]):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side * self.side


class Mixin:
    def compute(self, x):
        return super().compute(x) * 100


class Diamond(Mixin, Derived):
    pass


@programs.add()
def abstract_and_multiple_inheritance(x):
    return Square(x).twice(), Diamond(2).compute(x), Diamond.__mro__[1].__name__, isinstance(Square(1), Shape)


class Output(OrderedDict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = "n"

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, k):
        return dict(self.items())[k] if isinstance(k, str) else self.to_tuple()[k]

    def to_tuple(self):
        return tuple(self[k] for k in self.keys())


class Stack(list):
    def push(self, v):
        self.append(v)
        return self

    @property
    def top(self):
        return self[-1]


class Opts(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = dict.__setitem__


@programs.add()
def subclasses_of_containers(x):
    o = Output()
    o["a"] = x
    o["b"] = 2
    s = Stack([1])
    s.push(x).push(3)
    p = Opts(k=x)
    p.z = 4
    return o, o[0], o.a, o["b"], o.to_tuple(), len(o), list(o), s.top, len(s), s[0], p.k, p["z"], "z" in p, [v for v in s]


@programs.add(X, Output(a=1), Stack([5]), Opts(u=2))
def subclass_arguments(x, o, s, p):
    o["c"] = x
    s.push(7)
    p.v = p.u + 1
    return o["a"] * x, s.top, sum(s), p["v"]


class Options(TypedDict, total=False):
    a: int


@programs.add()
def typed_dicts(x):
    o = Options(a=3)
    return x * o["a"], o.get("b")


@programs.add()
def instance_dict(x):
    b = Base(x)
    b.__dict__["other"] = 3
    b.__dict__.update(more=4)
    setattr(b, "n" + "ame", 5)
    delattr(b, "bias")
    return b.other, b.more, b.name, sorted(vars(b)), hasattr(b, "bias")


@programs.add()
def class_attributes(x):
    return (
        x * Base.count,
        Base.table,
        Derived.plain(2),
        Base.compute(Base(2), x),
        Base.__name__,
        Base.__module__,
        Derived.__bases__[0].__name__,
        type(Base).__name__,
        Base.double.fget.__name__,
    )


@programs.add()
def user_dict(x):
    d = UserDict(a=x)
    d["b"] = 2
    return d["a"], d.get("c", 5), len(d), list(d), "b" in d


class Meta(type):
    def __call__(cls, *args):
        obj = super().__call__(*args)
        obj.via_meta = True
        return obj


class Made(metaclass=Meta):
    def __new__(cls, a):
        obj = super().__new__(cls)
        obj.from_new = a
        return obj

    def __init__(self, a):
        self.a = a


@programs.add()
def metaclass_and_new(x):
    m = Made(x)
    return m.a + m.from_new, m.via_meta


class Singleton:
    _instance = None
    value = 3


@programs.add()
def bound_methods_as_values(x):
    b = Base(2)
    f = b.compute
    g = Base.make
    return f(x), g(3).bias, f.__self__ is b, f.__func__ is Base.compute, f == b.compute, list(map(b.compute, [1, 2]))


@programs.add()
def local_state_machine(x):
    class_of = {"b": Base, "d": Derived}
    return [class_of[k](1).compute(x) for k in "bd"]


@programs.add(Vector(Y, Y * 2), X)
def callable_argument(v, x):
    return v(x), v[0] + v[1], len(v)


class Chained:
    def __init__(self):
        self.steps = []

    def add(self, fn):
        self.steps.append(fn)
        return self

    def run(self, x):
        for step in self.steps:
            x = step(x)
        return x


@programs.add()
def method_chaining(x):
    return Chained().add(torch.sin).add(lambda v: v + 1).run(x)


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def test_a_metaclass_asks_for_the_order_of_an_unfinished_class() -> None:
    def make(x):
        class Meta(type):
            def mro(cls):
                return type.mro(cls)

        class Made(metaclass=Meta):
            pass

        return [cls.__name__ for cls in Made.__mro__], x + 1

    with magneto.config.patch(suppress_errors=False):
        assert magneto.optimize("eager")(make)(torch.ones(2))[0] == ["Made", "object"]
