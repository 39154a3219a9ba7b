"""The programs of the coverage sweep: a model, its inputs, and a training step written as users write it.

A program's `step(model, inputs)` returns (outputs, loss); it is optimised as a whole, the backward pass is called outside. Models are real
architectures with random weights in tiny sizes; nothing is downloaded. The lists lie beside this file, one per library.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

Inputs = dict[str, Any]
Step = Callable[[torch.nn.Module, Inputs], tuple[Any, torch.Tensor]]
MODES = ("eval", "train", "decode")


@dataclass(frozen=True)
class Program:
    """`build()` gives the model and its inputs; `steps` has the step per mode (eval, train, decode) that the program runs in."""

    name: str
    build: Callable[[], tuple[torch.nn.Module, Inputs]]
    steps: dict[str, Step] = field(default_factory=dict)

    def make(self) -> tuple[torch.nn.Module, Inputs]:
        """The same weights and inputs in every process."""
        seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.build()


def seed(value: int) -> None:
    """Set all generators that a model may draw from."""
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def generators() -> tuple[Any, ...]:
    """The state of all generators, to compare."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def all_programs() -> dict[str, Program]:
    """By name, in order."""
    from benchmarks.zoo_timm import timm_programs
    from benchmarks.zoo_torchvision import torchvision_programs
    from benchmarks.zoo_transformers import transformers_programs

    programs = [*timm_programs(), *torchvision_programs(), *transformers_programs()]
    return {program.name: program for program in programs}
