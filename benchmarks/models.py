"""The models that are measured: real architectures with random weights, in eval mode, built without downloading anything."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# torchvision's compiled operators are missing when its build does not match torch's (a CUDA wheel beside a CPU torch). Its Python
# part needs only the schemas of these two; no classification model calls them.
_VISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []


def torchvision() -> Any:
    """`import torchvision`, with the schemas its import asks for defined where its compiled part could not be loaded."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _VISION_SCHEMAS:
        library.define(schema)
    _libraries.append(library)
    # The failed import leaves half of the package behind.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def transformers() -> Any:
    """`import transformers`, which imports torchvision where that is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        torchvision()
    return importlib.import_module("transformers")


@dataclass(frozen=True)
class Case:
    """A model and inputs for it. `make()` seeds the generator, so that every process builds the same weights and inputs."""

    name: str
    shape: str
    build: Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]

    def make(self) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(0)
        model, args, kwargs = self.build()
        return model.eval(), args, kwargs


def _resnet18() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    return torchvision().models.resnet18(), (torch.randn(16, 3, 128, 128),), {}


def _resnet50() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    return torchvision().models.resnet50(), (torch.randn(8, 3, 224, 224),), {}


def _vit() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = torchvision().models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=4, num_heads=12, hidden_dim=768, mlp_dim=3072, num_classes=1000
    )
    torch.nn.init.normal_(model.heads.head.weight, std=0.02)  # the default is zero: nothing to compare
    return model, (torch.randn(8, 3, 224, 224),), {}


def _bert() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = transformers().BertConfig(num_hidden_layers=4)
    ids = torch.randint(config.vocab_size, (4, 128))
    return transformers().BertModel(config), (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _gpt2() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = transformers().GPT2Config(n_layer=4, use_cache=False)
    return transformers().GPT2LMHeadModel(config), (), {"input_ids": torch.randint(config.vocab_size, (4, 256))}


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("resnet18", "16x3x128x128", _resnet18),
        Case("resnet50", "8x3x224x224", _resnet50),
        Case("bert", "4 layers, 4x128", _bert),
        Case("gpt2", "4 layers, 4x256", _gpt2),
        Case("vit", "B/16, 4 layers, 8x3x224x224", _vit),
    )
}


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order: tuples, lists, dictionaries and the dictionaries that transformers returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def to_float64(value: Any) -> Any:
    """The same arguments with every floating-point tensor in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_float64(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_float64(item) for item in value)
    return value


def largest_error(value: Any, reference: Any) -> float:
    """Largest difference to the reference, per tensor relative to its largest finite magnitude.

    Infinite where only one of the two is NaN or infinite, where integers differ, or where the structures do.
    """
    ours, wanted = tensors_of(value), tensors_of(reference)
    if [t.shape for t in ours] != [t.shape for t in wanted]:
        return math.inf
    return max((_error(got, want) for got, want in zip(ours, wanted, strict=True)), default=0.0)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.numel() == 0:
        return 0.0
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else math.inf
    got, want = got.double(), want.double()
    difference = (got - want).abs()
    difference[(got == want) | (got.isnan() & want.isnan())] = 0.0
    finite = want[want.isfinite()].abs()
    scale = max(finite.max().item(), 1e-30) if finite.numel() else 1.0
    return torch.nan_to_num(difference, nan=math.inf, posinf=math.inf).max().item() / scale
