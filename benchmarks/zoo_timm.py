"""timm: one model per family (a module of timm.models), small, in few layers where the family is large, at the smallest image it accepts."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.models import torchvision
from benchmarks.zoo import Inputs, Program

CLASSES = 10
SIZE = 64
# Convolutional: any image will do.
PLAIN = (
    *(
        "mobileone_s0",
        "convmixer_768_32",
        "convnext_zepto_rms",
        "cpubone_nano",
        "crossvit_tiny_240",
        "csatv2",
        "cs3darknet_focus_s",
        "cspnext_tiny",
    ),
    *(
        "davit_tiny",
        "densenet121",
        "dla46x_c",
        "dpn48b",
        "edgenext_xx_small",
        "mobilenetv2_035",
        "efficientvim_m1",
        "efficientvit_b0",
        "fasternet_t0",
    ),
    *(
        "fastvit_t8",
        "focalnet_tiny_srf",
        "ghostnet_050",
        "hardcorenas_b",
        "hgnetv2_b0",
        "hrnet_w18_small",
        "iformer_t",
        "inception_next_atto",
    ),
    *(
        "lcnetv2_small",
        "lowformer_b0",
        "mambaout_femto",
        "poolformerv2_s12",
        "lcnet_035",
        "mobilevit_xxs",
        "mobilevitv2_050",
        "nextvit_small",
    ),
    *(
        "nf_regnet_b0",
        "pvt_v2_b0",
        "rdnet_tiny",
        "regnetx_002",
        "regnety_002",
        "repghostnet_050",
        "repvit_m1",
        "res2next50",
        "resnest14d",
        "resnet10t",
    ),
    *("resnetv2_18", "rexnet_100", "selecsls42", "legacy_seresnet18", "shvit_s1", "skresnet18", "starnet_s050", "tresnet_m"),
    *("ese_vovnet19b_slim_dw", "xception41p", "vgg11_bn"),
)
# Attention over a grid of fixed size: the model is told the image's.
SIZED = (
    *(
        "cait_xxs24_224",
        "coat_tiny",
        "convit_tiny",
        "deit_tiny_patch16_224",
        "efficientformerv2_s0",
        "efficientvit_m0",
        "vit_tiny_patch16_dinov3_qkvb",
    ),
    *("gcvit_xxtiny", "gmlp_ti16_224", "pit_ti_224", "swin_tiny_patch4_window7_224", "twins_svt_small", "vit_tiny_patch16_224"),
    *("vit_tiny_r_s16_p8_224", "vit_srelpos_small_patch16_224", "xcit_nano_12_p8_224", "tnt_s_legacy_patch16_224"),
)
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "botnet26t_256": (256, {}),
    "deepseek_vit_412m": (56, {"depth": 1, "img_size": 56}),
    "efficientformer_l1": (224, {}),
    "gemma4_vit_167m": (96, {"depth": 2}),
    "hiera_tiny_224": (224, {}),
    "inception_resnet_v2": (96, {}),
    "inception_v3": (128, {}),
    "inception_v4": (96, {}),
    "legacy_xception": (96, {}),
    "levit_128s": (224, {}),
    "maxvit_pico_rw_256": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "naflexvit_base_patch16_gap": (64, {"depth": 2}),
    "nest_tiny": (224, {}),
    "qwen3_vit_88m": (64, {"depth": 2}),
    "sam2_hiera_tiny": (256, {}),
    "samvit_base_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "sequencer2d_s": (64, {"img_size": 64}),
    "swiftformer_xs": (224, {}),
    "swinv2_cr_tiny_224": (224, {}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64}),
    "tiny_vit_5m_224": (224, {}),
    "visformer_tiny": (64, {"img_size": 64}),
    "vitamin_small_224": (64, {"img_size": 64}),
    "volo_d1_224": (64, {"img_size": 64}),
}


def timm_programs() -> Iterator[Program]:
    rows: dict[str, tuple[int, dict[str, Any]]] = (
        {name: (SIZE, {}) for name in PLAIN} | {name: (SIZE, {"img_size": SIZE}) for name in SIZED} | OTHERS
    )
    for name, (size, own) in sorted(rows.items()):
        yield Program(f"timm/{name}", functools.partial(build, name, size, own), {"eval": step, "train": step})


def build(name: str, size: int, own: dict[str, Any]) -> tuple[torch.nn.Module, Inputs]:
    torchvision()  # timm imports it
    timm = importlib.import_module("timm")
    rate = {} if any(part in name for part in ("legacy", "inception", "sam2", "tresnet", "selecsls")) else {"drop_rate": 0.1}
    model = timm.create_model(name, num_classes=CLASSES, **rate, **own)
    return model, {"images": torch.randn(2, 3, size, size), "labels": torch.randint(CLASSES, (2,))}


def step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    """Cross entropy with label smoothing; the mean of both heads where the model is distilled, features are pooled where it has no head."""
    outputs = model(inputs["images"])
    if isinstance(outputs, torch.Tensor):
        logits = outputs
    else:
        logits = (outputs[0] + outputs[1]) / 2
    if logits.dim() > 2:
        logits = logits.flatten(2).mean(-1)
    return outputs, F.cross_entropy(logits, inputs["labels"], label_smoothing=0.1)
