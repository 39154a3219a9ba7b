"""The commands, one function each."""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto import _C
from magneto.api.inspect import stats
from magneto.api.optimize import compile as magneto_compile
from magneto.base.errors import MagnetoError
from magneto.base.flags import FLAGS, config
from magneto.base.text import plural, table
from magneto.cli.program import load, run_script
from magneto.debug.report import breaks, sections, write_report
from magneto.inductor.runtime.compiler import NoCompiler, find_compiler
from magneto.inductor.runtime.store import store


def run(options: argparse.Namespace) -> int:
    """run a Python program with magneto in the place of torch.compile"""
    status = run_script(options.script, options.arguments)
    if options.stats:
        print(table([(name, value) for name, value in stats().items() if not isinstance(value, (list, dict))]), file=sys.stderr)
    return status


def explain(options: argparse.Namespace) -> int:
    """run a program and say what was compiled, and why it broke"""
    status = run_script(options.script, options.arguments)
    seen = breaks()
    counts = stats()
    print(f"\n{plural(counts['graphs'], 'graph')}, {plural(counts['breaks'], 'break')}, {plural(counts['recompiles'], 'recompile')}")
    for i, reason in enumerate(seen, 1):
        print(f"\n{i}. {reason}")
    for section in sections():
        if section.rows:
            print(f"\n{section.title}\n{table(section.rows, section.headers)}")
    return status


def report(options: argparse.Namespace) -> int:
    """run a program and write an HTML page about it"""
    status = run_script(options.script, options.arguments)
    print(write_report(options.output, f"magneto: {options.script}"), file=sys.stderr)
    return status


def bench(options: argparse.Namespace) -> int:
    """time file.py:function, which returns (callable, tuple of arguments)"""
    fn, args = load(options.target)()
    compiled = magneto_compile(fn)
    with torch.no_grad():
        expected = fn(*args)
        start = time.perf_counter()
        result = compiled(*args)
        first = time.perf_counter() - start
        times = _turns({"eager": lambda: fn(*args), "magneto": lambda: compiled(*args)}, options.seconds)
    eager, ours = times["eager"], times["magneto"]
    rows = [("eager", eager * 1e3, None), ("magneto", ours * 1e3, first)]
    print(table(rows, ("variant", "ms", "first call s")))
    difference = (expected - result).abs().max().item() if isinstance(expected, torch.Tensor) and expected.is_floating_point() else None
    print(f"{eager / ours:.2f} times eager's speed" + (f", largest difference {difference:.1e}" if difference is not None else ""))
    return 0


def _turns(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(times.values()):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def env(options: argparse.Namespace) -> int:
    """what magneto finds on this machine"""
    compiler = find_compiler()
    rows = [
        ("python", platform.python_version() + ("" if _C.SUPPORTED else " (not supported: eager only)")),
        ("torch", torch.__version__),
        ("platform", platform.platform()),
        ("threads", torch.get_num_threads()),
        ("compiler", compiler.reason if isinstance(compiler, NoCompiler) else f"{compiler.path} ({compiler.kind})"),
        ("cache", store().root),
        ("accelerator", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    rows += [(flag.env, getattr(config, flag.name)) for flag in FLAGS if getattr(config, flag.name) != flag.default]
    print(table(rows))
    return 0


def cache(options: argparse.Namespace) -> int:
    """show or clear what is kept on disk"""
    kept = store()
    if options.clear:
        kept.clear()
    sizes: dict[str, list[int]] = {}
    for _, size, path in kept.entries():
        sizes.setdefault(path.relative_to(kept.root).parts[0], []).append(size)
    print(kept.root)
    print(table([(kind, len(of), f"{sum(of) / 1e6:.2f}") for kind, of in sorted(sizes.items())], ("kind", "entries", "MB")))
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="magneto", description="A JIT compiler for unmodified PyTorch programs.")
    commands = top.add_subparsers(dest="command", required=True)

    def command(fn: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(fn.__name__, help=fn.__doc__, description=fn.__doc__)
        added.set_defaults(fn=fn)
        return added

    def script(of: argparse.ArgumentParser) -> argparse.ArgumentParser:
        of.add_argument("script", help="the Python file")
        of.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
        return of

    command(run).add_argument("--stats", action="store_true", help="print counts at the end")
    script(commands.choices["run"])
    script(command(explain))
    command(report).add_argument("-o", "--output", default="magneto-report.html")
    script(commands.choices["report"])
    timing = command(bench)
    timing.add_argument("target", help="file.py:function")
    timing.add_argument("--seconds", type=float, default=3.0)
    command(env)
    command(cache).add_argument("--clear", action="store_true", help="remove every entry")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        return options.fn(options)
    except MagnetoError as error:
        if type(error).__name__ == "UserError":
            print(error, file=sys.stderr)
            return 2
        raise


if __name__ == "__main__":
    sys.exit(main())
