"""A short check on a machine with a GPU: programs on CUDA tensors give eager's results under every backend (kernels for CUDA are not generated yet,
so such graphs run in eager, by name). Prints one JSON object."""

from __future__ import annotations

import json
import sys

import torch

import magneto


def programs() -> list[tuple[str, object, tuple[torch.Tensor, ...]]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.randn(64, 32, device=device), torch.randn(64, 32, device=device)
    linear = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(device)

    def branch(a, b):
        c = a / (a.abs() + 1)
        if b.sum() < 0:
            b = b * -1
        return c * b

    return [
        ("pointwise", lambda a, b: a.sin() + b.cos(), (x, y)),
        ("branch", branch, (x, y)),
        ("linear", linear, (x,)),
        ("mixed", lambda a: a.cpu() + 1, (x,)),
    ]


def main() -> int:
    verdicts = {}
    for backend in ("eager", "aot_eager", "inductor"):
        for name, fn, args in programs():
            fast = magneto.optimize(backend)(fn)
            for _ in range(2):
                same = torch.allclose(fast(*args), fn(*args), rtol=1e-4, atol=1e-5)  # type: ignore[operator]
                verdicts[f"{backend} {name}"] = bool(same)
    stats = magneto.stats()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "python": sys.version.split()[0],
                "device": device,
                "verdicts": verdicts,
                "fallbacks": stats["fallbacks"],
                "breaks": stats["breaks"],
            }
        )
    )
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
