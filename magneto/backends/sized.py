"""The callable of a captured graph whose inputs' sizes vary, for backends that must know them.

A call reads the sizes that vary, and runs the instance for them. A size without one makes it: the graph is specialised, and compiled as any other. Where that may not be (sizes that come once are not worth it,
compiling takes its share of the program's time, the graph fails at that size) the captured graph runs operation by operation.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from magneto.base.collection import no_collection
from magneto.base.errors import MagnetoError
from magneto.base.events import counter, emit, timer
from magneto.base.flags import config
from magneto.base.heard import taken
from magneto.base.logs import log
from magneto.base.text import compile_source
from magneto.base.varying import varying
from magneto.dynamo.region.sizes import PATIENCE, Budget
from magneto.graph.atomic import atomic
from magneto.graph.meta import TensorMeta
from magneto.graph.specialise import Propagation, specialised

Compiled = Callable[..., Any]
Key = tuple[int, ...]


@dataclass(slots=True)
class Instance:
    """What answers calls of one size. `used`: since the last one was dropped."""

    run: Compiled
    used: bool = True


def varying_sizes(gm: fx.GraphModule) -> tuple[tuple[int, int, int], ...]:
    """(input, dimension, symbol) of all sizes that vary from call to call; dimensions of one symbol are equal in each."""
    return tuple(getattr(gm, "meta", {}).get("magneto", {}).get("varying", ()))


class Sized:
    """The instances of one graph. `compile` makes the callable of a graph whose sizes are known, from example inputs. `slow`: that costs more than a call in eager."""

    def __init__(self, gm: fx.GraphModule, compile: Callable[[fx.GraphModule, Sequence[Any]], Compiled], slow: bool) -> None:
        self.gm = gm
        self.name = str(gm.meta["magneto"].get("name", "graph"))
        self.eager = atomic(gm)
        self.known: dict[Key, Instance] = {}
        self.seen: Counter[Key] = Counter()
        self.budget: Any = gm.meta["magneto"].get("budget") or Budget()
        self._compile, self._slow, self._told = compile, slow, False
        self._grad = torch.is_grad_enabled()
        self._propagation: Propagation | None = None
        self._lock = threading.RLock()
        first = {symbol: (index, dim) for index, dim, symbol in reversed(varying_sizes(gm))}
        read = "".join(f"i[{index}].shape[{dim}], " for _, (index, dim) in sorted(first.items()))
        text = f"""def key(i):
    return ({read})
def run(*i):
    found = get(({read}))
    if found is None:
        return miss(i)
    found.used = True
    return found.run(*i)
"""
        made = compile_source(f"sizes of {self.name}", text, {"get": self.known.get, "miss": self.miss})
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
            if found is None and (run := self._made(key, inputs)) is not None:
                self._make_room()
                found = self.known[key] = Instance(run)
            return found

    def _made(self, key: Key, inputs: Sequence[Any]) -> Compiled | None:
        self.seen[key] += 1
        if not self._expected(key):
            counter("sizes_in_eager")
            return None
        try:
            with timer("compile"), no_collection(), varying(True), taken([]):
                values = self._values(inputs)
                assert self._propagation is not None
                gm = specialised(self.gm, self._propagation, values)
        except Exception as error:  # a size at which the program raises, or one that we cannot tell
            reason = error.reason if isinstance(error, MagnetoError) else f"{type(error).__name__}: {error}"
            self._tell(f"at the sizes {key}: {reason}".split("\n")[0][:300])
            return self.eager
        gm.meta["magneto"]["name"] = "_".join(map(str, (self.name, *key)))
        with timer("compile"), no_collection(), varying(True):
            compiled = self._compile(gm, inputs)
        counter("sizes_compiled")
        return compiled

    def _values(self, inputs: Sequence[Any]) -> list[Any]:
        """What the nodes of the graph are for these inputs. Raises what torch raises."""
        metas = [TensorMeta.of(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        if self._propagation is None:
            self._propagation = Propagation(self.gm, metas, self._grad)
            return self._propagation.values
        return self._propagation.at(metas)

    def _expected(self, key: Key) -> bool:
        """Is a compile for this size likely to pay?"""
        if self._slow and self.known and self.seen[key] < 2:
            if len(self.seen) > PATIENCE:
                del self.seen[next(iter(self.seen))]
            return False
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

    def _make_room(self) -> None:
        """The oldest instance that has not been called since the last one was dropped makes room for one more."""
        if len(self.known) < config.size_variants:
            return
        idle = next((key for key, one in self.known.items() if not one.used), None)
        if idle is None:
            for one in self.known.values():
                one.used = False
        del self.known[idle if idle is not None else next(iter(self.known))]


def sized(gm: fx.GraphModule, inputs: Sequence[Any], compile: Callable[[fx.GraphModule, Sequence[Any]], Compiled], slow: bool) -> Compiled:
    """The callable of `gm`, with an instance for the sizes of the inputs at hand."""
    made = Sized(gm, compile, slow)
    made.instance(inputs)
    return made.run
