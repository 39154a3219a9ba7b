"""The C compiler: found once, described by values, run as a subprocess.

Nothing is probed by compiling. What enters the key of compiled code: the compiler (path, size, time of change), the flags, and the processor
(because of -march=native). A machine without a compiler gives a `NoCompiler` value that says what was looked for.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from magneto.base.dataclass import dataclass
from magneto.base.events import timer
from magneto.base.flags import config
from magneto.inductor.runtime.store import key_of, store

CANDIDATES = ("gcc", "clang", "cc")

BASE_FLAGS = (
    *"-x c -std=gnu11 -O3 -fopenmp -shared -fPIC -fno-math-errno -fno-trapping-math -ffp-contract=off -fwrapv -fno-strict-aliasing".split(),
    *"-fno-builtin-pow -fno-builtin-sin -fno-builtin-cos -w -pipe".split(),
)
"""No -ffast-math: NaN, infinities, signed zeros and the order of additions are the program's. Products and sums are contracted only where the
kernel text says so (mg_fma), because contraction changes x*x - y*y and the like. Of sin and cos of one number gcc would make one scalar function."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """`kind` is gcc or clang; `identity` changes whenever the program at `path` does."""

    path: str
    kind: str
    identity: str

    def flags(self) -> tuple[str, ...]:
        """All flags but input and output."""
        flags = list(BASE_FLAGS)
        if config.march:
            flags.append(f"-march={config.march}")
        if self.kind == "gcc":
            # These move comparisons (of a clamp, of the bounds of what was concatenated) behind branches, and the loop is not vectorised any more.
            flags += ["-fno-tree-pre", "-fno-thread-jumps"]
            flags.append("-fno-code-hoisting")  # 4 % of gcc's instructions for a handful of ours
            flags.append(
                "-fno-tree-loop-distribute-patterns"
            )  # a loop made a copy by two narrow vectors, read as one wide vector, waits for memory
        if self.kind == "gcc" and platform.machine() == "x86_64":
            flags.append("-mprefer-vector-width=512")
        flags.extend(config.compiler_flags.split())
        return tuple(flags)

    def libraries(self) -> tuple[str, ...]:
        """What is linked; libgomp comes with -fopenmp and is at run time the one that torch has loaded (same soname)."""
        return ("-lmvec", "-lm") if vector_math_level() else ("-lm",)

    def key(self) -> str:
        """Everything but the source on which compiled code depends."""
        return key_of(self.identity, " ".join(self.flags()), " ".join(self.libraries()), processor() if config.march == "native" else "")


@dataclass(frozen=True, slots=True)
class NoCompiler:
    """There is no usable compiler."""

    reason: str


@dataclass(frozen=True, slots=True)
class CompileError:
    """The compiler refused a source. `output` is what it printed."""

    output: str
    source: str


def find_compiler() -> Compiler | NoCompiler:
    """The compiler named by the flag `compiler`, else the first of gcc, clang, cc on PATH."""
    return _find(config.compiler, os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(named: str, path: str) -> Compiler | NoCompiler:
    for candidate in (named,) if named else CANDIDATES:
        found = shutil.which(candidate, path=path)
        if found is not None:
            return _described(found)
    return NoCompiler(f"{named or ', '.join(CANDIDATES)}: not found on PATH")


def _described(path: str) -> Compiler:
    real = os.path.realpath(path)
    status = os.stat(real)
    identity = f"{real} {status.st_size} {status.st_mtime_ns}"
    key = key_of("compiler", path, identity)
    known = store().get("compiler", key)
    if known is None:
        try:
            text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
        known = b"clang" if "clang" in text else b"gcc"
        store().put("compiler", key, known)
    return Compiler(path, known.decode(), identity)


@functools.cache
def processor() -> str:
    """What -march=native looks at: model and instruction sets of the first processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            text = file.read(8192)
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.split("\n\n", 1)[0]
    wanted = ("flags", "Features", "model", "cpu family", "stepping", "CPU")
    return platform.machine() + "\n".join(line for line in first.splitlines() if line.startswith(wanted))


@functools.cache
def _glibc() -> tuple[int, int]:
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        major, minor = version.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else (0, 0)
    except (ValueError, OSError, AttributeError):
        return (0, 0)


def vector_math_level() -> int:
    """0: no vector functions; 1: exp log pow sin cos (glibc 2.22); 2: all that codegen/cpp_math.py declares (glibc 2.35)."""
    if not config.vector_math or platform.machine() != "x86_64":
        return 0
    version = _glibc()
    return 2 if version >= (2, 35) else 1 if version >= (2, 22) else 0


def compile_units(compiler: Compiler, sources: Sequence[str]) -> list[bytes | CompileError]:
    """Shared libraries of C sources, compiled side by side. Order is kept."""
    workers = config.compile_workers or os.cpu_count() or 1
    with timer("gcc"), tempfile.TemporaryDirectory(prefix="magneto-cc-") as directory:
        jobs = [(compiler, source, Path(directory, f"unit{i}")) for i, source in enumerate(sources)]
        if len(jobs) == 1 or workers == 1:
            return [_compile_one(*job) for job in jobs]
        with ThreadPoolExecutor(min(workers, len(jobs))) as pool:
            return list(pool.map(lambda job: _compile_one(*job), jobs))


def _compile_one(compiler: Compiler, source: str, stem: Path) -> bytes | CompileError:
    text, library = stem.with_suffix(".c"), stem.with_suffix(".so")
    text.write_text(source)
    command = [compiler.path, *compiler.flags(), str(text), "-o", str(library), *compiler.libraries()]
    try:  # close_fds=False lets Python use vfork, which does not copy the page tables of a large process
        done = subprocess.run(command, capture_output=True, text=True, timeout=config.compile_timeout, close_fds=False, check=False)
    except subprocess.TimeoutExpired:
        return CompileError(f"no result after {config.compile_timeout:g} s", source)
    except OSError as error:
        return CompileError(str(error), source)
    if done.returncode != 0:
        return CompileError(done.stderr.strip() or f"exit status {done.returncode}", source)
    return library.read_bytes()
