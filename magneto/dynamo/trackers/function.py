"""Callables: Python functions and their cells, bound methods, builtins, partials."""

from __future__ import annotations

import functools
import os
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, Cell, Held, InstanceDict, Item, Local, Part, Peek, Source, Stack, may_die
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import apply
from magneto.dynamo.trackers.mapping import DictTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_VARARGS, _VARKEYWORDS = 0x04, 0x08
_CONST_ATTRS = ("__name__", "__qualname__", "__module__", "__doc__")
FUNCTION_SLOTS = (*_CONST_ATTRS, "__annotations__", "__type_params__")
"""Attributes of functions that do not live in their __dict__."""


CODE_RULES: dict[CodeType, Callable[..., Any]] = {}
"""What calls of functions with a certain code mean: (machine, function, arguments, keywords) -> tracker, or NotImplemented to inline."""
STAND_INS: dict[CodeType, Callable[..., FunctionTracker]] = {}
"""What is inlined for functions with a certain code: (machine, function, arguments, keywords) -> that function or another one of the same parameters."""


class CellTracker(Tracker):
    """A closure cell. An existing one is read lazily; writing to it is an effect."""

    __slots__ = ("_contents", "_machine", "_shell", "obj")
    exact_type = types.CellType

    def __init__(
        self, contents: Tracker | None = None, source: Source | None = None, obj: Any = MISSING, machine: Machine | None = None
    ) -> None:
        super().__init__(source)
        self._contents = contents
        self._machine = machine  # set until the existing contents have been read
        self.obj = obj
        self._shell: tuple[object, str] | None = None

    def load(self, m: Machine) -> Tracker | None:
        """The contents, None when the cell is empty."""
        if self._machine is not None:
            self._machine = None
            assert self.source is not None
            try:
                self._contents = m.wrap(self.obj.cell_contents, Cell(self.source))
            except ValueError:
                m.guard(Kind.ABSENT, Cell(self.source), None)
        return self._contents

    def known(self) -> Tracker | None:
        """The contents, as far as they have been read."""
        return self._contents

    def store(self, m: Machine, value: Tracker | None) -> None:
        self._machine = None
        self._contents = value
        if self.source is not None:
            if value is None:
                m.effect("del {0}.cell_contents", self)
            else:
                m.effect("{0}.cell_contents = {1}", self, value)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name != "cell_contents":
            return None
        value = self.load(m)
        if value is None:
            m.raise_exception(ValueError("Cell is empty"))
        return value

    def shell(self, em: Emitter) -> tuple[str, bool]:
        """(name, whether the caller must fill it): a new empty cell, so that a function can be in its own closure."""
        if self.source is not None:
            return em.source(self.source), False
        if self._shell is not None and self._shell[0] is em:
            return self._shell[1], False
        name = em.assign("cell", f"{em.const(types.CellType, 'CellType')}()", self)
        self._shell = (em, name)
        return name, True

    def fill(self, em: Emitter, name: str) -> None:
        later = getattr(self._contents, "filled_later", None)  # a class whose methods are being made
        if self._contents is not None and not (later is not None and later(name)):
            em.line(f"{name}.cell_contents = {em.value(self._contents)}")

    def emit(self, em: Emitter) -> str:
        name, new = self.shell(em)
        if new:
            self.fill(em, name)
        return name


_TYPE_NAMES = frozenset(dir(types.FunctionType))


