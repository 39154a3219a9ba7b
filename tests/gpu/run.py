"""Runs every GPU program and writes the verdicts as JSON: `python -m tests.gpu.run [--out benchmarks/results/gpu_tests.json] [names...]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.gpu.convolutions import CONVOLUTIONS
from tests.gpu.draws import DRAWS
from tests.gpu.kernels import KERNELS
from tests.gpu.optimisers import CHECKS as OPTIMISERS
from tests.gpu.programs import PROGRAMS, check
from tests.gpu.recordings import CHECKS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(Path(__file__).parents[2] / "benchmarks/results/gpu_tests.json"))
    parser.add_argument("--traces", default="")
    parser.add_argument("--mode", default=None)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    verdicts: dict[str, Any] = {}
    traces = []
    for name in options.names or [*PROGRAMS, *CHECKS, *OPTIMISERS, *DRAWS, *CONVOLUTIONS, *KERNELS]:
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                counts = (
                    check(name, mode=options.mode)
                    if name in PROGRAMS
                    else (CHECKS | OPTIMISERS | DRAWS | CONVOLUTIONS | KERNELS)[name]() or {}
                )
            said = [str(w.message)[:200] for w in seen if "magneto" in str(w.category)]
            verdicts[name] = {"verdict": "passed", **counts, **({"warnings": said} if said else {})}
        except Exception as error:
            verdicts[name] = {"verdict": "failed", "error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
            traces.append(f"==== {name}\n{traceback.format_exc()}")
            if "device-side assert" in str(error) or "illegal memory access" in str(error):
                break
        verdicts[name]["seconds"] = round(time.perf_counter() - start, 2)
        if name not in KERNELS or verdicts[name]["verdict"] != "passed":
            print(name, *(f"{v}" for v in verdicts[name].values()), flush=True)
        _write(options, verdicts, traces)
    passed = sum(v["verdict"] == "passed" for v in verdicts.values())
    print(f"{passed} of {len(verdicts)} passed")
    return int(passed != len(verdicts))


def _write(options: argparse.Namespace, verdicts: dict[str, Any], traces: list[str]) -> None:
    """After each program, so that what has run is known when time is up."""
    import triton

    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
        "mode": options.mode or "default", "passed": sum(v["verdict"] == "passed" for v in verdicts.values()), "of": len(verdicts), "programs": verdicts,
    }  # fmt: skip
    os.makedirs(os.path.dirname(os.path.abspath(options.out)), exist_ok=True)
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    if options.traces:
        Path(options.traces).write_text("\n".join(traces))


if __name__ == "__main__":
    sys.exit(main())
