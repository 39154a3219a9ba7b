"""Plans as data: `PlanCode`, the arguments of `magneto._C.Plan`; the functions of ours that its instructions name; and what plans on a CUDA device launch, kernels for Triton. `codegen/` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from magneto.base.dataclass import dataclass, replace
from magneto.base.events import counter


@dataclass(frozen=True, slots=True)
class PlanCode:
    """Arguments of `Plan`. Plain data: callables are torch functions; kernels are called by what `plan_code` was given for them, names or addresses."""

    instructions: tuple[tuple[Any, ...], ...]
    n_registers: int
    n_inputs: int
    outputs: tuple[int, ...]
    arena_bytes: int
    kept_bytes: int = 0  # what is computed of weights only, kept between calls
    tail: int = 0  # where the instructions begin that only make results, if there are such

    def with_addresses(self, addresses: Mapping[str, int | tuple[int, tuple[int, ...]]]) -> PlanCode:
        """With addresses in place of kernels' names. A kernel whose function takes numbers is called as a table's is."""
        return replace(self, instructions=tuple([_addressed(i, addresses) for i in self.instructions]))


def _addressed(instruction: tuple[Any, ...], addresses: Mapping[str, int | tuple[int, tuple[int, ...]]]) -> tuple[Any, ...]:
    if instruction[0] not in ("KERNEL", "TABLE"):
        return instruction
    op, name, *rest = instruction
    found = addresses[name]
    if isinstance(found, int):
        return op, found, *rest
    registers, release = rest
    return "TABLE", found[0], registers, found[1], release


def carve(
    arena: torch.Tensor, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """A tensor in the arena."""
    flat = arena[offset : offset + nbytes].view(dtype)
    return torch.as_strided(flat, shape, strides)


def view_at(base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """A strided view whose offset counts from the tensor's first element, not from its storage's."""
    return torch.as_strided(base, shape, strides, base.storage_offset() + offset)


def laid_out(tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The result of a library call in the layout that the graph was compiled for. Kernels read memory by that layout, so a call that lays its
    result out otherwise (a rule of ours is wrong, or the library chose by processor) costs a copy, never a wrong number."""
    if tuple(tensor.shape) != sizes:
        raise RuntimeError(f"a library call returned shape {tuple(tensor.shape)}, the graph was compiled for {sizes}")
    if all(n == 1 or s == t for n, s, t in zip(sizes, tensor.stride(), strides, strict=True)) or 0 in sizes:
        return tensor
    counter("results_laid_out_anew")
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Other strides in dimensions of size 1, which say nothing of memory, for a result of a library call that leaves."""
    tensor.as_strided_(tensor.shape, strides)


def show_plan(code: PlanCode, names: Mapping[int, str] | None = None) -> str:
    """The instructions as text, one per line."""
    lines = [f"# {code.n_inputs} inputs, {code.n_registers} registers, arena of {code.arena_bytes} bytes, outputs {list(code.outputs)}"]
    for n, (op, *rest) in enumerate(code.instructions):
        if n and n == code.tail:
            lines.append("# from here on only results are made: behind a replay, if the rest is recorded")
        shown = [getattr(x, "__name__", None) or (f"tensor{tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)) for x in rest]
        lines.append(f"{op:7s}{' '.join(shown)}")
    return "\n".join(lines)


# ---- kernels for Triton ----------------------------------------------------------------------------------------------------

Described: TypeAlias = tuple[int, int, tuple[int, int], int, tuple[int, int]]
"""A matrix that the copy engine reads in blocks: number of the pointer, element where it begins, shape, elements from row to row (those of a row lie one behind the other), shape of blocks."""


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """`body`: the function, called `kernel`. `pointers`: types of its parameters. The rest says how it is launched. `described`: parameters behind the pointers."""

    body: str
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    grid: tuple[int, ...]
    warps: int
    asserts: bool
    stages: int = 0  # loads under way in the loop of a product; 0: Triton's own choice
    described: tuple[Described, ...] = ()


@dataclass(frozen=True, slots=True)
class TritonTable:
    """`full`: per column, is a tensor of the row's size there (or a single number)? `block`: elements of a block; 0: rows are single numbers. `offsets`: where it is not empty, the bytes at which
    each memory begins, row by row, and the kernel's grid is that of one row; `full` then says which columns it takes for aligned."""

    kernel: TritonKernel
    full: tuple[bool, ...]
    sizes: tuple[int, ...]
    block: int
    offsets: tuple[int, ...] = ()


def work_of(sizes: Sequence[int], block: int) -> torch.Tensor:
    """(row, first element, elements of the row) per block."""
    elements = torch.tensor(sizes)
    blocks = (elements + (block - 1)) // block if block else torch.ones_like(elements)
    row = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    start = (torch.arange(len(row)) - (blocks.cumsum(0) - blocks)[row]) * block
    return torch.stack([row, start, elements[row]], 1)


Launched: TypeAlias = TritonKernel | TritonTable
