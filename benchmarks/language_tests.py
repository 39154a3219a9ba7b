"""CPython's own language tests of the installed Python, traced: every test method must have the verdict it has in plain Python.

    python -m benchmarks.language_tests [--modules test_scope,test_set] [--only TEXT] [--modes plain,traced,nopython] [--keep DIRECTORY] [--out FILE.json]

Each test module runs in forked children: plain (twice: what differs between the two runs is unstable and listed as such), with each test method optimised
by `magneto.optimize("eager")` (what it calls is traced too), and with `nopython=True`. A verdict is pass, skip, fail or error with exception type and message; a
crash or a hang of one test is a verdict of its own, and the rest of the module goes on in a new child. With `--keep`, each verdict is written down
at once, and the same command goes on where an interrupted one ended.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import platform
import selectors
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import language_worker

MODULES = """
test_generators test_genexps test_listcomps test_dictcomps test_setcomps test_scope test_exceptions test_exception_variations test_except_star
test_exception_group test_exception_hierarchy test_raise test_with test_contextlib test_dict test_list test_tuple test_set test_str test_unicode test_string
test_bytes test_int test_float test_complex test_bool test_range test_slice test_iter test_itertools test_functools test_operator test_collections
test_ordered_dict test_defaultdict test_deque test_userdict test_userlist test_userstring test_dataclasses test_enum test_descr test_descrtut test_property
test_super test_class test_augassign test_binop test_compare test_unpack test_unpack_ex test_extcall test_keywordonlyarg test_positional_only_arg
test_named_expressions test_patma test_fstring test_format test_math test_cmath test_bisect test_heapq test_copy test_typing test_inspect test_weakref
test_weakset test_types test_builtin test_baseexception test_sys_setprofile test_sys_settrace test_dynamic test_decorators test_global test_opcodes
test_grammar test_sort test_string_literals test_struct test_random test_statistics test_coroutines test_asyncgen test_yield_from test_pep479
test_generator_stop test_richcmp test_long test_abc test_metaclass test_enumerate test_index test_isinstance test_hash test_funcattrs test_fractions
test_numeric_tower test_pow test_strtod test_call test_contextlib_async test_context test_copyreg test_dictviews test_dict_version test_dynamicclassattribute
test_eof test_filter test_frame test_frozen test_func_attributes test_int_literal test_intlimit test_listcomps test_memoryview test_module test_pprint
test_print test_reprlib test_seq_tests test_subclassinit test_textwrap test_traceback test_tstring test_typechecks test_type_annotations test_type_params
test_type_aliases test_unary test_userlist test_utf8source test_genericalias test_genericclass test_genericpath test_pyclbr test_array test_base64
test_calendar test_colorsys test_datetime test_decimal test_difflib test_graphlib test_json test_keyword test_linecache test_pickle test_queue test_re
test_sched test_shlex test_stat test_stringprep test_symtable test_tokenize test_zlib test_unicodedata test_binascii test_quopri test_secrets
test_string_literals test_syntax test_code test_compile test_crossinterp test_deque test_gc test_finalization test_sys
""".split()
SLOW_SECONDS = 8.0
LIMITS = {"plain": 30.0, "traced": float(os.environ.get("LANGUAGE_TESTS_LIMIT", "60")), "nopython": 60.0}
NOT_RUN = {
    "test_decimal",
    "test_pickle",
    "test_datetime",
    "test_gc",
    "test_sys",
    "test_tokenize",
    "test_compile",
    "test_symtable",
    "test_pyclbr",
    "test_zlib",
}
MAX_RESTARTS = 40


@dataclass
class Job:
    """One module in one mode; `run` tells the two plain runs apart."""

    module: str
    mode: str
    run: str
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    skip: set[str] = field(default_factory=set)
    current: str | None = None
    missing: str | None = None
    finished: bool = False
    pid: int = 0
    fd: int = -1
    buffer: bytes = b""
    begun: float = 0.0
    asleep: int = 0
    restarts: int = 0
    kept: Path | None = None

    def restore(self) -> None:
        """Take up the verdicts that an interrupted run has kept."""
        if self.kept is not None and self.kept.exists():
            for line in self.kept.read_text().splitlines():
                record = json.loads(line)
                self.finished = self.finished or "finished" in record
                if "test" in record:
                    self.records[record.pop("test")] = record

    def keep(self, **record: Any) -> None:
        if self.kept is not None:
            with self.kept.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def note(self, test: str, record: dict[str, Any]) -> None:
        if test not in self.records:
            self.records[test] = record
            self.keep(test=test, **record)

    def start(self, only: str) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(read)
                language_worker.run_module(self.module, self.mode, frozenset(self.skip | self.records.keys()), only, write)
            finally:
                os._exit(1)
        os.close(write)
        self.fd, self.buffer, self.current = read, b"", None
        self.restart_clock()

    def restart_clock(self) -> None:
        self.begun, self.asleep = _processor_seconds(self.pid)[0], 0

    def feed(self, data: bytes) -> None:
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if "begin" in record:
                self.current = record["begin"]
                self.restart_clock()
            elif "end" in record:
                self.note(record.pop("end"), record)
                self.current = None
                self.restart_clock()
            elif "missing" in record:
                self.missing = record["missing"]
                self.finished = True
            elif "done" in record:
                self.finished = True

    def ended(self) -> bool:
        """The child's pipe was closed: True when the module is through, False when it must go on in a new child."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        if not self.finished:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.waitstatus_to_exitcode(status)}"
            self.lose(f"crash: {how}")
            self.finished = self.restarts > MAX_RESTARTS
        if self.finished:
            self.keep(finished=True)
        return self.finished

    def lose(self, how: str) -> None:
        self.restarts += 1
        if self.current is not None:
            self.note(self.current, _lost(how))
        elif self.restarts > 3 and not self.records:
            self.restarts = MAX_RESTARTS + 1

    def kill_when_late(self) -> None:
        """Called once a second. What counts is processor time and time asleep: on a busy machine a child that waits for its turn is not late."""
        spent, runnable = _processor_seconds(self.pid)
        self.asleep += not runnable
        if spent - self.begun + self.asleep > LIMITS[self.mode]:
            if self.current is not None:
                self.note(self.current, _lost("timeout"))
            else:
                self.restarts = MAX_RESTARTS
            os.killpg(self.pid, signal.SIGKILL)


