"""Rows of what a boolean mask selects (masked.py), reduced to numbers: `x[mask].mean()`, `F.mse_loss(x[mask], y[mask])`, `F.cross_entropy(logits[mask], labels[mask])`.

The whole is reduced, with numbers that change nothing where nothing is selected. Errors of empty selections are eager's: the region checks behind its graph that it met none.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from magneto.base.dataclass import dataclass
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.item import ItemTracker, number_of
from magneto.dynamo.trackers.masked import METHODS, MaskedTracker, check, operand, over, over_elements, select
from magneto.dynamo.trackers.rules_subscript import is_slice
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import lower

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_HALF = (torch.float16, torch.bfloat16)


# -- how many there are


def _count(m: Machine, of: MaskedTracker) -> TensorTracker:
    return m.node("sum", [of.mask], {}, method=True)  # type: ignore[return-value]


def _elements(m: Machine, of: MaskedTracker, dims: list[int]) -> Tracker:
    """How many selected elements are reduced to one."""
    number = 1
    for dim in dims:
        if dim:
            number *= of.whole.meta.sizes()[dim - 1 + of.mask.meta.ndim] or of.needed(m)
    count = _count(m, of)
    return count if number == 1 else m.node(operator.mul, [count, number], {})


def _number(m: Machine, of: MaskedTracker, operation: str) -> ItemTracker:
    return number_of(m, _count(m, of), operation, int) or of.needed(m)


def _size(m: Machine, of: MaskedTracker, dim: Tracker | None = None) -> Tracker:
    check(m, of, False)
    sizes = of.whole.meta.sizes()[of.mask.meta.ndim :]
    if None in sizes:
        of.needed(m)
    found = TupleTracker([_number(m, of, "Tensor.size"), *map(m.const, sizes)], torch.Size)
    return found if dim is None else m.apply(operator.getitem, found, dim)


def _numel(m: Machine, of: MaskedTracker) -> Tracker:
    check(m, of, False)
    number: Tracker = _number(m, of, "Tensor.numel")
    for size in of.whole.meta.sizes()[of.mask.meta.ndim :]:
        number = m.apply(operator.mul, number, m.const(size) if size is not None else of.needed(m))
    return number


_fn: Any
for _fn in (torch.Tensor.numel, torch.Tensor.nelement, torch.numel):
    prefer(_fn, MaskedTracker)(_numel)
prefer(torch.Tensor.size, MaskedTracker)(_size)
prefer(len, MaskedTracker)(lambda m, of: _size(m, of, m.const(0)))
for _fn in (torch.Tensor.dim, torch.Tensor.ndimension):
    prefer(_fn, MaskedTracker)(lambda m, of: m.const(of.rest + 1))
METHODS.update((torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension))


# -- reductions


def _constant(m: Machine, of: MaskedTracker, v: Tracker | None) -> Any:
    const = v.try_const() if v is not None else None
    return const.value if const is not None else None if v is None else of.needed(m)


def _options(
    m: Machine, of: MaskedTracker, names: tuple[str, ...], args: tuple[Tracker, ...], kwargs: dict[str, Tracker]
) -> dict[str, Any]:
    """Constants by name, those not given left out."""
    if len(args) > len(names):
        of.needed(m)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    aliases = {"axis": "dim", "keepdims": "keepdim"}
    found = {aliases.get(name, name): _constant(m, of, _listed(m, v)) for name, v in given.items()}
    if len(found) < len(given) or len(given) < len(args) + len(kwargs):
        of.needed(m)
    return {name: value for name, value in found.items() if value is not None}


def _listed(m: Machine, v: Tracker) -> Tracker:
    return m.const(tuple(lower(m, v))) if isinstance(v, SequenceTracker) else v


def _dims(m: Machine, of: MaskedTracker, dim: Any) -> list[int]:
    """The dimensions as eager counts them, of which the first is that of the selection."""
    rank = of.rest + 1
    asked = list(dim) if isinstance(dim, tuple) else [dim]
    if not asked or not all(type(one) is int and -rank <= one < rank for one in asked) or len({one % rank for one in asked}) < len(asked):
        of.needed(m)
    return [one % rank for one in asked]


def _in_whole(of: MaskedTracker, dims: list[int]) -> list[int]:
    n = of.mask.meta.ndim
    return [place for dim in dims for place in (range(n) if not dim else (dim - 1 + n,))]


@dataclass(slots=True)
class Asked:
    """What a reduction is asked for: `dims` as eager counts them, `places` in the whole; `dim`: as it was given."""

    dims: list[int]
    places: list[int]
    dim: Any
    keepdim: bool
    options: dict[str, Any]
    every: bool = False

    def to(self) -> list[Any]:
        """Arguments of the reduction of the whole."""
        where = self.places if len(self.places) > 1 else self.places[0]
        return [] if self.every else [where, True] if self.keepdim else [where]


Reduce = Callable[["Machine", MaskedTracker, Asked], Any]


def _reduction(name: str, names: tuple[str, ...], reduce: Reduce, *, several: bool = True, needs_dim: bool = False) -> None:
    """Rows of a reduction. `several`: it takes more than one dimension; `needs_dim`: and one at least."""

    def body(m: Machine, of: MaskedTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        check(m, of, name not in ("sum", "mean"))
        options = _options(m, of, names, args, kwargs)
        dim, keepdim = options.pop("dim", None), bool(options.pop("keepdim", False))
        if (dim is None and (needs_dim or keepdim)) or (isinstance(dim, tuple) and not several):
            of.needed(m)
        dims = [*range(of.rest + 1)] if dim is None else _dims(m, of, dim)
        asked = Asked(dims, _in_whole(of, dims), dim, keepdim, options, len(dims) == of.rest + 1 and not (keepdim or needs_dim))
        if 0 not in dims:
            named = {"dim": asked.places if isinstance(dim, tuple) else asked.places[0], **({"keepdim": True} if keepdim else {})}
            return _each(m, of, m.node(getattr(torch, name), [of.whole], {**named, **options}))
        laid_out_otherwise = len(dims) < of.rest and not of.whole.meta.is_contiguous()
        if (of.mask.meta.ndim > 1 and (keepdim or not several and not asked.every)) or laid_out_otherwise or 0 in of.whole.meta.sizes():
            of.needed(m)
        return reduce(m, of, asked)

    for form in (getattr(torch, name), getattr(torch.Tensor, name)):
        prefer(form, MaskedTracker)(body)
        METHODS.add(form)


def _each(m: Machine, of: MaskedTracker, found: Tracker) -> Tracker:
    """The result for each selected element."""
    if isinstance(found, SequenceTracker):
        found.entries[:] = [_each(m, of, item) for item in found.items(m)]
        return found
    each = MaskedTracker(m, found, of.mask, of) if isinstance(found, TensorTracker) else of.needed(m)
    each.saved = each.whole.meta.requires_grad
    return each


def _filled(fn: str, fill: Any) -> Reduce:
    return lambda m, of, asked: m.node(fn, [over_elements(m, of, fill), *asked.to()], asked.options, method=True)


def _total(m: Machine, of: MaskedTracker, asked: Asked) -> Tracker:
    """The sum, in float32 for types of half its size."""
    wide = {"dtype": torch.float32} if of.whole.meta.dtype in _HALF and "dtype" not in asked.options else {}
    return m.node("sum", [over_elements(m, of, False), *asked.to()], {**asked.options, **wide}, method=True)


def _to(m: Machine, v: Tracker, dtype: torch.dtype) -> Tracker:
    return m.apply(torch.Tensor.to, v, m.const(dtype))


def _mean(m: Machine, of: MaskedTracker, asked: Asked) -> Tracker:
    dtype = asked.options.get("dtype", of.whole.meta.dtype)
    if not (dtype.is_floating_point or dtype.is_complex) or (dtype in _HALF and asked.options):
        of.needed(m)
    return _to(m, m.node(operator.truediv, [_total(m, of, asked), _elements(m, of, asked.dims)], {}), dtype)


def _spread(root: bool) -> Reduce:
    def reduce(m: Machine, of: MaskedTracker, asked: Asked) -> Tracker:
        """The variance, or its root, whose gradient is 0 where it is 0. Of too few elements it is NaN, without eager's warning."""
        dtype, options = of.whole.meta.dtype, asked.options
        less = options.pop("correction", int(options.pop("unbiased", True)))
        if not dtype.is_floating_point or type(less) is not int or options:
            of.needed(m)
        count = _elements(m, of, asked.dims)
        mean = m.node(operator.truediv, [_total(m, of, Asked(asked.dims, asked.places, None, True, {})), count], {})
        apart = m.node(operator.sub, [over_elements(m, of, False), mean], {})
        apart = m.node(torch.where, [over(m, of.mask, of.whole), apart, False], {})
        squares = m.node("sum", [m.node("square", [apart], {}, method=True), *asked.to()], {}, method=True)
        degrees = m.node("clamp", [m.node(operator.sub, [count, less], {}), 0], {}, method=True)
        found = m.node(operator.truediv, [squares, degrees], {})
        if root:
            none = m.node(operator.eq, [found, 0], {})
            found = m.node(torch.where, [none, found, m.node("sqrt", [m.node(torch.where, [none, 1.0, found], {})], {}, method=True)], {})
        return _to(m, found, dtype)

    return reduce


