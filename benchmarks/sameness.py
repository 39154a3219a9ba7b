"""Where two results differ: structure, types, tensors bit by bit. Used by the coverage sweep; returns text, raises nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

ROUNDING = 1e-5  # largest relative difference that is reported as rounding, not as a wrong result


def differences(ours: Any, plain: Any, where: str, rounding: float = ROUNDING) -> list[str]:
    """One line per place that differs, at most eight. Values further apart than `rounding` are called values."""
    found: list[str] = []
    for line in _differences(ours, plain, where, set(), rounding):
        found.append(line)
        if len(found) == 8:
            break
    return found


def _differences(ours: Any, plain: Any, where: str, seen: set[int], rounding: float) -> Iterator[str]:
    if type(ours) is not type(plain):
        yield f"{where}: {type(ours).__name__} against {type(plain).__name__}"
    elif isinstance(plain, torch.Tensor):
        yield from _tensor(ours, plain, where, rounding)
    elif isinstance(plain, Mapping):
        if list(ours) != list(plain):
            yield f"{where}: keys {list(ours)} against {list(plain)}"
            return
        for key in plain:
            yield from _differences(ours[key], plain[key], f"{where}[{key!r}]", seen, rounding)
    elif isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            yield f"{where}: {len(ours)} items against {len(plain)}"
            return
        for i, (our, wanted) in enumerate(zip(ours, plain, strict=True)):
            yield from _differences(our, wanted, f"{where}[{i}]", seen, rounding)
    elif isinstance(plain, (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)):
        if ours != plain and not (ours != ours and plain != plain):
            yield f"{where}: {ours!r} against {plain!r}"
    elif hasattr(plain, "__dict__") and id(plain) not in seen and not isinstance(plain, (type, torch.nn.Module)) and not callable(plain):
        seen.add(id(plain))
        yield from _differences(vars(ours), vars(plain), where, seen, rounding)


def _tensor(ours: torch.Tensor, plain: torch.Tensor, where: str, rounding: float) -> Iterator[str]:
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
        our, wanted = getattr(ours, name), getattr(plain, name)
        if our != wanted:
            yield f"{where}.{name}: {our} against {wanted}"
            if name in ("shape", "dtype", "layout"):
                return
    if plain.layout is torch.strided and ours.stride() != plain.stride() and plain.numel() > 1:
        yield f"{where}.stride(): {ours.stride()} against {plain.stride()}"
    with torch.no_grad():
        if plain.layout is not torch.strided:
            ours, plain = ours.to_dense(), plain.to_dense()
        if not torch.equal(torch.nan_to_num(ours), torch.nan_to_num(plain)) or not torch.equal(ours.isnan(), plain.isnan()):
            error = relative_error(ours, plain)
            yield f"{where}: {'rounding' if error < rounding else 'values'} differ by {error:.2g}"


def relative_error(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Largest difference relative to the largest finite magnitude."""
    if plain.is_complex():
        ours, plain = torch.view_as_real(ours), torch.view_as_real(plain)
    ours, plain = ours.double(), plain.double()
    gap = (ours - plain).abs()
    gap[(ours == plain) | (ours.isnan() & plain.isnan())] = 0.0
    finite = plain[plain.isfinite()].abs()
    scale = max(float(finite.max()), 1e-12) if finite.numel() else 1.0
    return float(torch.nan_to_num(gap, nan=torch.inf).max()) / scale