def _processor_seconds(pid: int) -> tuple[float, bool]:
    """Processor time that a process has used, and whether it runs or waits for a processor."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0, False
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R"


def _lost(how: str) -> dict[str, Any]:
    return {"outcome": [how], "captured": 0, "breaks": [], "faults": [], "details": [], "seconds": 0.0}


def run_jobs(waiting: list[Job], only: str = "", processes: int = 2, report: bool = False) -> None:
    """Run all jobs, some at a time."""
    selector = selectors.DefaultSelector()
    language_worker.warm_up()
    for job in waiting:
        job.restore()
    waiting = [job for job in reversed(waiting) if not job.finished]
    running: dict[int, Job] = {}
    checked = time.monotonic()
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop()
            job.start(only)
            running[job.fd] = job
            selector.register(job.fd, selectors.EVENT_READ)
        for key, _ in selector.select(1.0):
            job = running[key.fd]
            data = os.read(key.fd, 1 << 16)
            if data:
                job.feed(data)
                continue
            selector.unregister(key.fd)
            del running[key.fd]
            if not job.ended():
                waiting.append(job)
            elif report:
                print(f"{job.module} {job.run}: {len(job.records)} tests", file=sys.stderr, flush=True)
        if time.monotonic() - checked >= 1.0:
            checked = time.monotonic()
            for job in running.values():
                job.kill_when_late()


def exists(module: str) -> bool:
    return importlib.util.find_spec(f"test.{module}") is not None


@dataclass
class Comparison:
    """The runs of one module side by side."""

    module: str
    plain: dict[str, dict[str, Any]]
    again: dict[str, dict[str, Any]]
    traced: dict[str, dict[str, Any]]
    nopython: dict[str, dict[str, Any]]

    def unstable(self) -> dict[str, str]:
        reasons = {}
        for name, record in self.plain.items():
            other = self.again.get(name)
            if other is None or other["outcome"] != record["outcome"]:
                reasons[name] = f"two plain runs differ: {record['outcome']} / {other and other['outcome']}"
            elif record["outcome"][0].startswith(("timeout", "crash")):
                reasons[name] = f"plain run: {record['outcome'][0]}"
            elif record["seconds"] > SLOW_SECONDS:
                reasons[name] = f"takes {record['seconds']} s plain"
        return reasons

    def summary(self) -> dict[str, Any]:
        unstable = self.unstable()
        stable = [name for name in self.plain if name not in unstable]
        differing = {
            name: {"plain": self.plain[name]["outcome"], "traced": self.traced[name]["outcome"] if name in self.traced else ["not run"]}
            for name in stable
            if self.traced and (name not in self.traced or self.traced[name]["outcome"] != self.plain[name]["outcome"])
        }
        passing = [name for name in stable if self.plain[name]["outcome"] == ["pass"]]
        captured = [name for name in passing if _captured(self.nopython.get(name))]
        return {
            "tests": len(self.plain),
            "compared": len(stable),
            "same": len(stable) - len(differing),
            "entered": sum(self.traced[name]["captured"] > 0 for name in stable if name in self.traced),
            "passing": len(passing),
            "nopython": len(captured),
            "differences": differing,
            "unstable": unstable,
        }


def _captured(record: dict[str, Any] | None) -> bool:
    return record is not None and record["outcome"] == ["pass"] and record["captured"] > 0


def compare_modules(
    names: list[str],
    modes: tuple[str, ...],
    only: str = "",
    processes: int = 2,
    report: bool = False,
    repeat: bool = True,
    keep: Path | None = None,
) -> list[Comparison]:
    """Run the modules in the given modes and put the runs side by side. `repeat`: the plain run twice, to tell what is stable; `keep`: see `--keep`."""
    runs = [("plain", "plain"), ("traced", "traced"), ("nopython", "nopython")]
    if repeat:
        runs.insert(1, ("again", "plain"))
    jobs = [Job(name, mode, run, kept=keep and keep / f"{name}.{run}.jsonl") for name in names for run, mode in runs if mode in modes]
    run_jobs(jobs, only, processes, report)
    by_key = {(job.module, job.run): job.records for job in jobs}
    empty: dict[str, dict[str, Any]] = {}
    return [
        Comparison(
            name,
            by_key[name, "plain"],
            by_key[name, "again" if repeat else "plain"],
            by_key.get((name, "traced"), empty),
            by_key.get((name, "nopython"), empty),
        )
        for name in names
    ]


def report_of(comparisons: list[Comparison]) -> dict[str, Any]:
    """Totals, break reasons by how many tests they cost, and what differs, as JSON."""
    modules = {c.module: c.summary() for c in comparisons}
    total = {key: sum(m[key] for m in modules.values()) for key in ("tests", "compared", "same", "entered", "passing", "nopython")}
    reasons: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    for c in comparisons:
        for record in c.nopython.values():
            if not _captured(record):
                reasons.update(record["breaks"][:1])
        for run in (c.traced, c.nopython):
            for record in run.values():
                faults.update(set(record["faults"]))
    return {
        "python": platform.python_version(),
        "total": total,
        "same_verdict": round(total["same"] / max(total["compared"], 1), 5),
        "nopython_rate": round(total["nopython"] / max(total["passing"], 1), 4),
        "break_reasons": dict(reasons.most_common(60)),
        "internal_errors": dict(faults.most_common(60)),
        "modules": modules,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default="")
    parser.add_argument("--only", default="", help="text that the id of a test must contain")
    parser.add_argument("--modes", default="plain,traced,nopython")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--details", type=Path, help="file for tracebacks of what differs")
    parser.add_argument("--keep", type=Path, help="directory for the verdicts, from which an interrupted run goes on")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    names = options.modules.split(",") if options.modules else [name for name in dict.fromkeys(MODULES) if name not in NOT_RUN]
    names = [name for name in names if exists(name)]
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        (options.keep / "python").write_text(platform.python_version())
    comparisons = compare_modules(names, tuple(options.modes.split(",")), options.only, options.processes, True, keep=options.keep)
    results = report_of(comparisons)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.details is not None:
        options.details.write_text(json.dumps(details(comparisons), indent=1) + "\n")
    for name, summary in results["modules"].items():
        for test, outcome in summary["differences"].items():
            print(f"{name}: {test}\n    plain  {outcome['plain'][0][:300]}\n    traced {outcome['traced'][0][:600]}")
    print(json.dumps({key: value for key, value in results.items() if key != "modules"}, indent=1))
    return 0


def details(comparisons: list[Comparison]) -> dict[str, Any]:
    """Tracebacks of tests that do not pass, and of internal errors."""
    found = {}
    for c in comparisons:
        for run in ("traced", "nopython"):
            for name, record in getattr(c, run).items():
                if record["details"] or record["outcome"] != c.plain.get(name, record)["outcome"]:
                    found[f"{run} {name}"] = {"outcome": record["outcome"], "details": record["details"], "seconds": record["seconds"]}
    return found


if __name__ == "__main__":
    sys.exit(main())
