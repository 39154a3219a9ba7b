"""Records: dataclasses, named tuples, enumerations, ordered dictionaries of outputs; collections and sets; copies; typing."""

# ruff: noqa

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import typing
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Protocol, TypedDict, runtime_checkable

import pytest
import torch

from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


@dataclass
class Config:
    size: int
    name: str = "c"
    parts: list = field(default_factory=list)
    hidden: int = field(default=0, repr=False, compare=False)
    kind: typing.ClassVar[str] = "kind"


@dataclass
class Wide(Config):
    extra: float = 1.5

    def __post_init__(self):
        self.total = self.size * self.extra


@dataclass(frozen=True)
class Frozen:
    a: int
    b: Any = None


@dataclass(frozen=True, slots=True, order=True)
class Slim:
    a: int
    b: int = 2


@dataclass(kw_only=True, slots=True)
class Keywords:
    x: Any
    scale: float = 2.0


@dataclass(unsafe_hash=True)
class Hashed:
    key: str
    n: int = 1


@dataclass
class WithInit:
    a: dataclasses.InitVar[int]
    b: int = field(init=False)

    def __post_init__(self, a):
        self.b = a * 2


class Pair(NamedTuple):
    first: Any
    second: int = 5

    def total(self):
        return self.first + self.second


Old = namedtuple("Old", "u v w", defaults=(7,))


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    CRIMSON = 1

    @property
    def pretty(self):
        return self.name.lower()

    @classmethod
    def default(cls):
        return cls.GREEN


class Level(enum.IntEnum):
    LOW = 1
    HIGH = enum.auto()


class Perm(enum.Flag):
    R = enum.auto()
    W = enum.auto()
    X = enum.auto()
    RW = R | W


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Mode(str, enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


class Text(enum.StrEnum):
    ONE = enum.auto()


class Planet(enum.Enum):
    EARTH = (1.0, 2.0)
    MARS = (3.0, 4.0)

    def __init__(self, mass, radius):
        self.mass = mass
        self.radius = radius

    @classmethod
    def _missing_(cls, value):
        return cls.EARTH if value == "home" else None


class ModelOutput(OrderedDict):
    """As transformers' outputs: fields are attributes and keys."""

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None:
                self[f.name] = value

    def __getitem__(self, k):
        if isinstance(k, str):
            return dict(self.items())[k]
        return self.to_tuple()[k]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self):
        return tuple(self[k] for k in self.keys())


@dataclass
class Output(ModelOutput):
    logits: Optional[torch.Tensor] = None
    loss: Optional[torch.Tensor] = None
    states: Optional[tuple] = None


class Movie(TypedDict, total=False):
    name: str
    year: int


@runtime_checkable
class Closes(Protocol):
    def close(self) -> None: ...


class File:
    name: str = "f"

    def close(self):
        pass


@programs.add()
def dataclass_basics(x):
    c = Config(3, parts=[x])
    d = Config(3, parts=c.parts)
    return c, c == d, c == Config(4), repr(Config(1)), Config.kind, c.parts is d.parts, Wide(2, extra=x).total, Wide(2), c != 3


@programs.add()
def dataclass_functions(x):
    w = Wide(2, "w", [Frozen(1), {"k": Frozen(2, [3])}])
    other = dataclasses.replace(w, size=5)
    names = [f.name for f in dataclasses.fields(w)]
    types = [f.default is dataclasses.MISSING for f in dataclasses.fields(Config)]
    return (
        dataclasses.asdict(w),
        dataclasses.astuple(w),
        other.total,
        other.parts is w.parts,
        names,
        types,
        dataclasses.is_dataclass(w),
        dataclasses.is_dataclass(int),
        x + 1,
    )


@programs.add()
def dataclass_asdict_tensor(x):
    return (
        dataclasses.asdict(Frozen(1, x + 1))["b"] * 2,
        dataclasses.asdict(Frozen(1, [x])),
        dataclasses.asdict(Config(1), dict_factory=OrderedDict),
    )


@programs.add()
def frozen_dataclasses(x):
    f = Frozen(1, x)
    texts = []
    for fn in (lambda: setattr(f, "a", 2), lambda: delattr(f, "a"), lambda: setattr(f, "zz", 2)):
        try:
            fn()
        except dataclasses.FrozenInstanceError as error:
            texts.append(str(error))
    g = dataclasses.replace(f, a=9)
    return f.a, g.a, g.b is x, texts, hash(Frozen(1, 2)) == hash(Frozen(1, 2)), {Frozen(1): "k"}[Frozen(1)], f


