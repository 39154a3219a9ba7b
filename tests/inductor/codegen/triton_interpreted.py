"""Kernels run by Triton's interpreter on CPU tensors; the environment has TRITON_INTERPRET=1."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import torch

from magneto.inductor.codegen.triton_types import BYTES
from magneto.inductor.runtime.plan_code import Described, Launched, TritonTable
from magneto.inductor.runtime.triton_compile import function_of
from magneto.inductor.runtime.triton_launch import Launcher, begins, source_of, work_and_grid


def interpreted(wanted: Iterable[Launched]) -> dict[Launched, Launcher]:
    """Launchers, as `launchers` gives for a device."""

    def of(thing: Launched) -> Launcher:
        if isinstance(thing, TritonTable):
            function, (work, grid) = function_of(source_of(thing.kernel)), work_and_grid(thing)

            def launch(*tensors: torch.Tensor) -> None:
                addresses = torch.tensor(begins(array("q", [t.data_ptr() for t in tensors]), thing.offsets))
                function[grid](addresses, work, **dict(thing.kernel.constants))

            return launch
        function = function_of(source_of(thing))

        def run(*tensors: torch.Tensor) -> None:
            matrices = [descriptor(tensors[described[0]], described) for described in thing.described]
            plain = [t.view(torch.uint8) if t.dtype in BYTES else t for t in tensors]
            function[(*thing.grid, 1, 1)[:3]](*plain, *matrices, **dict(thing.constants))

        return run

    def descriptor(tensor: torch.Tensor, described: Described) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        _, offset, shape, stride, block = described
        matrix = torch.as_strided(tensor, shape, (stride, 1), tensor.storage_offset() + offset)
        return TensorDescriptor(matrix, list(shape), [stride, 1], list(block))

    return {k: of(k) for k in wanted}
