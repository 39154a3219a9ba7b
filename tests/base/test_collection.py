"""What makes lasting objects does not leave them to the collector's next walk."""

from __future__ import annotations

import gc

from magneto.base.collection import no_collection


def test_what_lasts_is_old_at_once() -> None:
    """Unless the program has frozen objects, which stay frozen."""
    assert gc.isenabled()
    gc.unfreeze()  # (torch.compile in a test before this one freezes)
    for frozen in (False, True):
        with no_collection(lasting=True):
            made: list[object] = []
            assert not gc.isenabled()
            if frozen:
                gc.freeze()
                made = [[]]
        assert gc.isenabled() and bool(gc.get_freeze_count()) is frozen
        assert any(one is made for one in gc.get_objects(generation=2)) is not frozen
    gc.unfreeze()
