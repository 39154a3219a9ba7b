"""From kernel texts to addresses: what this process has, what the store has, and the rest through the compiler.

A kernel is known by the hash of its text (which holds no names of the graph it was made for), so repeated layers and later processes find it.
Kernels that must be compiled are put together into a few translation units, compiled side by side; the store keeps the libraries and, per
kernel, in which library it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magneto.base.errors import warn_once
from magneto.base.events import counter, emit
from magneto.base.flags import config
from magneto.base.logs import dump
from magneto.inductor.runtime.compiler import CompileError, Compiler, NoCompiler, compile_units, find_compiler
from magneto.inductor.runtime.load import address_of, load_library
from magneto.inductor.runtime.share import functions
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


_addresses: dict[tuple[str, str], int] = {}
_build_lock = threading.Lock()


def build(kernels: Sequence[KernelText], preamble: str) -> dict[str, int] | NoCompiler | CompileError:
    """hash -> address of every kernel. `preamble` is the text before the kernels of one unit (types, prototypes, inline functions)."""
    compiler = find_compiler()
    if isinstance(compiler, NoCompiler):
        return compiler
    machine = compiler.key()
    distinct = {kernel.hash: kernel for kernel in kernels}
    with _build_lock:  # one build at a time: concurrent compilations of one graph would do the same work twice
        missing = [kernel for kernel in distinct.values() if not _known(machine, kernel)]
        if missing:
            failed = _compile(compiler, machine, missing, preamble)
            if failed is not None:
                return failed
        return {name: _addresses[machine, name] for name in distinct}


def _known(machine: str, kernel: KernelText) -> bool:
    if (machine, kernel.hash) in _addresses:
        counter("kernels_reused")
        return True
    unit = store().get("kernel", key_of(machine, kernel.hash))
    path = store().find("unit", unit.decode()) if unit is not None else None
    if path is None:
        return False
    try:
        _addresses[machine, kernel.hash] = address_of(load_library(path), kernel.symbol)
    except (OSError, AttributeError) as error:
        warn_once("W201", path=str(path), error=error)
        return False
    counter("kernels_from_store")
    return True


def _units(kernels: Sequence[KernelText]) -> list[tuple[list[KernelText], str]]:
    """Kernels dealt out to as many units as there are workers, longest first, so that units are about equally long: (kernels, their C text).
    Kernels that turn squares of memory call the same large function and stand together."""
    workers = config.compile_workers or os.cpu_count() or 1
    ordered = sorted(kernels, key=lambda k: (-len(k.body), k.hash))
    texts = functions([(kernel.symbol, kernel.body) for kernel in ordered])
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
    units = _units(kernels)
    sources = [f"{ROUNDS * ('mg_machine_f16(' in text)}{preamble}\n{text}" for _, text in units]
    for (unit, _), source, result in zip(units, sources, compile_units(compiler, sources), strict=True):
        dump("kernels", ".c", source)
        if isinstance(result, CompileError):
            return result
        _install(machine, unit, result)
        emit("kernel", compiled=len(unit), bytes=len(result))
    counter("kernels_compiled", len(kernels))
    return None


def _install(machine: str, unit: Sequence[KernelText], library: bytes) -> None:
    key = key_of(machine, *sorted(kernel.hash for kernel in unit))
    path: Path = store().put("unit", key, library)
    loaded = load_library(path)
    for kernel in unit:
        store().put("kernel", key_of(machine, kernel.hash), key.encode())
        _addresses[machine, kernel.hash] = address_of(loaded, kernel.symbol)