@programs.add()
def slotted_ordered_dataclass(x):
    a, b = Slim(1), Slim(1, 3)
    return (
        a < b,
        sorted([b, a])[0].b,
        max(a, b).b,
        hasattr(a, "__dict__"),
        a,
        repr(b),
        {a, b, Slim(1)} == {a, b},
        Slim.__match_args__,
        x + 1,
    )


@programs.add()
def keyword_only_dataclass(x):
    k = Keywords(x=x)
    k.scale *= 2
    try:
        Keywords(x)
    except TypeError as error:
        text = str(error)
    return k, k.x * k.scale, text


@programs.add()
def hashed_and_initvar(x):
    return {Hashed("a"): 1}[Hashed("a")], Hashed("b") in [Hashed("b")], WithInit(4).b, WithInit(x).b


@programs.add(Config(2, parts=[X]), Frozen(3, Y), Slim(4), X)
def dataclass_arguments(c, f, s, x):
    c.parts.append(x)
    c.size += 1
    c.added = f
    return dataclasses.replace(f, a=4), s.a * x, c == Config(3), f.b + 1, dataclasses.replace(c, name="z").name


@programs.add()
def dataclass_with_match(x):
    match Slim(1, 5):
        case Slim(1, b):
            y = x * b
        case _:
            y = x
    match {"k": Frozen(1, x)}:
        case {"k": Frozen(a=2)}:
            z = 1
        case {"k": Frozen(a=1, b=inner)}:
            z = inner + 1
    return y, z


@programs.add(graphs=None, again=False)
def dataclass_made_inside(x):
    @dataclass
    class Local:
        a: int
        b: float = 2.0

    return Local(3).a * x, Local(1) == Local(1), repr(Local(1)).split(".")[-1]


@programs.add(graphs=None, again=False)
def make_dataclass(x):
    D = dataclasses.make_dataclass("D", [("a", int), ("b", int, field(default=3))])
    return D(1).b * x


@programs.add()
def named_tuple_classes(x):
    p = Pair(x)
    q = p._replace(second=2)
    a, b = q
    return (
        p,
        q.total(),
        p._asdict()["second"],
        Pair._fields,
        p.second,
        a is x,
        p[1],
        Pair._make([1, 2]),
        p[0] is p.first,
        Pair(1) == (1, 5),
        Pair._field_defaults,
        repr(Pair(1)),
        isinstance(p, tuple),
        Pair(1) < Pair(2),
        hash(Pair(1)) == hash((1, 5)),
    )


@programs.add()
def old_named_tuples(x):
    o = Old(1, x)
    return (
        o,
        o.w,
        o._replace(v=2),
        Old._fields,
        Old(1, 2).index(2),
        Old(1, 7).count(7),
        len(o),
        o[1:],
        o + (1,),
        Old(*range(3)),
        Old(**{"u": 1, "v": 2}),
        o._asdict()["u"],
        Old.__name__,
        Old(1, 2).__class__._fields,
    )


@programs.add(graphs=None, again=False)
def named_tuple_made_inside(x):
    Local = namedtuple("Local", ["a", "b"])
    return Local(1, x).b + Local(2, 3).a


@programs.add(Pair(X, 2), Old(1, 2, 3))
def named_tuple_arguments(p, o):
    return p.first * p.second + o.w, p._replace(second=9), o._asdict()


@programs.add(X, Color.RED, Level.HIGH, Perm.RW, Mode.EVAL)
def enum_arguments(x, c, l, p, m):
    return c is Color.RED, x * l, Perm.R in p, m == "eval", c.pretty, l > Level.LOW, p & Perm.R, m.value


@programs.add()
def enums(x):
    texts = []
    for fn in (lambda: Color(99), lambda: Color["NO"], lambda: Color.NO):
        try:
            fn()
        except (ValueError, KeyError, AttributeError) as error:
            texts.append(type(error).__name__ + str(error))
    return (
        Color(1) is Color.RED, Color["GREEN"].value, Color.CRIMSON is Color.RED, list(Color), [c.name for c in Color], len(Color), Color.RED.pretty, Color.default(), Color.RED in Color,
        {Color.RED: 1}[Color(1)], Color.RED == Color.GREEN, isinstance(Color.RED, Color), str(Color.RED), repr(Color.GREEN), f"{Color.RED}", list(Color.__members__), Color.RED != 1, hash(Color.RED) == hash(Color.RED), texts, type(Color.RED) is Color, x + 1,
    )  # fmt: skip


