"""All switches of magneto in one typed table (at most 40), read through `config`.

A flag's first value comes from its environment variable ``MAGNETO_<NAME>``. ``config.name`` reads, ``config.name = value`` sets,
``config.patch(name=value)`` sets for a with-block or for the calls of a decorated function. Unknown names and values of a wrong type raise
UserError. ``in_cache_key`` says that compiled results depend on the flag: `cache_key()` enters every key of the stores on disk.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from magneto.base.dataclass import dataclass
from magneto.base.errors import UserError
from magneto.base.text import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Flag:
    """One row. `type` is bool, int, float or str; `choices` limits a string; `low` bounds a number from below."""

    name: str
    type: type
    default: Any
    help: str
    in_cache_key: bool = False
    choices: tuple[str, ...] = ()
    low: float | None = None

    @property
    def env(self) -> str:
        return "MAGNETO_" + self.name.upper()

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {bool: "a bool", int: "an int", float: "a number", str: "a string"}[self.type]
        return f"{kind} >= {self.low:g}" if self.low is not None else kind


FLAGS: tuple[Flag, ...] = (
    # What runs
    Flag("backend", str, "inductor", "backend used when none is named", True),
    Flag("disable", bool, False, "run every optimised function in eager"),
    Flag("suppress_errors", bool, True, "an error inside the compiler makes a warning and an eager call, not an exception"),
    Flag("skip_files", str, "", "comma-separated path fragments of Python files that are never captured"),
    # Capture
    Flag("recompile_limit", int, 8, "compiled variants per entry point; beyond it the frame runs in eager", low=1),
    Flag(
        "size_seconds", float, 3.0, "of compiling for sizes behind the first three, before that may only take a quarter of the time gone by"
    ),
    Flag("size_variants", int, 64, "compiled variants per entry point for sizes that come again beyond recompile_limit", low=1),
    Flag("error_on_recompile", bool, False, "raise instead of recompiling, to find what keeps changing"),
    Flag("replay_equal_modules", bool, True, "capture calls of modules that are equal to one captured before by copying what that gave"),
    Flag("fallback_ops", str, "", "comma-separated ATen operations (aten.gelu.default) that are never decomposed", True),
    # Kernels
    Flag(
        "numerics",
        str,
        "fast",
        "fast: as close to float64 as eager, within a factor of two; eager: eager's bits (what is not plain arithmetic stays eager's kernel)",
        True,
        choices=("fast", "eager"),
    ),
    Flag("fusion", bool, True, "fuse loops", True),
    Flag("max_fusion", int, 64, "buffers computed by one fused kernel", True, low=1),
    Flag("buffer_reuse", bool, True, "reuse the memory of buffers that are no longer read", True),
    Flag("recycle_results", bool, True, "on the CPU, memory of results of 8 MiB or more serves later ones; they cannot be resized to more"),
    Flag("channels_last", bool, True, "lay convolutional networks out channels-last where it pays", True),
    Flag("cuda_graphs", bool, True, "record what a graph launches on a GPU and replay it, where that is safe"),
    Flag("max_autotune", bool, False, "on a GPU, measure kernels of ours for products and convolutions against the library", True),
    Flag(
        "dependent_launches",
        bool,
        True,
        "on a GPU, kernels are launched while those before them end, for which they wait themselves (compute capability 9.0 and later)",
    ),
    Flag("draw_in_kernels", bool, True, "on a GPU, draw dropout's numbers in the kernels around it, bit for bit the library's", True),
    Flag("vector_math", bool, True, "use the C library's vector functions for exp, tanh, erf, ...", True),
    Flag("compiler", str, "", "C compiler; empty looks for gcc, clang, cc", True),
    Flag("compiler_flags", str, "", "flags added to the C compiler's", True),
    Flag("march", str, "native", "value of -march= ; empty leaves it out", True),
    Flag("compile_workers", int, 0, "compilers running at the same time, C's or Triton's; 0 takes the number of processors", low=0),
    Flag("compile_timeout", float, 120.0, "seconds after which a C compiler is given up", low=0.1),
    # Stores
    Flag("cache", bool, True, "keep kernels and plans on disk"),
    Flag("cache_dir", str, "", "where; empty takes ~/.cache/magneto"),
    Flag("cache_size_mb", int, 1024, "size of the store on disk, oldest entries leave first", low=1),
    # Seeing
    Flag("log", int, 0, "1 breaks and recompiles, 2 graphs, 3 guards, 4 loops and fusion, 5 kernels, 6 every pass", low=0),
    Flag("trace", bool, False, "print generated kernels"),
    Flag("dump", str, "", "directory for numbered files of every stage; the Python ones run alone"),
    Flag("verify", bool, False, "check every intermediate program after every pass (slow, for tests)"),
)

BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False, "": False}


class UnknownFlag(UserError, AttributeError):
    """An AttributeError too, so that `hasattr` and the copy protocols work as usual."""


def flag_named(name: str) -> Flag:
    """The row of that name, or UserError with the closest name."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise UnknownFlag("U101", name=name, suggestion=did_you_mean(name, BY_NAME)) from None


