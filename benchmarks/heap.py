"""The bytes of the C heap, counted by benchmarks/heap.c, which is preloaded into the measured process: the same number in each run, whatever the allocator keeps."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path


def counter_library(folder: Path) -> str:
    """Builds the counter; the value for LD_PRELOAD."""
    library = folder / "heap.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("heap.c"))], check=True)
    return str(library)


class Heap:
    """The counter of this process, if one is preloaded (`present`)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self.present = hasattr(self._library, "heap_live")
        if self.present:
            self._library.heap_live.restype = self._library.heap_peak.restype = ctypes.c_longlong

    def live(self) -> int:
        """Bytes in use, in blocks of 4 KiB and more."""
        return int(self._library.heap_live())

    def peak(self) -> int:
        """The most since the last mark."""
        return int(self._library.heap_peak())

    def mark(self) -> None:
        self._library.heap_mark()