def _extreme(fn: str, largest: bool) -> Reduce:
    def reduce(m: Machine, of: MaskedTracker, asked: Asked) -> Tracker:
        """Of a number that no selected element is: where the result is that one, the program is run by eager."""
        dtype = of.whole.meta.dtype
        if dtype is torch.bool or dtype.is_complex or (fn in ("max", "min") and asked.dim is not None):
            of.needed(m)
        least, most = (-torch.inf, torch.inf) if dtype.is_floating_point else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fill = least if largest else most
        found = m.node(fn, [over_elements(m, of, fill), *asked.to()], {}, method=True)
        other = m.node("all", [m.node(operator.ne, [found, fill], {})], {}, method=True)
        met = number_of(m, other, f"Tensor.{fn}", bool)  # type: ignore[arg-type]
        return found if met is not None and m.assume(met) else of.needed(m)

    return reduce


def _norm(m: Machine, of: MaskedTracker, asked: Asked) -> Tracker:
    power = asked.options.pop("p", 2)
    if power not in (1, 2, "fro") or asked.options:
        of.needed(m)
    return m.node("norm", [over_elements(m, of, False), 1 if power == 1 else 2, *asked.to()], {}, method=True)


_reduction("sum", ("dim", "keepdim"), _filled("sum", False))
_reduction("nansum", ("dim", "keepdim"), _filled("nansum", False))
_reduction("prod", ("dim", "keepdim"), _filled("prod", True), several=False)
_reduction("any", ("dim", "keepdim"), _filled("any", False))
_reduction("all", ("dim", "keepdim"), _filled("all", True))
_reduction("count_nonzero", ("dim",), _filled("count_nonzero", False))
_reduction("logsumexp", ("dim", "keepdim"), _filled("logsumexp", -torch.inf), needs_dim=True)
_reduction("mean", ("dim", "keepdim"), _mean)
_reduction("std", ("dim", "unbiased", "keepdim"), _spread(True))
_reduction("var", ("dim", "unbiased", "keepdim"), _spread(False))
_reduction("norm", ("p", "dim", "keepdim"), _norm)
for _name, _largest in (("max", True), ("min", False), ("amax", True), ("amin", False)):
    _reduction(_name, ("dim", "keepdim"), _extreme(_name, _largest), several=_name.startswith("a"))