@programs.add()
def int_enums_and_flags(x):
    p = Perm.R | Perm.X
    return (
        Level.LOW + 1, Level.HIGH > 1, Level(2), sorted([Level.HIGH, Level.LOW]), max(Level), x * Level.HIGH, [10, 20, 30][Level.LOW], Level.HIGH == 2, f"{Level.LOW}", int(Level.HIGH), range(Level.HIGH),
        p, p.value, Perm.R in p, Perm.W in p, ~p, p ^ Perm.X, p & Perm.RW, bool(p & Perm.W), list(Perm.RW), len(Perm.RW), Perm(3), str(p), Perm.R | Perm.W == Perm.RW, p.name,
        Bits.A | 4, Bits.A | Bits.B, Bits(3), Bits.A & 1, Text.ONE, Mode("train") is Mode.TRAIN, Mode.TRAIN == "train", Mode.TRAIN.upper(), f"{Mode.TRAIN.value}", Mode.TRAIN + "x", {"train": 1}[Mode.TRAIN], x.size(Level.LOW),
    )  # fmt: skip


@programs.add()
def enums_with_values_and_missing(x):
    return Planet.EARTH.mass * x, Planet((3.0, 4.0)).radius, Planet("home") is Planet.EARTH, Planet.MARS.value, [p.mass for p in Planet]


@programs.add(graphs=None, again=False)
def enum_functional_and_inside(x):
    E = enum.Enum("E", "A B")

    class F(enum.IntEnum):
        P = 3

    return E.A.value, len(E), x * F.P, F.P.name, F(3) is F.P


@programs.add()
def model_outputs(x):
    o = Output(logits=x, states=(x, x + 1))
    first = o[0]
    o.loss = x.sum()
    o["states"] = None
    return first is x, o.logits is x, list(o.keys()), o["logits"] is x, "loss" in o, len(o), o.to_tuple()[0] is x, o.loss, o.get("none"), o


@programs.add(Output(logits=X))
def model_output_argument(o):
    o["loss"] = o.logits.sum()
    o.states = (o[0],)
    return o.to_tuple(), list(o.items())[0][0], len(o)


@programs.add()
def ordered_dicts(x):
    o = OrderedDict(a=1, b=x, c=3)
    o.move_to_end("a")
    o.move_to_end("c", last=False)
    k, v = o.popitem(last=False)
    o["z"] = 4
    p = OrderedDict(o)
    p.move_to_end("b")
    return (
        o,
        k,
        v,
        list(reversed(o)),
        o == p,
        dict(o) == dict(p),
        o | {"q": 1},
        OrderedDict.fromkeys("ab", 0),
        o.popitem()[0],
        o.pop("zzz", None),
        list(p),
        repr(OrderedDict(a=1)),
        o.copy() == o,
    )


@programs.add(OrderedDict(a=1, b=2), X)
def ordered_dict_argument(o, x):
    o.move_to_end("a")
    o["c"] = x
    last = o.popitem()
    o.setdefault("d", 5)
    o.update(b=7)
    return last[0], list(o)


@programs.add()
def default_dicts(x):
    d = defaultdict(list)
    d["a"].append(x)
    d["b"] += [1]
    n = defaultdict(int, k=2)
    for c in "hello":
        n[c] += 1
    nested = defaultdict(lambda: defaultdict(int))
    nested["p"]["q"] += 5
    plain = defaultdict(None)
    try:
        plain["x"]
    except KeyError as error:
        text = str(error)
    return (
        d,
        n,
        nested["p"]["q"],
        "zz" in d,
        d.get("zz"),
        len(d),
        d.default_factory is list,
        text,
        n.copy(),
        n | {"z": 1},
        dict(n),
        repr(defaultdict(int, a=1)),
        {"a": 1} | n,
    )


@programs.add(defaultdict(list, k=[1]), X)
def default_dict_argument(d, x):
    d["k"].append(x)
    d["new"].append(2)
    d["empty"]
    return len(d), d["k"][0], d.default_factory


