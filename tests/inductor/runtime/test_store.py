"""The store on disk: whole entries or none, damage survived, size bounded, many processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from magneto.inductor.runtime.store import TRAILER, Store, key_of, sealed, unsealed


def test_round_trip_and_miss(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = key_of("a", b"b")
    assert store.get("unit", key) is None
    path = store.put("unit", key, b"payload")
    assert store.get("unit", key) == b"payload" and store.find("unit", key) == path
    assert store.get("other", key) is None and Store(tmp_path).get("unit", key) == b"payload"


def test_keys_tell_parts_apart() -> None:
    assert key_of("ab", "c") != key_of("a", "bc") and key_of("x") == key_of(b"x") and len(key_of("x")) == 32


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: b"X" + d[1:], lambda d: b"", lambda d: d[: TRAILER // 2], lambda d: d + b"x"]
)
def test_damaged_entries_are_ignored_with_one_warning(tmp_path: Path, damage) -> None:
    store = Store(tmp_path)
    path = store.put("unit", key_of("k"), b"payload" * 100)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="damaged"):
        assert store.get("unit", key_of("k")) is None
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get("unit", key_of("k")) is None
    store.put("unit", key_of("k"), b"new")
    assert store.get("unit", key_of("k")) == b"new"


def test_sealing() -> None:
    assert unsealed(sealed(b"")) == b"" and unsealed(sealed(b"abc")) == b"abc" and unsealed(b"abc") is None


def test_unusable_directory_costs_one_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    store = Store(blocked)
    with pytest.warns(UserWarning, match="cannot be used"):
        first = store.put("unit", key_of("1"), b"one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put("unit", key_of("2"), b"two")
    assert first.exists() and store.get("unit", key_of("1")) == b"one" and store.get("unit", key_of("2")) == b"two"


def test_full_disk_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = Store(tmp_path), os.replace

    def full(a: str, b: str | Path) -> None:
        if str(b).startswith(str(tmp_path)):
            raise OSError(28, "No space left on device")
        real(a, b)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        store.put("unit", key_of("1"), b"one")
    assert store.get("unit", key_of("1")) == b"one"
    assert not list(tmp_path.rglob(".write-*"))


def test_sweep_removes_the_oldest(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=10_000)
    now = time.time()
    for i in range(20):
        path = store.put("unit", key_of(str(i)), bytes(1000))
        os.utime(path, (now - 1000 + i, now - 1000 + i))
    assert store.sweep() > 0
    left = [i for i in range(20) if store.get("unit", key_of(str(i))) is not None]
    assert left == list(range(min(left), 20)) and 5 < len(left) < 10
    assert sum(size for _, size, _ in store.entries()) <= 10_000


def test_abandoned_temporary_files_are_cleared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("unit", key_of("1"), b"one")
    old, young = tmp_path / "unit" / ".write-old", tmp_path / "unit" / ".write-young"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 9999,) * 2)
    store.sweep()
    assert not old.exists() and young.exists()


def test_one_sweep_serves_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[Path] = []
    real = Store._files
    monkeypatch.setattr(Store, "_files", lambda self: [sweeps.append(self.root), real(self)][1])
    monkeypatch.delitem(sys.modules, "filelock", raising=False)
    for i in range(3):  # as many processes
        Store(tmp_path).put("unit", key_of(str(i)), b"one")
    assert len(sweeps) == 1
    os.utime(tmp_path / ".swept", (time.time() - 9999,) * 2)
    Store(tmp_path).put("unit", key_of("4"), b"one")
    assert len(sweeps) == 2
    assert "filelock" not in sys.modules  # nothing was to be removed
    assert len(Store(tmp_path).entries()) == 4


WRITER = """
import sys
from magneto.inductor.runtime.store import Store, key_of
store = Store(sys.argv[1], limit_bytes=200_000)
for i in range(60):
    key = key_of(str(i % 20))
    store.put("unit", key, str(i % 20).encode() * 2000)
    found = store.get("unit", key)
    assert found is None or found == str(i % 20).encode() * 2000
    if i % 10 == 0:
        store.sweep()
"""


def test_concurrent_processes(tmp_path: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, str(tmp_path)], cwd=Path(__file__).parents[3]) for _ in range(3)
    ]
    assert [p.wait(timeout=60) for p in running] == [0, 0, 0]