# -- each element by itself


def _by_elements(fn: Any, place: int, default: int | None = None, wholes: int = 1) -> None:
    """Rows of a function over one dimension of an element, the argument number `place`; the first `wholes` arguments may be tensors."""

    def body(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
        of = next(arg for arg in args if isinstance(arg, MaskedTracker))
        check(m, of)
        given = args[place] if len(args) > place else kwargs.pop("dim", m.const(default))
        dims = _dims(m, of, _constant(m, of, given))
        if not dims[0]:
            of.needed(m)
        operands = [operand(m, of, arg) if i < wholes else arg for i, arg in enumerate(args[:place])]
        named = {name: m.const(_constant(m, of, v)) for name, v in kwargs.items()}
        dim = m.const(_in_whole(of, dims)[0])
        if len(args) <= place:
            return _each(m, of, m.apply(fn, *operands, dim=dim, **named))
        return _each(m, of, m.apply(fn, *operands, dim, *args[place + 1 :], **named))

    for kinds in [(Tracker,) * i + (MaskedTracker,) for i in range(wholes)]:
        prefer(fn, *kinds)(body)
    METHODS.add(fn)


for _name in "softmax log_softmax cumsum argmax argmin".split():
    for _place in (torch, torch.Tensor, F):
        if hasattr(_place, _name):
            _by_elements(getattr(_place, _name), 1)
_by_elements(F.normalize, 2, 1)
_by_elements(F.cosine_similarity, 2, 1, wholes=2)


@prefer(operator.getitem, MaskedTracker, Tracker)
def part_of_each(m: Machine, of: MaskedTracker, key: Tracker) -> Any:
    """`x[mask][:, 0]`, a view in eager."""
    check(m, of)
    parts = list(key.items(m)) if isinstance(key, TupleTracker) and key.cls is tuple else [key]
    first = _constant(m, of, parts[0]) if isinstance(parts[0], ConstTracker) or is_slice(parts[0]) else of.needed(m)
    taken = [_constant(m, of, part) for part in parts[1:]]
    known = all(one is None or type(one) in (int, slice) for one in taken)
    if not taken or not known or len([one for one in taken if one is not None]) > of.rest or first not in (Ellipsis, slice(None)):
        of.needed(m)
    leading = [first] if first is Ellipsis else [first] * of.mask.meta.ndim
    return _view(m, of, m.node(operator.getitem, [of.whole, (*leading, *taken)], {}))


def _view(m: Machine, of: MaskedTracker, found: Tracker) -> Tracker:
    view = _each(m, of, found)
    assert isinstance(view, MaskedTracker)
    view.aliased = of.aliased = True
    return view


def _viewed(name: str, more: int) -> None:
    def body(m: Machine, of: MaskedTracker, dim: Tracker) -> Any:
        check(m, of)
        given, rank = _constant(m, of, dim), of.rest + 1 + more
        if type(given) is not int or not -rank <= given < rank or not given % rank:
            of.needed(m)
        return _view(m, of, m.node(name, [of.whole, given % rank - 1 + of.mask.meta.ndim], {}, method=True))

    for fn in (getattr(torch, name), getattr(torch.Tensor, name)):
        prefer(fn, MaskedTracker, Tracker)(body)
        METHODS.add(fn)


_viewed("unsqueeze", 1)
_viewed("squeeze", 0)


def _detach(m: Machine, of: MaskedTracker) -> Any:
    check(m, of)
    return _view(m, of, m.node("detach", [of.whole], {}, method=True))


def _gather(m: Machine, of: MaskedTracker, dim: Tracker, index: Tracker) -> Any:
    check(m, of)
    dims = _dims(m, of, _constant(m, of, dim))
    if not isinstance(index, MaskedTracker) or not dims[0]:
        of.needed(m)
    operand(m, of, index)
    return _each(m, of, m.node("gather", [of.whole, _in_whole(of, dims)[0], over_elements(m, index, False)], {}, method=True))


def _masked_select(m: Machine, v: TensorTracker, mask: Tracker) -> Any:
    """As indexing does, for a mask of the tensor's own shape."""
    if not isinstance(mask, TensorTracker) or mask.meta.ndim != v.meta.ndim:
        return NotImplemented
    sizes = mask.meta.sizes()
    if sizes and sizes == v.meta.sizes() and None not in sizes and m.known(mask) is not None:
        return m.apply(operator.getitem, v, mask)
    return NotImplemented if (found := select(m, v, mask)) is None else found


for _name, _row in (("detach", _detach), ("gather", _gather)):
    for _fn in (getattr(torch, _name), getattr(torch.Tensor, _name)):
        prefer(_fn, MaskedTracker)(_row)
        METHODS.add(_fn)
for _place in (torch, torch.Tensor):
    prefer(_place.masked_select, TensorTracker, TensorTracker)(_masked_select)


# -- losses


def _loss(fn: Any, fill: Any = None) -> None:
    """Rows of a loss of elements; `fill`: what its arguments have to be where nothing is selected."""
    signature = inspect.signature(fn)

    def body(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
        of = next(arg for arg in args if isinstance(arg, MaskedTracker))
        check(m, of)
        given = signature.bind(*args, **kwargs).arguments
        reduction = _constant(m, of, given.pop("reduction", m.const("mean")))
        named = {name: v for name, v in given.items() if name not in ("input", "target") and _absent(v) is False}
        old = named.keys() & {"size_average", "reduce", *(("weight",) if fn not in _WEIGHED else ())}
        if old or reduction not in ("none", "mean", "sum", "batchmean") or (fn is F.kl_div and reduction == "mean"):
            of.needed(m)
        both = [_of_loss(m, of, given[name], fill) for name in ("input", "target")]
        named = {name: operand(m, of, v) for name, v in named.items()}
        each = _each(m, of, m.apply(fn, *both, **named, reduction=m.const("none")))
        if reduction == "batchmean":
            return m.node(operator.truediv, [m.apply(torch.sum, each), _count(m, of)], {})
        return each if reduction == "none" else m.apply(getattr(torch, reduction), each)

    prefer(fn, MaskedTracker)(body)
    prefer(fn, Tracker, MaskedTracker)(body)


def _absent(v: Tracker) -> bool:
    const = v.try_const()
    return const is not None and const.value is None


def _of_loss(m: Machine, of: MaskedTracker, v: Tracker, fill: Any) -> Tracker:
    """`saved` is not known of what does not learn itself."""
    if not isinstance(v, MaskedTracker) or operand(m, of, v).meta.sizes() != of.whole.meta.sizes():  # type: ignore[attr-defined]
        of.needed(m)
    return v.whole if fill is None else over_elements(m, v, fill)


MANY = 256
"""Classes of a vocabulary, whose masks select few rows (a seventh of a sentence): computed for all rows, a tenth of 512 classes took 1.9 times eager's time."""


def _classes(fn: Any) -> None:
    """Losses of classes: a label where nothing is selected is one to be ignored."""
    signature = inspect.signature(fn)

    def body(m: Machine, of: MaskedTracker, labels: MaskedTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        check(m, of)
        given = signature.bind(of, labels, *args, **kwargs).arguments
        ignored = _constant(m, of, given.get("ignore_index", m.const(-100)))
        none = _constant(m, of, given.get("reduction", m.const("mean"))) == "none"
        n, alike = of.mask.meta.ndim, labels.rest == of.rest - 1 and of.selects_alike(m, labels)
        classes = of.whole.meta.sizes()[n] if of.rest else 0
        if isinstance(classes, int) and classes > MANY:
            of.needed(m)
        if not alike or labels.whole.meta.dtype is not torch.int64 or (none and None in labels.whole.meta.sizes()):
            of.needed(m)
        flat = [of.whole, over_elements(m, labels, ignored)]
        if n > 1:
            flat = [m.node("flatten", [one, 0, n - 1], {}, method=True) for one in flat]  # type: ignore[misc]
        found = m.apply(fn, *flat, *args, **kwargs)
        return _each(m, of, m.node("reshape", [found, labels.whole.meta.sizes()], {}, method=True)) if none else found

    prefer(fn, MaskedTracker, MaskedTracker)(body)


_WEIGHED = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
for _name in "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss kl_div binary_cross_entropy_with_logits".split():
    _loss(getattr(F, _name))
_loss(F.binary_cross_entropy, True)
_classes(F.cross_entropy)
_classes(F.nll_loss)