_LIBRARIES = ("<frozen", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")))
"""Where code lies that nobody changes in place: the standard library and installed packages."""


class FunctionTracker(Tracker):
    """A Python function: existing (`obj`), or made inside the region by MAKE_FUNCTION."""

    __slots__ = ("anew", "attrs", "born", "closure", "code", "defaults", "globals", "globals_source", "kwdefaults", "name", "namespace", "obj", "qualname")  # fmt: skip
    exact_type = types.FunctionType

    def __init__(
        self, code: CodeType, globals: dict[str, Any], globals_source: Source, defaults: Sequence[Tracker] = (),
        kwdefaults: Mapping[str, Tracker] | None = None, closure: tuple[CellTracker, ...] = (), source: Source | None = None,
        obj: Any = MISSING,
    ) -> None:  # fmt: skip
        super().__init__(source)
        self.code = code
        self.globals = globals
        self.globals_source = globals_source
        self.defaults = tuple(defaults)
        self.kwdefaults = dict(kwdefaults or {})
        self.closure = closure
        self.obj = obj
        self.name = code.co_name if obj is MISSING else obj.__name__
        self.qualname = code.co_qualname if obj is MISSING else obj.__qualname__
        self.anew = False  # guarded by its code alone: what else is read of it is guarded when it is read
        self.born: int | None = None  # the instruction that made it
        self.attrs: dict[str, Tracker] = {}  # of FUNCTION_SLOTS, written or made
        self.namespace = DictTracker()  # its __dict__

    @classmethod
    def existing(cls, m: Machine, fn: types.FunctionType, source: Source) -> FunctionTracker:
        """Tracker of a real function. A function made anew for each call (a local variable's) is guarded by its code, others by identity."""
        anew = isinstance(source, (Local, Stack, Cell, Part, Peek)) and "<locals>" in fn.__qualname__
        if anew:
            m.guard(Kind.TYPE_IS, source, types.FunctionType)
            m.guard(Kind.ID_IS, Attr(source, "__code__"), fn.__code__)
            m.guard(Kind.ID_IS, Attr(source, "__globals__"), fn.__globals__)
        elif not isinstance(source, Held):
            m.guard(Kind.ID_IS, source, fn)
        if not anew and not fn.__code__.co_filename.startswith(_LIBRARIES):  # a program may give its own functions other code, or defaults
            m.guard(Kind.ID_IS, Attr(source, "__code__"), fn.__code__)
            m.guard(Kind.ID_IS, Attr(source, "__defaults__"), fn.__defaults__)

        followed = anew or may_die(fn)

        def part(attr: str, key: Any, value: Any) -> Source:
            return Item(Attr(source, attr), key) if followed else Held(f"{fn.__name__}.{attr}[{key!r}]", value)

        cells = tuple(m.wrap(cell, part("__closure__", i, cell)) for i, cell in enumerate(fn.__closure__ or ()))
        defaults = [m.wrap(value, part("__defaults__", i, value)) for i, value in enumerate(fn.__defaults__ or ())]
        kwdefaults = {name: m.wrap(value, part("__kwdefaults__", name, value)) for name, value in (fn.__kwdefaults__ or {}).items()}
        held = Held(f"globals of {fn.__module__}", fn.__globals__)
        built = cls(fn.__code__, fn.__globals__, held, defaults, kwdefaults, cells, source, fn)  # type: ignore[arg-type]
        built.anew = anew
        built.namespace = DictTracker.existing(fn.__dict__, InstanceDict(source), m, dict)
        return built

    @classmethod
    def make(
        cls, m: Machine, code: CodeType, globals: dict[str, Any], globals_source: Source, defaults: Tracker | None,
        kwdefaults: Tracker | None, closure: tuple[CellTracker, ...], annotations: Tracker | None,
    ) -> FunctionTracker:  # fmt: skip
        """What MAKE_FUNCTION builds."""
        pairs = {}
        if kwdefaults is not None:
            pairs = {key.try_const().value: value for key, value in kwdefaults.pairs(m)}  # type: ignore[attr-defined]
        fn = cls(code, globals, globals_source, m.iterate(defaults) if defaults is not None else (), pairs, closure)
        fn.born = m.count  # type: ignore[attr-defined]
        if annotations is not None:
            fn.attrs["__annotations__"] = annotations_of(m, annotations)
        return fn

    def set_made(self, m: Machine, flag: int, value: Tracker) -> None:
        """SET_FUNCTION_ATTRIBUTE of CPython 3.13: 1 defaults, 2 keyword defaults, 4 annotations, 8 closure."""
        if flag == 1:
            self.defaults = tuple(m.iterate(value))
        elif flag == 2:
            self.kwdefaults = {key.try_const().value: item for key, item in value.pairs(m)}  # type: ignore[attr-defined]
        elif flag == 4:
            self.attrs["__annotations__"] = annotations_of(m, value)
        elif flag == 8:
            self.closure = tuple(m.iterate(value))  # type: ignore[arg-type]

    def resolve_call(self, m: Machine) -> tuple[FunctionTracker, list[Tracker]] | None:
        return None if self.code in CODE_RULES else (self, [])

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        known = CODE_RULES.get(self.code)
        result = known(m, self, args, kwargs) if known is not None else NotImplemented
        return m.inline(self, args, kwargs) if result is NotImplemented else result

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in self.attrs:
            return self.attrs[name]
        if name == "__code__":
            return ConstTracker(self.code)
        if name == "__defaults__":
            return TupleTracker(self.defaults) if self.defaults else ConstTracker(None)
        if name == "__kwdefaults__":
            return DictTracker.of(m, self.kwdefaults.items()) if self.kwdefaults else ConstTracker(None)
        if name == "__closure__":
            return TupleTracker(self.closure) if self.closure else ConstTracker(None)
        if name == "__globals__":
            return m.wrap(self.globals, self.globals_source)
        if self.anew and (name in _CONST_ATTRS or name in FUNCTION_SLOTS):
            assert self.source is not None
            value = getattr(self.obj, name, MISSING)
            return None if value is MISSING else m.wrap(value, Attr(self.source, name))
        if name in _CONST_ATTRS:
            doc = self.code.co_consts[0] if self.code.co_consts and isinstance(self.code.co_consts[0], str) else None
            made = {"__name__": self.name, "__qualname__": self.qualname, "__module__": self.globals.get("__name__"), "__doc__": doc}
            return ConstTracker(made[name] if self.obj is MISSING else getattr(self.obj, name))
        if name in FUNCTION_SLOTS or name == "__dict__":
            return self._mapping(m, name)
        return None if name in _TYPE_NAMES else self.namespace.get_token(m, name)

    def _mapping(self, m: Machine, name: str) -> Tracker | None:
        """__annotations__, __dict__, __type_params__."""
        if name == "__dict__":
            return self.namespace
        if self.obj is not MISSING:
            value = getattr(self.obj, name, MISSING)
            return None if value is MISSING else m.wrap(value, Held(f"{self.name}.{name}", value))
        if name == "__annotations__":
            return self.attrs.setdefault(name, DictTracker())
        return TupleTracker([]) if hasattr(types.FunctionType, name) else None

    # -- arguments

    def bind(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> list[Tracker | None]:
        """Slots of localsplus: arguments bound as CPython binds them (its TypeErrors are the program's), free variables; the rest None."""
        code = self.code
        names = code.co_varnames
        n_pos, n_kw, flags = code.co_argcount, code.co_kwonlyargcount, code.co_flags
        n_free = len(self.closure)
        pure_cells = sum(name not in names for name in code.co_cellvars)
        slots: list[Tracker | None] = [None] * (code.co_nlocals + pure_cells)
        given = min(len(args), n_pos)
        slots[:given] = args[:given]
        if flags & _VARARGS:
            slots[n_pos + n_kw] = TupleTracker(args[n_pos:])
        extra: dict[str, Tracker] | None = {} if flags & _VARKEYWORDS else None
        if kwargs:
            self._bind_keywords(m, slots, kwargs, extra)
        if extra is not None:
            slots[n_pos + n_kw + bool(flags & _VARARGS)] = DictTracker.of(m, extra.items())
        if len(args) > n_pos and not flags & _VARARGS:
            self._too_many(m, slots, len(args))
        self._bind_defaults(m, slots)
        if n_free:
            slots.extend(self.closure)
        return slots

    def _bind_keywords(
        self, m: Machine, slots: list[Tracker | None], kwargs: Mapping[str, Tracker], extra: dict[str, Tracker] | None
    ) -> None:
        code = self.code
        names = code.co_varnames
        end = code.co_argcount + code.co_kwonlyargcount
        positions = {name: index for index, name in enumerate(names[code.co_posonlyargcount : end], code.co_posonlyargcount)}
        for name, value in kwargs.items():
            index = positions.get(name)
            if index is not None:
                if slots[index] is not None:
                    m.raise_exception(TypeError(f"{self.qualname}() got multiple values for argument '{name}'"))
                slots[index] = value
            elif extra is not None:
                extra[name] = value
            else:
                only = [n for n in names[: code.co_posonlyargcount] if n in kwargs]
                if only:
                    text = ", ".join(only)
                    m.raise_exception(
                        TypeError(f"{self.qualname}() got some positional-only arguments passed as keyword arguments: '{text}'")
                    )
                m.raise_exception(TypeError(f"{self.qualname}() got an unexpected keyword argument '{name}'"))

    def _bind_defaults(self, m: Machine, slots: list[Tracker | None]) -> None:
        code = self.code
        n_pos = code.co_argcount
        first = n_pos - len(self.defaults)
        missing = []
        for index in range(n_pos):
            if slots[index] is None:
                if index < first:
                    missing.append(code.co_varnames[index])
                else:
                    slots[index] = self.defaults[index - first]
        if missing:
            self._missing(m, missing, "positional")
        for index in range(n_pos, n_pos + code.co_kwonlyargcount):
            if slots[index] is None:
                name = code.co_varnames[index]
                if name in self.kwdefaults:
                    slots[index] = self.kwdefaults[name]
                else:
                    missing.append(name)
        if missing:
            self._missing(m, missing, "keyword-only")

    def _missing(self, m: Machine, names: list[str], kind: str) -> None:
        quoted = [f"'{name}'" for name in names]
        if len(quoted) > 2:
            text = ", ".join(quoted[:-1]) + ", and " + quoted[-1]
        else:
            text = " and ".join(quoted)
        plural = "s" if len(names) > 1 else ""
        m.raise_exception(TypeError(f"{self.qualname}() missing {len(names)} required {kind} argument{plural}: {text}"))

    def _too_many(self, m: Machine, slots: list[Tracker | None], given: int) -> None:
        code = self.code
        n_pos = code.co_argcount
        if self.defaults:
            least = n_pos - len(self.defaults)
            takes, plural = f"from {least} to {n_pos}", True
        else:
            takes, plural = str(n_pos), n_pos != 1
        keyword_only = sum(slots[i] is not None for i in range(n_pos, n_pos + code.co_kwonlyargcount))
        tail = f"{given} {'was' if given == 1 and not keyword_only else 'were'} given"
        if keyword_only:
            tail = (
                f"{given} positional argument{'s' if given != 1 else ''} (and {keyword_only} keyword-only "
                f"argument{'s' if keyword_only != 1 else ''}) were given"
            )
        m.raise_exception(TypeError(f"{self.qualname}() takes {takes} positional argument{'s' if plural else ''} but {tail}"))

    # -- leaving

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        defaults = [em.value(value) for value in self.defaults]
        kwdefaults = {name: em.value(value) for name, value in self.kwdefaults.items()}
        attrs = {name: em.value(value) for name, value in self.attrs.items() if name != "__annotations__"}
        attrs |= {token: em.value(value) for token, (_, value) in self.namespace.entries.items()}  # type: ignore[arg-type,misc]
        shells = [(cell, *cell.shell(em)) for cell in self.closure]
        tuple_of = "({},)".format(", ".join(defaults)) if defaults else "None"
        cells = "({},)".format(", ".join(name for _, name, _ in shells)) if shells else "None"
        function_type, code = em.const(types.FunctionType, "FunctionType"), em.const(self.code, "code")
        made = f"{function_type}({code}, {em.const(self.globals, 'globals')}, {self.name!r}, {tuple_of}, {cells})"
        name = em.assign("fn", made, self)
        if kwdefaults:
            em.line(f"{name}.__kwdefaults__ = {{{', '.join(f'{key!r}: {value}' for key, value in kwdefaults.items())}}}")
        if self.qualname != self.code.co_qualname:
            em.line(f"{name}.__qualname__ = {self.qualname!r}")
        for key, value in attrs.items():
            em.line(f"{name}.{key} = {value}")
        for cell, cell_name, new in shells:
            if new:
                cell.fill(em, cell_name)
        notes = self.attrs.get("__annotations__")
        if notes is not None and (notes.source is not None or notes.entries):  # type: ignore[attr-defined]
            em.line(f"{name}.__annotations__ = {em.value(notes)}")
        return name

    def show(self) -> str:
        return f"function {self.qualname}"


def annotations_of(m: Machine, flat: Tracker) -> DictTracker:
    """The dictionary of annotations that MAKE_FUNCTION gets as a flat tuple of names and values."""
    if isinstance(flat, DictTracker):
        return flat
    items = m.iterate(flat)
    return DictTracker.of(m, zip(items[::2], items[1::2], strict=True))


METHOD_GET: Any = vars(types.MethodType).get("__get__")
"""From 3.13 on a bound method stays bound; before, its function answers."""


class BoundMethodTracker(Tracker):
    """A function or builtin bound to its first argument."""

    __slots__ = ("fn", "obj", "owner")

    def __init__(self, fn: Tracker, owner: Tracker, source: Source | None = None, obj: Any = MISSING) -> None:
        super().__init__(source)
        self.fn = fn
        self.owner = owner
        self.obj = obj

    def python_type(self) -> type:
        if not isinstance(self.fn, BuiltinTracker) or type(self.fn.obj) is types.FunctionType:
            return types.MethodType
        return types.MethodWrapperType if isinstance(self.fn.obj, types.WrapperDescriptorType) else types.BuiltinMethodType

    def resolve_call(self, m: Machine) -> tuple[FunctionTracker, list[Tracker]] | None:
        found = self.fn.resolve_call(m) if isinstance(self.fn, FunctionTracker) else None
        return (found[0], [self.owner, *found[1]]) if found is not None else None

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        if type(self.fn) is BuiltinTracker:
            return apply(m, self.fn.obj, [self.owner, *args], kwargs)
        return m.call(self.fn, [self.owner, *args], kwargs)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name == "__self__":
            return self.owner
        if name == "__func__":
            return self.fn
        if name == "__get__" and METHOD_GET is not None and self.python_type() is types.MethodType:
            return BoundMethodTracker(BuiltinTracker(METHOD_GET), self)
        return m.apply(getattr, self.fn, m.const(name))

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        if isinstance(self.fn, BuiltinTracker):
            name = self.fn.obj.__name__
            cls = self.owner.python_type()
            if isinstance(self.fn.obj, types.ClassMethodDescriptorType) and issubclass(cls, type):
                return em.assign("method", f"{em.const(self.fn.obj, name)}.__get__(None, {em.value(self.owner)})")  # a subclass may hide it
            if getattr(cls, name, None) is self.fn.obj and not cls.__dictoffset__:
                return em.assign("method", f"{em.value(self.owner)}.{name}")
            return em.assign("method", f"{em.const(self.fn.obj, name)}.__get__({em.value(self.owner)})")  # an override hides it
        return em.assign("method", f"{em.const(types.MethodType, 'MethodType')}({em.value(self.fn)}, {em.value(self.owner)})")

    def show(self) -> str:
        return f"method {self.fn.show()} of {self.owner.show()}"


class BuiltinTracker(Tracker):
    """A callable that is not Python code: what it means is in the dispatch table."""

    __slots__ = ("obj",)

    def __init__(self, obj: Callable[..., Any], source: Source | None = None) -> None:
        super().__init__(source)
        self.obj = obj

    def python_type(self) -> type:
        return type(self.obj)

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        return apply(m, self.obj, args, kwargs)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in _CONST_ATTRS:
            return ConstTracker(getattr(self.obj, name, None))
        value = getattr(self.obj, name, MISSING)
        return None if value is MISSING else m.wrap(value, Held(f"{self.show()}.{name}", value))

    def emit(self, em: Emitter) -> str:
        return em.borrowed(self.obj, getattr(self.obj, "__name__", "fn"))

    def show(self) -> str:
        return str(getattr(self.obj, "__qualname__", None) or getattr(self.obj, "__name__", None) or repr(self.obj))


class PartialTracker(Tracker):
    """functools.partial."""

    __slots__ = ("args", "fn", "kwargs", "namespace", "obj")
    exact_type = functools.partial

    def __init__(
        self, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker], source: Source | None = None, obj: Any = MISSING
    ) -> None:
        super().__init__(source)
        self.fn = fn
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.obj = obj
        self.namespace = DictTracker()  # attributes set inside the region

    @classmethod
    def existing(cls, m: Machine, obj: functools.partial[Any], source: Source) -> PartialTracker:
        m.guard(Kind.TYPE_IS, source, functools.partial)
        fn = m.wrap(obj.func, Attr(source, "func"))
        args = [m.wrap(value, Item(Attr(source, "args"), i)) for i, value in enumerate(obj.args)]
        kwargs = m.wrap(obj.keywords, Attr(source, "keywords"))
        assert isinstance(kwargs, DictTracker)
        m.guard(Kind.LENGTH, Attr(source, "args"), len(obj.args))
        pairs = {str(key.try_const().value): value for key, value in kwargs.pairs(m)}  # type: ignore[union-attr]
        return cls(fn, args, pairs, source, obj)

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        return m.call(self.fn, [*self.args, *args], {**self.kwargs, **kwargs})

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name == "func":
            return self.fn
        if name == "args":
            return TupleTracker(self.args)
        if name == "keywords":
            return DictTracker.of(m, self.kwargs.items())
        if name == "__dict__" and self.source is None:
            return self.namespace
        if self.obj is not MISSING and name in self.obj.__dict__:
            return m.wrap(self.obj.__dict__[name], Item(InstanceDict(self.source), name))  # type: ignore[arg-type]
        return self.namespace.get_token(m, name)

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        parts = [em.value(self.fn), *(em.value(arg) for arg in self.args)]
        # keywords are str subclasses of identifiers by construction (they came through a call)
        parts += [f"**{{{', '.join(f'{name!r}: {em.value(value)}' for name, value in self.kwargs.items())}}}"] if self.kwargs else []
        made = em.assign("partial", f"{em.const(functools.partial, 'partial')}({', '.join(parts)})", self)
        for token, (_, value) in self.namespace.entries.items():
            em.line(f"{made}.{token} = {em.value(value)}")  # type: ignore[arg-type]
        return made