@programs.add()
def counters(x):
    c = Counter("abracadabra")
    d = Counter(a=1, z=2)
    d.update("zz")
    d.subtract({"a": 5})
    c["new"] += 2
    return (
        c,
        c.most_common(2),
        c["missing"],
        c + d,
        c - d,
        c & d,
        c | d,
        sum(c.values()),
        list(d.elements()),
        c.total(),
        +d,
        -d,
        c == Counter("abracadabra"),
        dict(d),
        Counter([1, 1, 2])[1],
        c > d,
        repr(Counter(a=1)),
        Counter(a=2).copy(),
        x + c["a"],
    )


@programs.add(Counter(a=2, b=1), X, again=False)
def counter_argument(c, x):
    c["a"] += 3
    c.update(["b", "q"])
    return c.most_common(1), c["nothing"], x * c["b"], len(c)


@programs.add()
def deques_inside(x):
    q = deque([1, 2, 3], maxlen=3)
    q.append(x)
    q.appendleft(0)
    q.rotate(1)
    r = deque("abc")
    r.extend("de")
    r.extendleft("yz")
    r.rotate(-2)
    r.remove("c")
    r.insert(1, "I")
    r[0] = "first"
    del r[1]
    r += ["end"]
    return (
        q,
        len(q),
        q.maxlen,
        list(r),
        r.index("end"),
        r.count("d"),
        "d" in r,
        r.pop(),
        r.popleft(),
        list(reversed(r)),
        r[-1],
        bool(deque()),
        r.copy() == r,
        deque([1]) + deque([2]),
        deque([1, 2]) < deque([1, 3]),
        deque([1, 2]) * 2,
        repr(deque([1], maxlen=2)),
        r.reverse(),
        list(r),
    )


@programs.add(deque([1, 2, 3]), deque([X, Y], maxlen=2), X)
def deque_arguments(q, bounded, x):
    q.append(x)
    q.rotate(1)
    q.popleft()
    bounded.append(x + 1)
    first = bounded[0]
    q.extendleft([7, 8])
    q[1] = 9
    return first, len(q), sum(v for v in q if isinstance(v, int)), 3 in q, bounded.maxlen


@programs.add()
def chain_maps(x):
    m = ChainMap({"a": 1}, {"a": 2, "b": x})
    m["c"] = 3
    child = m.new_child({"b": 0})
    return (
        m["a"],
        m["b"],
        sorted(m),
        len(m),
        child["b"],
        child.parents["b"] is x,
        m.maps[0],
        "zz" in m,
        m.get("zz", 4),
        dict(child)["c"],
        list(m),
        bool(ChainMap()),
    )


@programs.add()
def user_containers(x):
    d = UserDict(a=1)
    d["b"] = x
    l = UserList([3, 1])
    l.append(2)
    l.sort()
    s = UserString("abc")
    return (
        d["b"] is x,
        list(d),
        len(d),
        d.data["a"],
        l,
        l[0],
        l + [4],
        s.upper(),
        s + "d",
        len(s),
        "a" in d,
        d | {"c": 3},
        l == [1, 2, 3],
        s == "abc",
    )


@programs.add(UserDict(a=1), UserList([1]), ChainMap({"k": 1}, {}), X)
def user_container_arguments(d, l, c, x):
    d["b"] = x
    l.append(x)
    c["z"] = 2
    return len(d), l[0], c["k"]


@programs.add()
def set_operators(x):
    a, b = {1, 2, 3}, {3, 4}
    f = frozenset("ab")
    c = set(a)
    c |= {9}
    c -= {1}
    c &= {2, 9, 5}
    c ^= {2, 7}
    d = {1, 2}
    d.update([3], (4,))
    d.difference_update({1})
    d.intersection_update([2, 3])
    d.symmetric_difference_update({3, 8})
    return (
        a | b, a & b, a - b, a ^ b, a <= {1, 2, 3, 4}, a < a, a >= {1}, a > b, a == {3, 2, 1}, a != b, a.isdisjoint({7}), a.union(b, [8]), a.intersection([1], {1, 2}), a.difference([1]), c, d,
        f | {"c"}, type({"c"} | f).__name__, type(f & {"a"}).__name__, f.issubset("abc"), f.issuperset({"a"}), hash(f) == hash(frozenset("ba")), {f: 1}[frozenset("ab")], {frozenset({1}), frozenset({1})}, a.copy(), 3 in a, len(a), sorted(a), bool(set()), {x: 1}[x], {*a, *b}, x + 1,
    )  # fmt: skip


