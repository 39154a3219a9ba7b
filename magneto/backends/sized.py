"""The callable of a captured graph whose inputs' sizes vary, for backends that must know them.

A call reads the sizes that vary, and runs the instance for them. A size without one gets it from a family: the graph is compiled at several sizes, as data, and what differs between them follows from
the sizes (inductor/family.py); what the graph's nodes are at the new size is computed by torch's rules and compared. Where there is no family the graph is specialised, and compiled as any other. Where that
may not be either (a size that comes once is not worth it, compiling has taken its share of the program's time, the graph fails at that size) the captured graph runs operation by operation.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from magneto.backends.families import Families, Sampler
from magneto.base.collection import no_collection
from magneto.base.dataclass import dataclass
from magneto.base.events import counter, emit, timer
from magneto.base.flags import config
from magneto.base.logs import log
from magneto.base.text import compile_source
from magneto.base.varying import varying
from magneto.dynamo.region.sizes import PATIENCE, Budget
from magneto.graph.atomic import atomic
from magneto.graph.specialise import specialised

Compiled = Callable[..., Any]
Key = tuple[int, ...]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


OF_FAMILIES = 1024  # instances that are a plan alone
OFTEN = 64  # calls, until a size of a family has kernels made for it,
STAY = 4  # as so many sizes may


@dataclass(slots=True)
class Instance:
    """What answers calls of one size. `used`: since the last one was dropped. `calls`: that found it."""

    run: Compiled
    compiled: bool  # not of a family
    used: bool = True
    calls: int = 0


def varying_sizes(gm: fx.GraphModule) -> tuple[tuple[int, int, int, int], ...]:
    """(input, dimension, symbol, what is added to it) of all sizes that vary from call to call; ~dimension: of a stride."""
    return tuple(getattr(gm, "meta", {}).get("magneto", {}).get("varying", ()))


class Sized:
    """The instances of one graph. `compile` makes the callable of a graph whose sizes are known, from example inputs. `slow`: that costs more than a call in eager. `sampler`: what it would compile, for families."""

    def __init__(self, gm: fx.GraphModule, compile: Compile, slow: bool, sampler: Sampler | None) -> None:
        meta = gm.meta["magneto"]
        self.gm = gm
        self.name = str(meta.get("name", "graph"))
        self.eager = atomic(gm)
        self.known: dict[Key, Instance] = {}
        self.seen: Counter[Key] = Counter()
        self.budget: Any = meta.get("budget") or Budget()
        self.families = None if sampler is None else Families(gm, self.name, sampler, self.eager, self.budget.allows)
        self._values = meta["resizer"].at
        self._compile, self._slow = compile, slow
        self._flags = config.patched()
        self._told = False
        self.stayed = 0
        self._lock = threading.RLock()
        first = {symbol: (index, dim, plus) for index, dim, symbol, plus in reversed(varying_sizes(gm))}
        read = "".join(
            f"i[{index}].shape[{dim}] - {plus}, " if dim >= 0 else f"i[{index}].stride({~dim}), "
            for _, (index, dim, plus) in sorted(first.items())
        )
        text = f"""def key(i):
    return ({read})
def run(*i):
    found = get(({read}))
    if found is None:
        return miss(i)
    found.used = True
    found.calls += 1
    if found.calls == {OFTEN}:
        stays(i)
    return found.run(*i)
"""
        made = compile_source(f"sizes of {self.name}", text, {"get": self.known.get, "miss": self.miss, "stays": self.stays})
        self.run: Compiled = made["run"]
        self.key: Callable[[Sequence[Any]], Key] = made["key"]

    def miss(self, inputs: Sequence[Any]) -> Any:
        """A call with sizes that have no instance."""
        found = self.instance(inputs)
        return (self.eager if found is None else found.run)(*inputs)

    def instance(self, inputs: Sequence[Any]) -> Instance | None:
        """The one for these inputs, made where it may be."""
        key = self.key(inputs)
        with self._lock:
            found = self.known.get(key)
            if found is None and (found := self._made(key, inputs)) is not None:
                self._make_room(found.compiled)
                self.known[key] = found
            return found

    def _made(self, key: Key, inputs: Sequence[Any]) -> Instance | None:
        with config.patch(**self._flags), timer("compile"), no_collection(), varying(True):
            if self.families is not None and (found := self.families.at(key, inputs)) is not None:
                return Instance(found, False)
            self.seen[key] += 1
            if len(self.seen) > PATIENCE:
                del self.seen[next(iter(self.seen))]
            more = self.families is not None and self.families.may_grow(key)
            once = self._slow and self.known and self.seen[key] < 2 and not more
            if once or not ((more and not self.known) or self._allowed()):  # the first family is what such a graph is captured for
                counter("sizes_in_eager")
                return None
            added = more and self.families is not None and self._values(key) is not None and self.families.add(key, inputs)
            if added and self.families is not None and (found := self.families.at(key, inputs)) is not None:
                return Instance(found, False)
            if (made := self._compiled(key, inputs)) is None:
                self._tell(f"what it computes at the sizes {key} is not known")
                return Instance(self.eager, False)
            return made

    def stays(self, inputs: Sequence[Any]) -> None:
        """A size that comes often is compiled for itself: kernels that know their sizes are faster, and weights are packed."""
        key = self.key(inputs)
        with self._lock:
            found = self.known.get(key)
            if found is None or found.compiled or found.run is self.eager or self.stayed >= STAY:
                return
            if not self.budget.allows():
                found.calls = 0
                return
            self.stayed += 1
            with config.patch(**self._flags), timer("compile"), no_collection(), varying(True):
                if (made := self._compiled(key, inputs)) is not None:
                    self._make_room(True)
                    self.known[key] = made

    def _compiled(self, key: Key, inputs: Sequence[Any]) -> Instance | None:
        values = self._values(key)
        if values is None:  # the program raises, or we cannot tell
            return None
        gm = specialised(self.gm, values)
        gm.meta["magneto"]["name"] = "_".join(map(str, (self.name, *key)))
        counter("sizes_compiled")
        return Instance(self._compile(gm, inputs), True)

    def _allowed(self) -> bool:
        if self.budget.allows():
            return True
        if not self._told:
            self._told = True
            self._tell(
                f"sizes change more often than compiling for them pays: it has taken {config.size_seconds:g} seconds and a quarter of the time since (size_seconds)"
            )
        return False

    def _tell(self, reason: str) -> None:
        emit("fallback", graph=self.name, reason=reason)
        counter("graphs_in_eager")
        log(1, lambda: f"{self.name} runs in eager: {reason}")

    def _make_room(self, compiled: bool) -> None:
        """The oldest instance of its kind that has not been called since the last one was dropped makes room for one more."""
        peers = [key for key, one in self.known.items() if one.compiled is compiled]
        if len(peers) < (config.size_variants if compiled else OF_FAMILIES):
            return
        idle = next((key for key in peers if not self.known[key].used), None)
        if idle is None:
            for key in peers:
                self.known[key].used = False
        del self.known[peers[0] if idle is None else idle]


def sized(gm: fx.GraphModule, inputs: Sequence[Any], compile: Compile, slow: bool, sampler: Sampler | None) -> Compiled:
    """The callable of `gm`, with an instance for the sizes of the inputs at hand."""
    made = Sized(gm, compile, slow, sampler)
    made.instance(inputs)
    return made.run
