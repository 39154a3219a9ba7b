"""What makes many objects that live on runs without the garbage collector, which would walk the program's whole heap in between (0.1 s a time) and free nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection(lasting: bool = False) -> Iterator[None]:
    """For imports of ours and for compiles. Afterwards the collector is as it was. `lasting`: what was made lives on (modules), and is old at once, without a walk (20 ms)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if lasting and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