def checked(flag: Flag, value: Any) -> Any:
    """`value` if it suits the flag (an int suits a float flag), else UserError."""
    if flag.type is float and type(value) is int:
        value = float(value)
    wrong = type(value) is not flag.type or (flag.choices and value not in flag.choices)
    if wrong or (flag.low is not None and value < flag.low):
        raise UserError("U102", name=flag.name, expected=flag.expected, got=repr(value))
    return value


def parsed(flag: Flag, text: str) -> Any:
    """The value that an environment variable spells, or UserError."""
    text = text.strip()
    try:
        value = _WORDS[text.lower()] if flag.type is bool else flag.type(text)
    except (KeyError, ValueError):
        raise UserError("U102", name=flag.env, expected=flag.expected, got=repr(text)) from None
    return checked(flag, value)


class Config:
    """The flags' current values as attributes. Reads are plain attribute reads."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.__dict__["_patched"] = {}
        for flag in FLAGS:
            text = environ.get(flag.env)
            self.__dict__[flag.name] = flag.default if text is None or (text == "" and flag.type is not str) else parsed(flag, text)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        flag_named(name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = checked(flag_named(name), value)

    def __delattr__(self, name: str) -> None:
        self.__dict__[name] = flag_named(name).default

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter([(flag.name, self.__dict__[flag.name]) for flag in FLAGS])

    def __repr__(self) -> str:
        changed = ", ".join(f"{flag.name}={self.__dict__[flag.name]!r}" for flag in FLAGS if self.__dict__[flag.name] != flag.default)
        return f"config({changed})"

    def patch(self, **values: Any) -> Patch:
        """Other values for a with-block, or for each call of a decorated function. Checked at once."""
        return Patch(self, {name: checked(flag_named(name), value) for name, value in values.items()})

    def patched(self) -> dict[str, Any]:
        """What is patched now: for what is compiled later for the same program (a backward, other sizes)."""
        return dict(self.__dict__["_patched"])

    def reset(self) -> None:
        """Every flag back to what the environment says."""
        self.__dict__.update(Config().__dict__)

    def cache_key(self) -> tuple[tuple[str, Any], ...]:
        """The flags on which compiled results depend, with their values."""
        return tuple((flag.name, self.__dict__[flag.name]) for flag in FLAGS if flag.in_cache_key)


class Patch:
    """Context manager and decorator made by `Config.patch`; may be entered again and nested."""

    def __init__(self, config: Config, values: dict[str, Any]) -> None:
        self._config = config
        self._values = values
        self._saved: list[dict[str, Any]] = []

    def __enter__(self) -> Config:
        self._saved.append({name: self._config.__dict__[name] for name in (*self._values, "_patched")})
        self._config.__dict__.update(self._values, _patched={**self._config.__dict__["_patched"], **self._values})
        return self._config

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._config.__dict__.update(self._saved.pop())

    def __call__(self, fn: F) -> F:
        @functools.wraps(fn)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with Patch(self._config, self._values):
                return fn(*args, **kwargs)

        return patched  # type: ignore[return-value]


config = Config()
