"""Which rows of a reduction read the same: what is read along what is reduced may vary along some of the rows only."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from magneto.base.dataclass import dataclass
from magneto.symbolic import Sym

SHARING = 16  # rows that one program folds side by side where all of them read the same


@dataclass(frozen=True, slots=True)
class Rows:
    """`common`: the symbols of rows along which everything varies that is read. `apart`: those of the others, in sets of which nothing that is read varies along two."""

    common: frozenset[Sym]
    apart: tuple[frozenset[Sym], ...]


def kinds_of_rows(reads: Iterable[Collection[Sym]], rows: Iterable[Sym], cols: Collection[Sym]) -> Rows | None:
    """`reads`: what each load varies along. None: nothing is read along the columns, or what is varies along all rows, or no two sets lie apart."""
    symbols = frozenset(rows)
    along = {symbols.intersection(read) for read in map(frozenset, reads) if not read.isdisjoint(cols)}
    if not along:
        return None
    common = symbols.intersection(*(read for read in along if read)) if any(along) else frozenset()  # what all rows share says nothing
    apart: list[frozenset[Sym]] = []
    for read in [one - common for one in along]:
        if read:
            meeting = [one for one in apart if not one.isdisjoint(read)]
            apart = [one for one in apart if one not in meeting] + [read.union(*meeting)]
    unread = symbols - common - frozenset().union(*apart)
    apart += [unread] if unread else []
    return Rows(common, tuple(sorted(apart, key=lambda one: sorted(s.key for s in one)))) if len(apart) > 1 or unread else None
