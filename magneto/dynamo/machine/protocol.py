"""What trackers and dispatch rules see of the machine, and of the emitter. The machine room implements both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Source
from magneto.dynamo.trackers.base import Tracker

if TYPE_CHECKING:
    from torch import fx

    from magneto.dynamo.trackers.constant import ConstTracker
    from magneto.dynamo.trackers.host import HostNumber
    from magneto.dynamo.trackers.lifted import NumberInput
    from magneto.dynamo.trackers.tensor import TensorTracker
    from magneto.graph import TensorMeta


class Emitter(Protocol):
    """Writes the body of the generated region function. `shows_history`: the program is given what autograd has recorded for a tensor of the graph."""

    shows_history: bool

    def value(self, tracker: Tracker) -> str:
        """Expression (normally a name) of the tracker's final value; memoised by tracker identity."""

    def source(self, source: Source) -> str:
        """Expression that reads a source (arguments of the region function for Local/Stack; held objects by name)."""

    def const(self, obj: Any, hint: str = "c") -> str:
        """A literal when exact (int, str, None, tuple of such ...), otherwise a name bound to the object in the function's namespace."""

    def borrowed(self, obj: Any, hint: str = "c") -> str:
        """`const` of a class or function that the program has made, perhaps in a call: the region does not keep it alive."""

    def output(self, wanted: fx.Node) -> str:
        """Name of what the graph gives for a node."""

    def held(self, obj: Any, hint: str = "c") -> str:
        """A name bound to this very object."""

    def early(self, expr: str, hint: str = "n") -> str:
        """Name of an expression over the region's arguments, computed before the graph is called and anything has happened: it may raise."""

    def line(self, text: str) -> None:
        """Append one statement."""

    def fresh(self, hint: str) -> str:
        """A new local name."""

    def assign(self, hint: str, expr: str, tracker: Tracker | None = None) -> str:
        """`name = expr`; returns the name; with `tracker` memoises it at once (for cycles: create empty, assign, then fill)."""


class Machine(Protocol):
    """The symbolic machine. `steps`: items taken from iterators so far."""

    steps: int

    unknown_sizes: bool
    """Whether the graph may hold tensors whose sizes depend on data."""
    varying: Any
    """Which sizes of inputs vary (`machine.varying.Varying`)."""
    wrapped: dict[int, Tracker]
    """Trackers of existing objects, by id."""
    effects: list[tuple[str, tuple[Tracker, ...]]]
    """Side effects so far."""
    changing: frozenset[Source]
    """Sources of numbers and modules that are known to differ between calls."""
    begun: list[Any]
    """Existing tensors that begin to have a history of autograd."""
    references: dict[Tracker, Tracker]
    """Weak references made here, by their object: an object has one without callback."""

    # -- values
    def wrap(self, obj: Any, source: Source) -> Tracker:
        """Tracker of an existing object, memoised by id(obj); adds the type/identity guards its kind needs."""

    def const(self, value: Any) -> Tracker:
        """Tracker of a constant made inside the region (ConstTracker, or a tuple of such)."""

    def guard(self, kind: Kind, source: Source | None, payload: Any) -> None:
        """Add a guard row (deduplicated, with the current user line)."""

    # -- behaviour: every Python operation goes through these
    def apply(self, fn: Callable[..., Any], *args: Tracker, **kwargs: Tracker) -> Tracker:
        """Meaning of the real callable `fn` (operator.add, getattr, len, iter, next, torch.relu ...) on trackers: the dispatch table."""

    def call(self, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
        """Call a tracked callable: user function (inlined), builtin, class, bound method, module, object with __call__."""

    def inline(self, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
        """Inline a FunctionTracker symbolically (arguments already include a bound self)."""

    def joins(self, policy: Any) -> bool:
        """Whether a callable optimised under `policy` may become part of this region: the same backend and conditions were asked for."""

    def truth(self, value: Tracker) -> bool:
        """Truth value when capture knows it; otherwise a graph break (data-dependent)."""

    def decided(self, value: Tracker) -> bool | None:
        """What a number in a small tensor from outside decides, guarded; None where there is more to it."""

    def iterate(self, value: Tracker) -> list[Tracker]:
        """All items of an iterable that capture can exhaust; otherwise a graph break."""

    # -- the graph
    def node(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, method: bool = False) -> Tracker:
        """Record a torch-level call: `target` a callable, or a method name with method=True. Arguments are trackers or nested lists/tuples/dicts/slices of
        trackers and constants. Propagates TensorMeta through graph.fake; returns the tracker of the result (tensor, tuple of tensors, constant)."""

    def number_input(self, number: ConstTracker | HostNumber) -> NumberInput:
        """The graph input that a changing number becomes; one per number."""

    def size_node(self, tensor: TensorTracker, method: str, args: tuple[Any, ...], read: Callable[[TensorMeta], int]) -> Tracker:
        """The number that a method of a tensor gives, where it depends on data; `read`: what it is for known sizes."""

    def number(self, fn: Callable[..., Any], *args: Tracker) -> Tracker:
        """Arithmetic on numbers of which one depends on data."""

    def settle(self, number: Tracker) -> None:
        """Something wants the number itself: where it follows from sizes of inputs that vary, they are constants, and capture starts again."""

    def known(self, tensor: Any) -> Any:
        """The real tensor, where the region makes it out of constants alone; None: its numbers depend on data."""

    def selects(self) -> bool:
        """Whether `select` may be called here."""

    def select(self, copy: TensorTracker, base: TensorTracker, code: int | None = None, *found: Any) -> None:
        """`copy` stands for a view of `base` at a place known at run time only: neither may be written, nor the copy leave the region."""

    def selected(self, value: Tracker, base: TensorTracker, parts: Sequence[Tracker]) -> bool:
        """Whether `value` stands for `base[parts]`, with the numbers that are there now."""

    def has_written(self, tensor: Any) -> bool:
        """Whether the graph has written the tensor's memory."""

    def speculate(self, name: str, *, grad_mode: bool, transformed: bool = False) -> Any:
        """A context manager (`machine.speculate.Speculation`) in which bodies are captured apart from the region's graph."""

    def restart_at(self, count: int, id: str, **fields: Any) -> NoReturn:
        """A break at an instruction that has been captured already."""

    def assume(self, condition: Any) -> bool:
        """Go on as if a condition on numbers of the run (an `ItemTracker`) held; the region checks it behind the graph. False: it did not hold earlier."""

    def grad_enabled(self) -> bool:
        """Grad mode at this point of the program."""

    def set_grad_enabled(self, flag: bool) -> None:
        """Switch grad mode for what follows."""

    def user_stack(self) -> Any:
        """Where the program is: (file, line, function), innermost last."""

    changes: int
    particulars: int

    def restart_before(self, callee: str, reason: str) -> NoReturn:
        """A break at the current instruction from the state before it, which the rule has changed already."""

    # -- effects and ends
    def effect(self, text: str, *operands: Tracker) -> None:
        """Log a side effect replayed at the region's end, in order. `text` is a statement template with {0} {1} ... for the operands, e.g.
        "{0}.append({1})". Existing objects only: changes to values made inside the region need no log."""

    def graph_break(self, id: str, **fields: Any) -> NoReturn:
        """Capture ends here; the catalogue row `id` (Bnnn) gives the reason and hint."""

    def raise_exception(self, exc: BaseException | Tracker) -> NoReturn:
        """The traced program raises: handled by the frame's own handlers (symbolically) or ends the region at this instruction."""

    def user_line(self) -> str:
        """file:line being executed, for rows and breaks."""
