"""One module of CPython's own tests, run in a forked child: plain, with each test method optimised, or optimised under nopython.

The child writes a JSON line when a test begins and one when it has ended, so that the parent knows which test crashed or hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import doctest
import gc
import importlib
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import magneto
from magneto import _C
from magneto.base import events
from magneto.base.errors import GraphBreak

MODES = ("plain", "traced", "nopython")
MEMORY = 12 << 30
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}|\b\d{9,}\b|@test_\d+_tmp\w*|/tmp/\w+")


def describe(kind: type[BaseException], error: BaseException) -> str:
    """Type and message of an exception, without addresses and names of temporary files."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"<message raises {type(broken).__name__}>"
    return _ADDRESS.sub("...", f"{kind.__name__}: {text}")[:2000]


class Verdicts(unittest.TestResult):
    """Writes each test's verdict as a line of JSON; optimises the method of each test before it runs."""

    def __init__(self, out: int, mode: str) -> None:
        super().__init__()
        self.out = out
        self.mode = mode
        self.outcomes: list[str] = []
        self.details: list[str] = []
        self.breaks: list[str] = []
        self.faults: list[str] = []
        self.optimized: Any = None
        self.hooked = 0
        self.begun = 0.0
        events.subscribe(self.note)

    def note(self, event: events.Event) -> None:
        if event.kind == "fallback" and "internal error" in event.fields.get("reason", ""):
            self.faults.append(f"{event.fields.get('what')}: {event.fields.get('reason')}"[:600])
            self.details.append(event.fields.get("traceback", "")[-3000:])
        elif event.kind == "break":
            self.breaks.append(f"{event.fields['id']} {_ADDRESS.sub('...', event.fields['reason'])}"[:200])

    def write(self, **record: Any) -> None:
        os.write(self.out, json.dumps(record).encode("ascii") + b"\n")

    # -- the protocol of unittest

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.outcomes, self.details, self.breaks, self.faults = [], [], [], []
        self.hooked = _C.counters()["hits"]
        self.write(begin=test.id())
        random.seed(1)
        self.begun = time.process_time()
        if self.mode != "plain":
            self.optimise(test)

    def optimise(self, test: unittest.TestCase) -> None:
        name = test._testMethodName
        method = getattr(test, name)
        self.optimized = optimized = magneto.optimize("eager", nopython=self.mode == "nopython")(method)
        for mark in ("__unittest_skip__", "__unittest_skip_why__", "__unittest_expecting_failure__"):
            if hasattr(method, mark):
                setattr(optimized, mark, getattr(method, mark))
        call = test._callTestMethod  # Python 3.12.1 looks the method up before it says that the test starts
        test.__dict__["_callTestMethod"] = lambda _: call(optimized)

    def stopTest(self, test: unittest.TestCase) -> None:
        test.__dict__.pop("_callTestMethod", None)
        captured = _C.counters()["hits"] - self.hooked
        if self.optimized is not None:
            own = sys.modules[type(test).__module__].__file__
            files = {own, *(getattr(sys.modules.get(base.__module__), "__file__", None) for base in type(test).__mro__)}
            captured = captured if any(region.code.co_filename in files for region in _C.regions(None, self.optimized.policy)) else 0
            self.optimized = None
        self.write(
            end=test.id(),
            seconds=round(time.process_time() - self.begun, 2),
            outcome=self.outcomes or ["none"],
            captured=captured,
            breaks=self.breaks,
            faults=self.faults,
            details=self.details,
        )
        super().stopTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.outcomes.append("pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcomes.append("skip")

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.outcomes.append("expected failure")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.outcomes.append("unexpected success")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.failed("fail", test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.failed("error", test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:
        if err is not None:
            self.failed("fail" if issubclass(err[0], test.failureException) else "error", test, err)

    def failed(self, what: str, test: Any, err: Any) -> None:
        kind, error, tb = err
        text = f"{what} {describe(kind, error)}"
        detail = "".join(traceback.format_exception(kind, error, tb))[-6000:]
        if isinstance(error, GraphBreak):
            self.breaks.append(f"{error.id} {_ADDRESS.sub('...', error.reason)}"[:200])
        if not isinstance(test, unittest.TestCase):  # a fixture of a class or a module
            self.write(begin=str(test))
            self.write(end=str(test), outcome=[text], captured=0, breaks=[], faults=[], details=[detail], seconds=0.0)
        self.outcomes.append(text)
        self.details.append(detail)


def warm_up() -> None:
    """Load, before any child is forked, what the first capture of a process loads; the many tests that collect garbage need not walk it each time."""
    magneto.optimize("eager")(lambda: [str(n) for n in range(2)])()
    magneto.reset()
    gc.collect()
    gc.freeze()


def flatten(suite: Any) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


def collect(module: Any) -> list[unittest.TestCase]:
    """The test methods of a module and its doctests, one test for each docstring, without tests that cannot be loaded."""
    loader = unittest.TestLoader()
    found = []
    for name in sorted(vars(module)):
        cls = getattr(module, name)
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase) and cls not in (unittest.TestCase, unittest.FunctionTestCase):
            found.extend(flatten(loader.loadTestsFromTestCase(cls)))
    if hasattr(module, "load_tests"):
        found.extend(test for test in flatten(loader.loadTestsFromModule(module)) if isinstance(test, doctest.DocTestCase))
    return list({test.id(): test for test in found}.values())


def modules_of(name: str) -> list[Any]:
    """`test.test_x`, and all test modules in it where it is a package."""
    module = importlib.import_module(f"test.{name}")
    if not hasattr(module, "__path__"):
        return [module]
    names = sorted(f[:-3] for f in os.listdir(module.__path__[0]) if f.startswith("test_") and f.endswith(".py"))
    return [module, *(importlib.import_module(f"test.{name}.{inner}") for inner in names)]


def run_module(name: str, mode: str, skip: frozenset[str], only: str, out: int) -> None:
    """Body of the forked child: run the tests of `test.<name>` that are not in `skip` and whose id contains one of the comma-separated texts in `only`."""
    os.setsid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.environ.get("LANGUAGE_TESTS_LOG", os.devnull), os.O_RDWR | os.O_APPEND | os.O_CREAT)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    with contextlib.suppress(BaseException), tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        warnings.simplefilter("ignore", magneto.base.errors.MagnetoWarning)
        try:
            tests = [test for module in modules_of(name) for test in collect(module)]
        except (ImportError, unittest.SkipTest) as missing:
            os.write(out, json.dumps({"missing": repr(missing)}).encode("ascii") + b"\n")
            os._exit(0)
        result = Verdicts(out, mode)
        unittest.TestSuite(test for test in tests if test.id() not in skip and any(part in test.id() for part in only.split(","))).run(
            result
        )
        os.write(out, b'{"done": true}\n')
    os._exit(0)
