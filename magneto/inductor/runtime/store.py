"""The content-addressed store on disk: compiled kernels and whatever else may be kept between processes.

An entry is (kind, key) -> bytes, one file that ends in a trailer (magic and SHA-256 of what precedes it), so that a torn or damaged file is
recognised. ELF loaders ignore bytes after the sections they know: a shared library is loaded straight from its entry.

- Writing is atomic (a temporary file, then rename): readers see a whole entry or none, and concurrent writers of one key write equal bytes.
- A damaged entry is removed with one warning and made again. A directory that cannot be written costs one warning; the process goes on in a
  temporary directory.
- The size is bounded by the flag `cache_size_mb`: the entries used longest ago leave first. One process at a time sweeps (file lock).
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from magneto.base.errors import warn_once
from magneto.base.events import counter
from magneto.base.flags import config

MAGIC = b"\0magneto-entry-1\0"
TRAILER = len(MAGIC) + 32
SWEEP_EVERY = 64  # writes of one process between two sweeps; the first write sweeps too
LOCK, SWEPT = ".sweep.lock", ".swept"  # files of the store that are no entries
SWEPT_ENOUGH = 600  # seconds for which a sweep, whoever made it, serves: it looks at every file
TOUCH_AFTER = 3600.0  # seconds; an entry read is marked as used at most so often


def key_of(*parts: str | bytes) -> str:
    """The key of some content: 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def sealed(payload: bytes) -> bytes:
    """The file of a payload."""
    return payload + MAGIC + hashlib.sha256(payload).digest()


def unsealed(data: bytes) -> bytes | None:
    """The payload of a file, None if it is damaged."""
    payload, trailer = data[:-TRAILER], data[-TRAILER:]
    if len(data) < TRAILER or trailer[: len(MAGIC)] != MAGIC or trailer[len(MAGIC) :] != hashlib.sha256(payload).digest():
        return None
    return payload


class Store:
    """Entries below `root`. Thread-safe; any number of processes may use one root."""

    def __init__(self, root: Path | str, limit_bytes: int = 1 << 30) -> None:
        self.root = Path(root)
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._fallback: Path | None = None
        self._writes = 0

    def path(self, kind: str, key: str) -> Path:
        """Where the entry is, or would be, now."""
        return (self._fallback or self.root) / kind / key[:2] / key

    def get(self, kind: str, key: str) -> bytes | None:
        """The payload, or None where there is no (sound) entry."""
        for root in (self._fallback, self.root):
            if root is not None and (payload := self._read(root / kind / key[:2] / key)) is not None:
                return payload
        counter(f"store_miss_{kind}")
        return None

    def find(self, kind: str, key: str) -> Path | None:
        """The path of a sound entry (to be loaded as a library), or None."""
        for root in (self._fallback, self.root):
            if root is not None and self._read(path := root / kind / key[:2] / key) is not None:
                return path
        return None

    def _read(self, path: Path) -> bytes | None:
        try:
            with open(path, "rb") as file:
                data = file.read()
                used = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        payload = unsealed(data)
        if payload is None:
            warn_once("W201", path=str(path), error="its checksum does not fit")
            self._remove(path)
            return None
        if time.time() - used > TOUCH_AFTER:
            try:
                os.utime(path)
            except OSError:
                pass  # read-only stores serve too
        return payload

    def put(self, kind: str, key: str, payload: bytes) -> Path:
        """Keep a payload; returns its path. Never fails for want of room or rights: falls back to a temporary directory."""
        data = sealed(payload)
        path = self.path(kind, key)
        try:
            self._write(path, data)
        except OSError as error:
            if self._fallback is not None:
                raise
            self._use_fallback(error)
            path = self.path(kind, key)
            self._write(path, data)
        with self._lock:
            due = self._writes % SWEEP_EVERY == 0
            self._writes += 1
        if due and self._fallback is None and not self._swept():
            self.sweep()
        return path

    def _swept(self) -> bool:
        """Has any process swept a short while ago?"""
        try:
            return 0 <= time.time() - os.stat(self.root / SWEPT).st_mtime < SWEPT_ENOUGH
        except OSError:
            return False

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".write-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            self._remove(Path(temporary))
            raise

    def _use_fallback(self, error: OSError) -> None:
        with self._lock:
            if self._fallback is None:
                warn_once("W202", path=str(self.root), error=error)
                self._fallback = Path(tempfile.mkdtemp(prefix="magneto-"))
                atexit.register(shutil.rmtree, self._fallback, ignore_errors=True)

    @staticmethod
    def _remove(path: Path) -> None:
        try:
            path.unlink()
        except OSError:
            pass

    def entries(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of every file, temporary ones included."""
        return [(used, size, Path(path)) for used, size, path in self._files()]

    def _files(self) -> list[tuple[float, int, str]]:
        found = []
        for directory, _, names in os.walk(self.root):
            for name in names:
                if name in (SWEPT, LOCK):
                    continue
                path = os.path.join(directory, name)
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                found.append((status.st_mtime, status.st_size, path))
        return found

    def sweep(self) -> int:
        """Bring the store below its limit, oldest entries first, and clear away abandoned temporary files. Returns bytes freed;
        0 at once while another process sweeps."""
        if not self._stale(files := self._files()) and sum(size for _, size, _ in files) <= self.limit_bytes:
            try:
                (self.root / SWEPT).touch()
            except OSError:
                pass
            return 0
        from filelock import FileLock, Timeout  # 12 ms

        try:
            with FileLock(str(self.root / LOCK), timeout=0):
                (self.root / SWEPT).touch()
                return self._sweep_locked()
        except (Timeout, OSError):
            return 0

    @staticmethod
    def _stale(files: list[tuple[float, int, str]]) -> set[str]:
        """Temporary files that nobody writes any more."""
        return {path for used, _, path in files if os.path.basename(path).startswith(".write-") and time.time() - used > 3600}

    def _sweep_locked(self) -> int:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        target = int(self.limit_bytes * 0.9) if total > self.limit_bytes else total
        freed, stale = 0, self._stale(files)
        for _, size, path in files:
            temporary = os.path.basename(path).startswith(".write-")
            if path in stale or (total - freed > target and not temporary):
                self._remove(Path(path))
                freed += size
        return freed

    def clear(self) -> None:
        """Remove every entry."""
        for _, _, path in self.entries():
            self._remove(path)


_stores: dict[tuple[str, bool], Store] = {}
_stores_lock = threading.Lock()


def default_directory() -> str:
    """The flag `cache_dir`, else the user's cache directory."""
    if config.cache_dir:
        return str(config.cache_dir)
    import platformdirs

    return platformdirs.user_cache_dir("magneto")


def store() -> Store:
    """The store of this process; with the flag `cache` off, one in a temporary directory."""
    keep = bool(config.cache)
    directory = default_directory() if keep else ""
    with _stores_lock:
        found = _stores.get((directory, keep))
        if found is None:
            if not keep:
                directory_now = tempfile.mkdtemp(prefix="magneto-")
                atexit.register(shutil.rmtree, directory_now, ignore_errors=True)
            else:
                directory_now = directory
            found = _stores[directory, keep] = Store(directory_now, config.cache_size_mb << 20)
        return found
