"""One compiled graph for all sizes of a domain: `Family.of(samples)`, `family.at(sizes, name)`.

    samples: plans and texts of the same graph at several sizes      ->      a template, whose varying numbers are expressions of the sizes (fit.py)

Nothing is proved of the compiler's choices; they are made under `sampling` (base/varying.py), so that few of them go by sizes, and those that do must be the same in all samples, the ends of the
domain among them. What is equal in all samples stays. What differs must be an expression that is also true of samples which were not needed to find it. Memory is laid out as for the largest sizes.
Kernels are functions of the form that all samples share, with the numbers that differ as arguments: they are compiled once.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch

from magneto import _C
from magneto.base.dataclass import dataclass, fields
from magneto.base.events import counter, emit
from magneto.base.flags import config
from magneto.inductor.codegen.cpp_preamble import preamble
from magneto.inductor.fit import SPARE, Fit, Polynomial, bits
from magneto.inductor.recall import BuildFailed, built
from magneto.inductor.runtime.build import KernelText
from magneto.inductor.runtime.compiler import vector_math_level
from magneto.inductor.runtime.kept import Finished
from magneto.inductor.runtime.plan_code import PlanCode, carve
from magneto.inductor.runtime.preparation import Preparation, every_time
from magneto.inductor.runtime.share import BOUND, FLOAT, FROM_MEMORY, HEAD, INT, LENGTH, MARKS, VECTOR, Place, form_of, placed

Sizes = tuple[int, ...]
Sample = tuple[Sizes, Finished, Any]

VALUES: dict[str, tuple[int, ...]] = {"CONST": (2,), "ALLOC": (3, 4), "VIEW": (4,), "LAYOUT": (3, 4), "KEEP": (3,), "TABLE": (3,)}
"""Which parts of an instruction are values; the others say what it does with which registers."""
ATTEMPTS = 12  # domains that are tried
BLOCKS = 3  # arenas that idle plans hold


class _Arenas:
    """Memory for the arenas of all plans of a family: a length that grows has a plan for each step, and they use the same pages. Plans that are idle give theirs back when another needs one."""

    def __init__(self) -> None:
        self.plans: list[weakref.ref[Any]] = []
        self.blocks: list[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = []  # and what the plan that has it holds
        self.lock = threading.Lock()

    def serve(self, plan: _C.Plan) -> None:
        with self.lock:
            self.plans = [*(ref for ref in self.plans if ref() is not None), weakref.ref(plan)]

    def take(self, nbytes: int) -> torch.Tensor:
        with self.lock:
            place = self._free()
            if place == len(self.blocks) >= BLOCKS:
                for ref in self.plans:
                    if (plan := ref()) is not None:
                        plan.release_workspace()
                place = self._free()
            block = self.blocks.pop(place)[0] if place < len(self.blocks) else torch.empty(nbytes, dtype=torch.uint8)
            given = block[:]
            self.blocks.append((block, weakref.ref(given)))
            return given

    def _free(self) -> int:
        return next((k for k, (_, user) in enumerate(self.blocks) if user() is None), len(self.blocks))


class _Differs(Exception):
    """Why samples are not of one family."""


@dataclass(frozen=True, slots=True)
class Family:
    """`domain`: the smallest and the largest of each size; divided by `by`, they leave what those of `like` do. `make`: from sizes to (instructions, the samples' third part)."""

    domain: tuple[tuple[int, int], ...]
    code: PlanCode
    make: Callable[..., tuple[tuple[tuple[Any, ...], ...], Any]]
    arenas: _Arenas
    like: Sizes
    by: Sizes
    preparation: Preparation | None = None

    @staticmethod
    def of(samples: Sequence[Sample], whole: bool = False, by: Sizes = ()) -> Family | str:
        """The family of the first sample, and of the largest domain between others that is one; why there is none. `whole`: of all samples, or none. `by`: of sizes that leave what it leaves."""
        by = by or (1,) * len(samples[0][0])
        samples = [sample for sample in samples if alike(sample[0], samples[0][0], by)]
        why = {sizes: differ(samples[0], sample) for sample in samples for sizes in sample[:1]}
        reason = next((f"at {sizes}: {text}" for sizes, text in why.items() if text), "there are too few samples")
        for domain in _domains(list(why))[:ATTEMPTS]:
            kept = [sample for sample in samples if _inside(sample[0], domain)]
            if any(why[sizes] for sizes, _, _ in kept):
                continue
            if whole and len(kept) < len(samples):
                break
            if not _mixed([sizes for sizes, _, _ in kept], domain, by):
                reason = f"between {domain} all samples have the same divisors"
                continue
            try:
                return _Template(kept, domain, by=by).family()
            except _Differs as error:
                reason = f"between {domain}: {error}"
            except Exception as error:
                if not (isinstance(error, BuildFailed) or config.suppress_errors):
                    raise
                return str(error)
        return reason

    def holds(self, sizes: Sizes) -> bool:
        return _inside(sizes, self.domain) and alike(sizes, self.like, self.by)

    def at(self, sizes: Sizes, name: str) -> tuple[Callable[..., Any], Any] | None:
        """The plan for these sizes, and the samples' third part; None outside of the domain."""
        if not self.holds(sizes):
            return None
        instructions, rest = self.make(*sizes)
        code, prepared = self.code, self.preparation
        if prepared is None:
            parts = every_time(instructions), code.n_registers, code.n_inputs, code.outputs
        else:
            parts = prepared.apart(instructions, code)
        plan = _C.Plan(*parts, recycle=config.recycle_results)
        self.arenas.serve(plan)
        counter("plans_of_families")
        emit("artifact", artifact="plan", graph=name, family=self.domain, sizes=sizes, arena_bytes=code.arena_bytes)
        return plan if prepared is None else prepared.ahead_of(plan), rest


def probes(sizes: Sizes, narrow: bool = False, few: bool = False, by: Sizes = ()) -> list[Sizes]:
    """Sizes at which to take samples for a family of these: themselves, both ends of a domain, and between these prime numbers, even ones, and multiples of 8. Reductions are written in another way from each of ENDS on; where a
    graph's structure changes in between, `narrow` gives a smaller domain. `few`: those that will do where all are of one family. `by`: those beside that, divided by these, leave what the sizes leave."""
    lows = [max(2, 3 * n // 4) if narrow else max(end for end in ENDS if end <= n) for n in sizes]
    highs = [5 * n // 4 + 2 if narrow else min((end for end in ENDS if end > n), default=4 * n) - 1 for n in sizes]
    found = [sizes, tuple(lows), tuple(highs)]
    if len(sizes) > 1:
        found += [tuple((lows, highs)[(k + turn) % 2][k] for k in range(len(sizes))) for turn in range(2)]
    for step in FEW if few else range(1, STEPS + 1):  # further apart the larger they are; each size in another order
        where = [(step * (2 * k + 1)) % (STEPS + 1) / (STEPS + 1) for k in range(len(sizes))]
        found.append(tuple(_between(low, high, at, step + k) for k, (low, high, at) in enumerate(zip(lows, highs, where, strict=True))))
    beside = [tuple(map(_beside, one, sizes, highs, by or (1,) * len(sizes))) for one in found]
    return list(dict.fromkeys(beside))


def _beside(size: int, like: int, high: int, by: int) -> int:
    """The next one that leaves the same as another, divided by a number."""
    found = size + (like - size) % by
    return found if found <= high else found - by


def alike(a: Sizes, b: Sizes, by: Sizes) -> bool:
    """Do sizes leave the same, divided by these numbers?"""
    return all((n - m) % divisor == 0 for n, m, divisor in zip(a, b, by, strict=True))


ENDS = (2, 32, 256, 2048, 16384, 131072, 1 << 20)
STEPS = 6
FEW = (2, 3, 5)  # of the first size a prime number, one times 8 and one times 2


def _between(low: int, high: int, at: float, turn: int) -> int:
    """A prime number between two sizes, `at` this part of the way; in turn one times 2 or 8."""
    times = (1, 2, 1, 8)[turn % 4]
    first = round(low * (high / low) ** at / times)
    candidates = sorted(range(max(1, -(-low // times), first - 200), min(high // times, first + 200) + 1), key=lambda n: abs(n - first))
    return times * next((n for n in candidates if all(n % d for d in range(2, math.isqrt(n) + 1))), first)


def _mixed(samples: Sequence[Sizes], domain: Sequence[tuple[int, int]], like: Sizes) -> bool:
    """Are of each size some samples even, and some multiples of 8, and others not? `like`: but where sizes that leave the same, divided by these, cannot be."""
    return all(
        len({n % by == 0 for n in column}) == 2
        for column, (low, high), divisor in zip(zip(*samples, strict=True), domain, like, strict=True)
        for by in (2, 8)
        if high - low >= 2 * by and divisor % by and column[0] % math.gcd(divisor, by) == 0
    )


def _inside(sizes: Sizes, domain: Sequence[tuple[int, int]]) -> bool:
    return all(low <= n <= high for n, (low, high) in zip(sizes, domain, strict=True))


def _domains(samples: Sequence[Sizes]) -> list[tuple[tuple[int, int], ...]]:
    """Those round the first sample whose smallest and largest sizes are samples, that of most samples first."""
    ends = [(a, b) for a in samples for b in samples if all(x <= n <= y for x, n, y in zip(a, samples[0], b, strict=True))]
    found = {tuple(zip(a, b, strict=True)): sum(_inside(s, tuple(zip(a, b, strict=True))) for s in samples) for a, b in ends}
    return sorted((domain for domain, many in found.items() if many >= SPARE + 2), key=lambda domain: -found[domain])


def differ(a: Sample, b: Sample) -> str:
    """Why two samples have not the same structure; empty where they have."""
    try:
        _Template([a, b], (), False)
    except _Differs as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class _Same:
    value: Any


class _Template:
    """Python source of the instructions, over the sizes n0, n1, ... and the objects c[0], c[1], ... `fitted`: expressions are looked for; otherwise only whether samples have one structure."""

    def __init__(self, samples: Sequence[Sample], domain: Sequence[tuple[int, int]], fitted: bool = True, by: Sizes = ()) -> None:
        self.sizes, self.domain, self.fitted, self.by = [sizes for sizes, _, _ in samples], domain, fitted, by
        self.fit = Fit(self.sizes, by)
        self.largest = max(range(len(samples)), key=lambda k: self.sizes[k])
        self.objects: list[Any] = []
        self.arenas = _Arenas()
        self.codes = [finished.code for _, finished, _ in samples]
        text = preamble(vector_math_level())
        self.texts = [{KernelText.of(body, text).hash: body for _, body in finished.kernels} for _, finished, _ in samples]
        self.launches: list[tuple[int, str, tuple[tuple[str, ...], ...]]] = []  # instruction, form, numbers by place
        self.arena: dict[int, list[tuple[int, int]]] = {}  # register -> (offset, bytes) in each sample
        for what in ("n_registers", "n_inputs", "outputs", "tail"):
            self._equal([getattr(code, what) for code in self.codes], what)
        self._equal([len(code.instructions) for code in self.codes], "instructions")
        self._equal([finished.written for _, finished, _ in samples], "results written into inputs")
        self.lines = [self._instruction(k, one) for k, one in enumerate(zip(*(code.instructions for code in self.codes), strict=True))]
        self.rest = self._value([rest for _, _, rest in samples], "rest")

    def _equal(self, values: Sequence[Any], where: str) -> Any:
        if any(value != values[0] for value in values):
            raise _Differs(f"{where}: {values[0]!r:.80} and {next(v for v in values if v != values[0])!r:.80}")
        return values[0]

    # ---- values ------------------------------------------------------------------------------------------------------------

    def _object(self, value: Any) -> str:
        self.objects.append(value)
        return f"c[{len(self.objects) - 1}]"

    def _source(self, found: str | _Same) -> str:
        if isinstance(found, str):
            return found
        return repr(found.value) if type(found.value) in (int, bool, str, type(None)) else self._object(found.value)

    def _integer(self, column: tuple[int, ...], where: str) -> Polynomial:
        found = self.fit.integer(column)
        if found is None:
            raise _Differs(f"{where}: {list(column)} at {self.sizes} is no polynomial")
        return found

    def _value(self, values: Sequence[Any], where: str) -> str | _Same:
        """The source of a value, or the value that all samples have."""
        first = values[0]
        if all(value is first for value in values):
            return _Same(first)
        kind = type(first)
        if any(type(value) is not kind for value in values):
            raise _Differs(f"{where}: {kind.__name__} and {next(type(v) for v in values if type(v) is not kind).__name__}")
        if kind in (int, float):
            return self._number(values, where)
        if isinstance(first, (tuple, list)):
            self._equal([len(value) for value in values], f"length of {where}")
            return self._whole(first, [self._value(items, where) for items in zip(*values, strict=True)])
        if kind is dict:
            self._equal([list(value) for value in values], f"names of {where}")
            return self._made(first, "dict", [(f"{name!r}: ", self._value([v[name] for v in values], where)) for name in first])
        if kind is slice:
            parts = [(s.start, s.stop, s.step) for s in values]
            return self._made(first, "slice", [("", self._value(part, where)) for part in zip(*parts, strict=True)])
        if is_dataclass(first):
            names = [field.name for field in fields(first) if field.init]
            return self._made(first, "", [(f"{n}=", self._value([getattr(v, n) for v in values], f"{where}.{n}")) for n in names])
        if isinstance(first, torch.Tensor):
            if not all(_equal_tensors(first, value) for value in values[1:]):
                raise _Differs(f"{where}: tensors differ")
            return _Same(first)
        return _Same(self._equal(values, where))

    def _number(self, values: Sequence[Any], where: str) -> str | _Same:
        if all(repr(value) == repr(values[0]) for value in values):
            return _Same(values[0])
        if not self.fitted:
            return "0"
        if type(values[0]) is int:
            return self._integer(tuple(values), where).text
        found = self.fit.real(tuple(values), False)
        if found is None:
            raise _Differs(f"{where}: {list(values)} at {self.sizes} are no expression")
        return found

    def _whole(self, first: Any, items: Sequence[str | _Same]) -> str | _Same:
        if all(isinstance(item, _Same) for item in items):
            return _Same(first)
        text = ", ".join(map(self._source, items))
        if type(first) is list:
            return f"[{text}]"
        if type(first) is tuple:
            return f"({text},)"
        return f"{self._object(type(first))}({f'({text},)' if type(first) is torch.Size else text})"

    def _made(self, first: Any, kind: str, items: Sequence[tuple[str, str | _Same]]) -> str | _Same:
        if all(isinstance(item, _Same) for _, item in items):
            return _Same(first)
        text = ", ".join(name + self._source(item) for name, item in items)
        return f"{{{text}}}" if kind == "dict" else f"{kind or self._object(type(first))}({text})"

    # ---- instructions ------------------------------------------------------------------------------------------------------

    def _instruction(self, number: int, forms: Sequence[tuple[Any, ...]]) -> str | _Same:
        op = self._equal([form[0] for form in forms], f"instruction {number}")
        where = f"{op} {number}"
        self._equal([len(form) for form in forms], where)
        if op in ("KERNEL", "TABLE"):
            return self._kernel(number, forms, where)
        if op == "VIEW" and forms[0][3] is carve:
            return self._carved(forms, where)
        if op == "ALLOC" and forms[0][2] is torch.empty and forms[0][3] == (self.codes[0].arena_bytes,):
            largest = forms[self.largest]
            if self.fitted and largest[3][0] < max(form[3][0] for form in forms):
                raise _Differs("the arena is not largest for the largest sizes")
            self._equal([(form[1], form[2], form[4], form[5]) for form in forms], where)
            return _Same((*largest[:2], self.arenas.take, largest[3], {}, True))
        values = VALUES.get(op, ())
        return self._whole(
            forms[0],
            [
                self._value(part, where) if k in values else _Same(self._equal(part, where))
                for k, part in enumerate(zip(*forms, strict=True))
            ],
        )

    def _carved(self, forms: Sequence[tuple[Any, ...]], where: str) -> str | _Same:
        """A buffer in the arena lies where it does for the largest sizes."""
        self._equal([(form[1], form[2], form[3], form[5]) for form in forms], where)
        places = [form[4][:2] for form in forms]
        if self.fitted and places[self.largest][1] < max(nbytes for _, nbytes in places):
            raise _Differs(f"{where}: not largest for the largest sizes")
        self.arena[forms[0][1]] = places
        args = [_Same(places[self.largest][0])] + [self._value(part, where) for part in zip(*(form[4][1:] for form in forms), strict=True)]
        like = forms[self.largest]
        return self._whole(like, [*map(_Same, like[:4]), self._whole(like[4], args), _Same(like[5])])

    def _kernel(self, number: int, forms: Sequence[tuple[Any, ...]], where: str) -> str | _Same:
        """Noted for `family`, which knows the functions."""
        self._equal([form[2] for form in forms], where)
        found = [form_of(texts[form[1]], True) for texts, form in zip(self.texts, forms, strict=True)]
        for other, _ in found[1:]:
            if other != found[0][0]:
                raise _Differs(_first_line(where, found[0][0], other))
        if forms[0][0] == "TABLE":
            self._equal([(form[3], numbers) for form, (_, numbers) in zip(forms, found, strict=True)], where)
        for a, b in itertools.combinations([r for r in forms[0][2] if r in self.arena], 2):
            self._shared(self.arena[a], self.arena[b], where)
        self.launches.append((number, found[0][0], tuple(zip(*(numbers for _, numbers in found), strict=True))))
        return _Same(None)

    def _shared(self, a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]], where: str) -> None:
        """A buffer that takes another's place while both are in use does so in every sample."""
        (start, size), (other, length) = a[self.largest], b[self.largest]
        if self.fitted and start < other + length and other < start + size and any(x[0] != y[0] for x, y in zip(a, b, strict=True)):
            raise _Differs(f"{where}: memory is taken over for the largest sizes only")

    # ---- kernels -----------------------------------------------------------------------------------------------------------

    def family(self) -> Family:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for k, (_, form, columns) in enumerate(self.launches):
            groups.setdefault((form, *(column[0] if len(set(column)) == 1 else None for column in columns)), []).append(k)
        kernels: dict[int, tuple[KernelText, str]] = {}  # launch -> function, and the source of what it is passed
        for members in groups.values():
            text, passed = self._function([self.launches[k] for k in members])
            kernels.update((k, (text, arguments)) for k, arguments in zip(members, passed, strict=True))
        addresses = built([text for text, _ in {text.hash: (text, "") for text, _ in kernels.values()}.values()])
        for k, (text, arguments) in kernels.items():
            number = self.launches[k][0]
            forms = [code.instructions[number] for code in self.codes]
            (op, _, registers, *work), release = forms[0][:-1], any(form[-1] for form in forms)
            address = addresses[text.hash]
            if not isinstance(address, int):
                address, own = address
                work = [own]
            if arguments:
                self.lines[number] = f"('TABLE', {address}, {registers}, ({arguments},), {release})"
            else:
                self.lines[number] = _Same(("TABLE" if work else op, address, registers, *work, release))
        counter("families")
        counter("kernels_of_families", len(groups))
        names = ", ".join(f"n{k}" for k in range(len(self.sizes[0])))
        source = f"lambda {names}: (({''.join(f'{self._source(line)}, ' for line in self.lines)}), {self._source(self.rest)})"
        make = eval(source, {"c": self.objects, "sqrt": math.sqrt, "bits": bits})
        code = self.codes[self.largest]
        preparation = Preparation.of([line.value if isinstance(line, _Same) else None for line in self.lines], code)
        return Family(tuple(self.domain), code, make, self.arenas, self.sizes[0], self.by, preparation)

    def _function(self, launches: Sequence[tuple[int, str, tuple[tuple[str, ...], ...]]]) -> tuple[KernelText, list[str]]:
        """The function that launches of one form call, and what each passes."""
        form, where = launches[0][1], f"kernel of instruction {launches[0][0]}"
        arguments: dict[tuple[tuple[str, ...], ...], int] = {}
        sources: list[list[str]] = []
        places: list[Place] = []
        for kind, *columns in zip([c for c in form if c in MARKS], *(own for _, _, own in launches), strict=True):
            if len(set(columns[0])) == 1:
                places.append(Place(kind, text=columns[0][0]))
            elif kind == BOUND:
                bounds = [[int(n) for n in column] for column in columns]
                if any(own[self.largest] < max(own) for own in bounds):
                    raise _Differs(f"{where}: an array is not longest for the largest sizes")
                places.append(Place(kind, text=str(max(map(max, bounds)))))
            else:
                key = tuple(columns)
                made = [self._argument(kind, column, where) for column in columns]
                if key not in arguments:
                    arguments[key] = len(arguments)
                    sources.append([source for source, _ in made])
                vectors = kind in (INT, LENGTH) and all(whole for _, whole in made)
                places.append(Place(kind, argument=arguments[key], vectors=vectors))
        text = placed(form, places)
        if arguments:
            head = HEAD.match(text)
            assert head is not None
            types = ["f64" if "." in key[0][0] else "i64" for key in arguments]
            types = ["f32" if key[0][0].endswith("f") else type for key, type in zip(arguments, types, strict=True)]
            own = "".join(f"    const {type} n{k} = {FROM_MEMORY[type].format(k)};\n" for k, type in enumerate(types))
            text = f"{head[1]}int SYMBOL({head[2]}, const i64 *n) {{\n{own}{text[head.end() :].lstrip(chr(10))}"
        passed = [", ".join(column) for column in zip(*sources, strict=True)] if sources else [""] * len(launches)
        return KernelText.of(text, preamble(vector_math_level())), passed

    def _argument(self, kind: str, column: tuple[str, ...], where: str) -> tuple[str, bool]:
        """The source of what is passed for a number of a text, and whether it is always a whole number of vectors."""
        if kind == FLOAT:
            single = column[0].endswith("f")
            values = [t.removesuffix("f") for t in column]
            found = self.fit.real(tuple(float.fromhex(t) if "x" in t else float(t) for t in values), single)
            if found is None:
                raise _Differs(f"{where}: {list(column)} at {self.sizes} are no expression")
            return f"bits({found})", False
        polynomial = self._integer(tuple(int(t.removesuffix("LL")) for t in column), where)
        return polynomial.text, polynomial.divisible(VECTOR)


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same constant?"""
    alike = a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype and a.device == b.device
    return alike and not (a.requires_grad or b.requires_grad) and torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def _first_line(where: str, a: str, b: str) -> str:
    """Where two texts differ."""
    lines = ((x, y) for x, y in zip(a.split("\n"), b.split("\n"), strict=False) if x != y)
    x, y = next(lines, ("", "the end"))
    return f"{where}: " + re.sub(f"[{MARKS}]", "#", f"{x.strip()!r:.80} and {y.strip()!r:.80}")