@programs.add()
def set_errors(x):
    texts = []
    for fn in (
        lambda: {[]},
        lambda: {1} | [2],
        lambda: {1} + {2},
        lambda: set().pop(),
        lambda: {1}.remove(2),
        lambda: {1} < 3,
        lambda: frozenset().add(1),
        lambda: set(3),
    ):
        try:
            texts.append(fn())
        except Exception as error:
            texts.append(type(error).__name__ + ": " + str(error))
    return texts, x + 1


@programs.add({3, 1}, frozenset({"a"}), {X.dtype: 1}, X)
def set_arguments(s, f, d, x):
    s.add(7)
    s.discard(1)
    s |= {8, 9}
    s ^= {9}
    s -= {8}
    return 3 in s, f | {"b"}, len(s), d[x.dtype], s & {3}


@programs.add()
def set_of_tensors_and_objects(x):
    a, b = Config(1), File()
    s = {b, x}
    s.add(b)
    return len(s), b in s, x in s, object() in s, {id(x): 1}[id(x)]


@programs.add()
def shallow_copies(x):
    inner = [x]
    values = [
        inner,
        (inner,),
        {"k": inner},
        {1},
        Config(1, parts=inner),
        Pair(inner),
        defaultdict(list, a=inner),
        OrderedDict(a=inner),
        deque([inner], maxlen=2),
        Color.RED,
        len,
        Slim(3),
        Counter("a"),
        frozenset({1}),
        UserDict(a=1),
    ]
    made = [copy.copy(v) for v in values]
    return made, [a is b for a, b in zip(made, values)], made[0][0] is inner, made[4].parts is inner, made[8].maxlen


@programs.add()
def deep_copies(x):
    inner = [1, [2]]
    loop = [inner, inner]
    loop.append(loop)
    c = Config(1, parts=inner)
    c.me = c
    made = copy.deepcopy(
        (inner, loop, c, {"k": inner}, deque([inner]), Slim(3), Pair([1]), Color.RED, defaultdict(list, a=inner), OrderedDict(a=inner))
    )
    return (
        made[0],
        made[1][0] is made[1][1],
        made[1][2] is made[1],
        made[2].me is made[2],
        made[2].parts is made[0],
        made[3]["k"] is made[0],
        made[0] is inner,
        made[5:],
        x + 1,
    )


@programs.add()
def deep_copy_of_tensors(x):
    made = copy.deepcopy({"a": x, "b": [x]})
    y = copy.copy(x)
    made["a"].add_(1)
    return made, made["a"] is made["b"][0], y, y is x, x


class Copied:
    def __init__(self, v):
        self.v = v

    def __copy__(self):
        return Copied(("copy", self.v))

    def __deepcopy__(self, memo):
        return Copied(("deep", copy.deepcopy(self.v, memo)))


class Stated:
    def __init__(self):
        self.a, self.b = 1, [2]

    def __getstate__(self):
        return {"a": self.a}

    def __setstate__(self, state):
        self.__dict__.update(state, restored=True)


class Reduced:
    def __init__(self, n):
        self.n = n

    def __reduce__(self):
        return (Reduced, (self.n + 1,))


@programs.add()
def copy_protocols(x):
    return (
        copy.copy(Copied(1)).v,
        copy.deepcopy(Copied([1])).v,
        copy.copy(Stated()).__dict__,
        copy.deepcopy(Stated()).__dict__,
        copy.copy(Reduced(1)).n,
        copy.deepcopy([Reduced(3)])[0].n,
        copy.replace(Slim(1), a=3) if hasattr(copy, "replace") else None,
        x + 1,
    )


@programs.add()
def typed_structures(x):
    m: Movie = Movie(name="n", year=1)
    m["year"] += 1
    return (
        m,
        type(m).__name__,
        typing.cast(int, x) is x,
        typing.cast("str", 3),
        isinstance(File(), Closes),
        isinstance(3, Closes),
        typing.get_type_hints(File),
        typing.get_origin(list[int]) is list,
        typing.get_args(dict[str, int]),
        Optional[int] == typing.Union[int, None],
    )


@programs.add()
def typing_objects(x):
    alias = typing.List[int]

    def f(a: int, b: "str" = "s") -> Optional[float]:
        return None

    return (
        list[int]([1, 2]),
        alias.__origin__ is list,
        sorted(f.__annotations__),
        f.__annotations__["b"],
        typing.TYPE_CHECKING,
        typing.Any is Any,
        typing.assert_type(x, torch.Tensor) is x,
    )


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)
