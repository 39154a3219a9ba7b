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

from benchmarks import blocks

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


Built = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model and inputs for it. `make()` seeds the generator, so that every process builds the same weights and inputs."""

    name: str
    shape: str
    build: Callable[[], Built]

    def make(self, dtype: torch.dtype = torch.float32) -> Built:
        torch.manual_seed(0)
        model, args, kwargs = self.build()
        return model.to(dtype).eval(), to_dtype(args, dtype), to_dtype(kwargs, dtype)


def _vision(name: str, *shape: int, **options: Any) -> Callable[[], Built]:
    return lambda: (getattr(torchvision().models, name)(**options), (torch.randn(shape),), {})


def _vit() -> Built:
    model = torchvision().models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=4, num_heads=12, hidden_dim=768, mlp_dim=3072, num_classes=1000
    )
    torch.nn.init.normal_(model.heads.head.weight, std=0.02)  # the default is zero: nothing to compare
    return model, (torch.randn(8, 3, 224, 224),), {}


def _bert() -> Built:
    config = transformers().BertConfig(num_hidden_layers=4)
    ids = torch.randint(config.vocab_size, (4, 128))
    return transformers().BertModel(config), (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _gpt2() -> Built:
    config = transformers().GPT2Config(n_layer=4, use_cache=False)
    return transformers().GPT2LMHeadModel(config), (), {"input_ids": torch.randint(config.vocab_size, (4, 256))}


def _t5() -> Built:
    config = transformers().T5Config(d_model=256, d_ff=1024, d_kv=64, num_heads=4, num_layers=2, vocab_size=4000, use_cache=False)
    ids = torch.randint(config.vocab_size, (4, 64))
    return transformers().T5ForConditionalGeneration(config), (), {"input_ids": ids, "decoder_input_ids": ids.flip(1)}


def _llama(batch: int, length: int) -> Callable[[], Built]:
    def build() -> Built:
        config = transformers().LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=4000,
            use_cache=False,
        )
        return transformers().LlamaForCausalLM(config), (), {"input_ids": torch.randint(config.vocab_size, (batch, length))}

    return build


def _diffusion() -> Built:
    return blocks.DiffusionUnet(), (torch.randn(2, 4, 32, 32), torch.tensor([3.0, 70.0]), torch.randn(2, 24, 128)), {}


def _recommender() -> Built:
    return blocks.Recommender(), (torch.randn(512, 13), torch.randint(20000, (512, 8, 4))), {}


ROWS = (
    Case("resnet18", "16x3x128x128", _vision("resnet18", 16, 3, 128, 128)),
    Case("resnet50", "8x3x224x224", _vision("resnet50", 8, 3, 224, 224)),
    Case("mobilenet_v3", "small, 8x3x160x160", _vision("mobilenet_v3_small", 8, 3, 160, 160)),
    Case("efficientnet", "b0, 4x3x160x160", _vision("efficientnet_b0", 4, 3, 160, 160)),
    Case("convnext", "tiny, 2x3x160x160", _vision("convnext_tiny", 2, 3, 160, 160)),
    Case("densenet", "121, 4x3x128x128", _vision("densenet121", 4, 3, 128, 128)),
    Case("vgg11", "2x3x160x160", _vision("vgg11_bn", 2, 3, 160, 160)),
    Case("gan", "generator, 16x100", lambda: (blocks.generator(), (torch.randn(16, 100, 1, 1),), {})),
    Case("temporal", "6 layers, 8x16x512", lambda: (blocks.Temporal(), (torch.randn(8, 16, 512),), {})),
    Case("diffusion", "U-Net, 2x4x32x32", _diffusion),
    Case("vit", "B/16, 4 layers, 8x3x224x224", _vit),
    Case("swin", "tiny, 2x3x128x128", _vision("swin_t", 2, 3, 128, 128)),
    Case("mixer", "4 layers, 4x3x224x224", lambda: (blocks.Mixer(), (torch.randn(4, 3, 224, 224),), {})),
    Case("bert", "4 layers, 4x128", _bert),
    Case("gpt2", "4 layers, 4x256", _gpt2),
    Case("t5", "2 + 2 layers, 4x64", _t5),
    Case("llama", "4 layers, 2x128", _llama(2, 128)),
    Case("llama_token", "4 layers, 1x1", _llama(1, 1)),
    Case("lstm", "2 layers, 8x32", lambda: (blocks.Recurrent(torch.nn.LSTM), (torch.randint(2000, (8, 32)),), {})),
    Case("gru", "2 layers, 8x32", lambda: (blocks.Recurrent(torch.nn.GRU), (torch.randint(2000, (8, 32)),), {})),
    Case("cell_loop", "16 steps, 32x128", lambda: (blocks.CellLoop(), (torch.randn(32, 16, 128),), {})),
    Case("dlrm", "8 tables, 512", _recommender),
    Case("deepfm", "26 fields, 512", lambda: (blocks.FactorizationMachine(), (torch.randint(50000, (512, 26)),), {})),
    Case("mlp", "64x784", lambda: (blocks.Mlp(784, 1024, 1024, 10), (torch.randn(64, 784),), {})),
    Case("mlp_one", "1x784", lambda: (blocks.Mlp(784, 1024, 1024, 10), (torch.randn(1, 784),), {})),
)
CASES: dict[str, Case] = {case.name: case for case in ROWS}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(name: str) -> Built:
    """`bert`, or `bert.bfloat16`: the model with weights and inputs of that type."""
    case, _, dtype = name.partition(".")
    return CASES[case].make(DTYPES[dtype or "float32"])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order: tuples, lists, dictionaries and the dictionaries that transformers returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The same arguments with every floating-point tensor in `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_dtype(item, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_dtype(item, dtype) for item in value)
    return value


def to_float64(value: Any) -> Any:
    return to_dtype(value, torch.float64)


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
