"""From kernel texts to addresses: what this process has, what the store has, and the rest through the compiler.

A kernel is known by the hash of its text (which holds no names of the graph it was made for), so repeated layers and later processes find it.
Kernels that must be compiled are put together into a few translation units, compiled side by side; the store keeps the libraries and, per
kernel, in which library it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from magneto.base.dataclass import dataclass
from magneto.base.errors import warn_once
from magneto.base.events import counter, emit
from magneto.base.flags import config
from magneto.base.logs import dump
from magneto.base.varying import sizes_vary
from magneto.inductor.runtime.compiler import CompileError, Compiler, NoCompiler, compile_units, find_compiler
from magneto.inductor.runtime.load import address_of, load_library
from magneto.inductor.runtime.share import General, Seen, form_of, functions, general_of, lengths_of
from magneto.inductor.runtime.store import key_of, store

ROUNDS = "#define MG_ROUNDS\n"  # before the preamble of units that round in registers: functions known by their names are compiled in each unit, used or not
UNIT_LENGTH = 15_000  # characters of C text, at least, where there are processors to compile more units side by side


@dataclass(frozen=True, slots=True)
class KernelText:
    """`body`: a C function named `SYMBOL` (a placeholder); `needs`: the preamble parts it uses. `hash` names it in the store."""

    body: str
    preamble: str
    hash: str

    @staticmethod
    def of(body: str, preamble: str) -> KernelText:
        return KernelText(body, preamble, key_of(body, preamble))

    @property
    def symbol(self) -> str:
        return f"k_{self.hash[:20]}"

    @property
    def source(self) -> str:
        """The function under its own name."""
        return self.body.replace("SYMBOL", self.symbol)


Address = int | tuple[int, tuple[int, ...]]
"""Of a kernel; with numbers, of a function that takes them behind the pointers (share.General)."""

FORMS = 1024  # whose numbers and functions are remembered
NUMBERS = 6  # of a form: functions for more kernels know too little

_addresses: dict[tuple[str, str], Address] = {}
_seen: dict[str, list[tuple[str, ...]]] = {}  # by form: the numbers of kernels that this process has compiled
_generals: dict[tuple[str, str], list[tuple[General, str]]] = {}  # by machine and form: functions, and in which unit
_build_lock = threading.Lock()


def build(kernels: Sequence[KernelText], preamble: str) -> dict[str, Address] | NoCompiler | CompileError:
    """hash -> address of every kernel. `preamble` is the text before the kernels of one unit (types, prototypes, inline functions)."""
    compiler = find_compiler()
    if isinstance(compiler, NoCompiler):
        return compiler
    machine = compiler.key()
    distinct = {kernel.hash: kernel for kernel in kernels}
    with _build_lock:  # one build at a time: concurrent compilations of one graph would do the same work twice
        missing = [
            kernel for kernel in distinct.values() if not _known(machine, kernel) and not (sizes_vary() and _served(machine, kernel))
        ]
        if missing:
            failed = _compile(compiler, machine, missing, preamble)
            if failed is not None:
                return failed
        return {name: _addresses[machine, name] for name in distinct}


def _known(machine: str, kernel: KernelText) -> bool:
    if (machine, kernel.hash) in _addresses:
        counter("kernels_reused")
        return True
    found = store().get("kernel", key_of(machine, kernel.hash))
    unit, *general = (found or b"").decode(errors="replace").split() or ("",)
    path = store().find("unit", unit) if unit else None
    if path is None:
        return False
    try:
        address = address_of(load_library(path), general[0] if general else kernel.symbol)
        _addresses[machine, kernel.hash] = (address, tuple(map(int, general[1:]))) if general else address
    except (OSError, AttributeError, ValueError) as error:
        warn_once("W201", path=str(path), error=error)
        return False
    counter("kernels_from_store")
    return True


def _served(machine: str, kernel: KernelText) -> bool:
    """Whether a function that has been compiled for kernels of the same form takes the numbers of this one."""
    form, numbers = form_of(kernel.body)
    for general, unit in _generals.get((machine, form), ()):
        path = store().find("unit", unit)
        if path is not None and (passed := general.numbers(numbers)) is not None:
            try:
                _addresses[machine, kernel.hash] = address_of(load_library(path), general.symbol), passed
            except (OSError, AttributeError) as error:
                warn_once("W201", path=str(path), error=error)
                continue
            store().put("kernel", key_of(machine, kernel.hash), " ".join((unit, general.symbol, *map(str, passed))).encode())
            counter("kernels_by_numbers")
            return True
    return False


def _units(kernels: Sequence[KernelText], seen: Seen) -> list[tuple[list[KernelText], str]]:
    """Kernels dealt out to as many units as there are workers, longest first, so that units are about equally long: (kernels, their C text).
    Kernels that turn squares of memory call the same large function and stand together."""
    workers = config.compile_workers or os.cpu_count() or 1
    ordered = sorted(kernels, key=lambda k: (-len(k.body), k.hash))
    texts = functions([(kernel.symbol, kernel.body) for kernel in ordered], seen)
    total = sum(len(text) for _, text in texts)
    n = max(1, min(workers, total // UNIT_LENGTH))
    units: list[list[KernelText]] = [[] for _ in range(n)]
    sources: list[list[str]] = [[] for _ in range(n)]
    sizes = [0] * n
    filling = 0  # the unit of those, until it has its share
    for positions, text in sorted(texts, key=lambda made: ("mg_tile_" not in made[1], -len(made[1]))):
        turns = "mg_tile_" in text
        i = filling if turns and sizes[filling] + len(text) <= total // n else sizes.index(min(sizes))
        filling = i if turns else filling
        units[i].extend(ordered[p] for p in positions)
        sources[i].append(text)
        sizes[i] += len(text)
    return [(unit, "\n".join(source)) for unit, source in zip(units, sources, strict=True)]


def _compile(compiler: Compiler, machine: str, kernels: Sequence[KernelText], preamble: str) -> CompileError | None:
    seen = _before(kernels) if sizes_vary() else {}
    units = _units(kernels, seen)
    sources = [f"{ROUNDS * ('mg_machine_f16(' in text)}{preamble}\n{text}" for _, text in units]
    for (unit, _), source, result in zip(units, sources, compile_units(compiler, sources), strict=True):
        dump("kernels", ".c", source)
        if isinstance(result, CompileError):
            return result
        _install(machine, key_of(machine, source), unit, result, seen)
        emit("kernel", compiled=len(unit), bytes=len(result))
    counter("kernels_compiled", len(kernels))
    return None


def _install(machine: str, key: str, unit: Sequence[KernelText], library: bytes, seen: Seen) -> None:
    """`key` names the text: what its functions take depends on more than on the kernels in it, and entries of other kernels say what to pass."""
    path: Path = store().put("unit", key, library)
    loaded = load_library(path)
    for kernel in unit:
        store().put("kernel", key_of(machine, kernel.hash), key.encode())
        _addresses[machine, kernel.hash] = address_of(loaded, kernel.symbol)
    _remember(machine, unit, key, seen)


def _before(kernels: Sequence[KernelText]) -> Seen:
    """The numbers of kernels compiled before that may share functions with these: of their forms, and with the lengths of vectorised loops that these have."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for form, members in _by_form(kernels).items():
        lengths = {lengths_of(form, numbers) for _, numbers in members}
        alike = [numbers for numbers in _seen.get(form, ()) if lengths == {lengths_of(form, numbers)}]
        if alike:
            found[form] = alike
    return found


def _by_form(kernels: Sequence[KernelText]) -> dict[str, list[tuple[KernelText, tuple[str, ...]]]]:
    groups: dict[str, list[tuple[KernelText, tuple[str, ...]]]] = {}
    for kernel in kernels:
        form, numbers = form_of(kernel.body)
        groups.setdefault(form, []).append((kernel, numbers))
    return groups


def _remember(machine: str, unit: Sequence[KernelText], key: str, seen: Seen) -> None:
    """The functions of a unit that take numbers, and the numbers of its kernels."""
    for form, members in _by_form(unit).items():
        found, before = [numbers for _, numbers in members], seen.get(form, ())
        if before and (general := general_of(form, [*found, *before], members[0][0].symbol)) is not None:
            _generals.setdefault((machine, form), []).insert(0, (general, key))
            del _generals[machine, form][NUMBERS:]
        _seen[form] = [*found, *_seen.get(form, ())][:NUMBERS]
    for kept in cast(tuple[dict[Any, Any], ...], (_seen, _generals)):
        for old in list(kept)[: max(0, len(kept) - FORMS)]:
            del kept[old]
