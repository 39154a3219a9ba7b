"""torchvision's classification, segmentation, detection, video and optical-flow families.

Its compiled operators may be missing (see `models.torchvision`). The two that detection models call are then given a Python kernel here:
operators like the compiled ones, opaque to a compiler, `nms` with an output whose size depends on data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.models import torchvision
from benchmarks.zoo import Inputs, Program

CLASSES = 10
CLASSIFICATION: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "convnext_tiny": (32, {}),
    "densenet121": (32, {}),
    "efficientnet_b0": (32, {}),
    "efficientnet_v2_s": (32, {}),
    "googlenet": (64, {"init_weights": False}),
    "inception_v3": (128, {"init_weights": False}),
    "maxvit_t": (224, {}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "regnet_x_400mf": (32, {}),
    "regnet_y_400mf": (32, {}),
    "resnet18": (32, {}),
    "resnet50": (32, {}),
    "resnext50_32x4d": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (32, {}),
    "swin_t": (64, {}),
    "swin_v2_t": (64, {}),
    "vgg11": (32, {}),
    "vgg11_bn": (32, {}),
    "vit_b_32": (64, {"image_size": 64}),
    "wide_resnet50_2": (32, {}),
}
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_resnet50_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn_v2",
    "retinanet_resnet50_fpn",
    "retinanet_resnet50_fpn_v2",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
VIDEO: dict[str, tuple[int, int]] = {  # frames, pixels
    "mc3_18": (4, 32),
    "r2plus1d_18": (4, 32),
    "r3d_18": (4, 32),
    "s3d": (16, 64),
    "swin3d_t": (4, 64),
    "mvit_v2_s": (16, 224),
}


def torchvision_programs() -> Iterator[Program]:
    for name, (size, own) in CLASSIFICATION.items():
        yield _program(name, functools.partial(_classifier, name, size, own), classification_step)
    for name in SEGMENTATION:
        yield _program(name, functools.partial(_segmenter, name), segmentation_step)
    for name in DETECTION:
        yield _program(name, functools.partial(_detector, name), detection_step)
    for name, (frames, size) in VIDEO.items():
        yield _program(name, functools.partial(_video, name, frames, size), classification_step)
    yield _program("raft_small", _raft, flow_step)


def _program(name: str, build: Any, step: Any) -> Program:
    return Program(f"torchvision/{name}", build, {"eval": step, "train": step})


def classification_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    """Cross entropy; the auxiliary heads of GoogLeNet and Inception take part with their usual weight."""
    outputs = model(inputs["images"])
    if isinstance(outputs, torch.Tensor):
        return outputs, F.cross_entropy(outputs, inputs["labels"])
    first, *others = [head for head in outputs if head is not None]
    loss = F.cross_entropy(first, inputs["labels"])
    for head in others:
        loss = loss + 0.4 * F.cross_entropy(head, inputs["labels"])
    return outputs, loss


def segmentation_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    outputs = model(inputs["images"])
    losses = {name: F.cross_entropy(output, inputs["labels"], ignore_index=255) for name, output in outputs.items()}
    if len(losses) == 1:
        return outputs, losses["out"]
    return outputs, losses["out"] + 0.5 * losses["aux"]


def detection_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    if model.training:
        losses = model(inputs["images"], inputs["targets"])
        return losses, sum(losses.values())
    found = model(inputs["images"])
    return found, sum(item["scores"].sum() + item["boxes"].mean() * 0.01 for item in found)


def flow_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    """RAFT's sequence loss."""
    flows = model(*inputs["images"], num_flow_updates=3)
    loss = sum(0.8 ** (len(flows) - i - 1) * (flow - inputs["flow"]).abs().mean() for i, flow in enumerate(flows))
    return flows, loss


def _classifier(name: str, size: int, own: dict[str, Any]) -> tuple[torch.nn.Module, Inputs]:
    model = torchvision().models.get_model(name, weights=None, num_classes=CLASSES, **own)
    return model, {"images": torch.randn(2, 3, size, size), "labels": torch.randint(CLASSES, (2,))}


def _segmenter(name: str) -> tuple[torch.nn.Module, Inputs]:
    aux = {} if name.startswith("lraspp") else {"aux_loss": True}
    model = torchvision().models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES, **aux)
    labels = torch.randint(CLASSES, (2, 48, 48))
    labels[:, :4] = 255
    return model, {"images": torch.randn(2, 3, 48, 48), "labels": labels}


def _detector(name: str) -> tuple[torch.nn.Module, Inputs]:
    own: dict[str, Any] = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    if "rcnn" in name:
        own |= {"rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20, "rpn_pre_nms_top_n_test": 50, "rpn_post_nms_top_n_test": 20}
    else:
        own |= {"detections_per_img": 20, "topk_candidates": 20}
    vision = detection_operators()
    classes = 2 if name.startswith("keypoint") else 5
    model = vision.models.get_model(name, weights=None, weights_backbone=None, num_classes=classes, **own)
    targets = []
    for _ in range(2):
        corner = torch.rand(3, 2) * 30
        boxes = torch.cat([corner, corner + 10 + torch.rand(3, 2) * 20], 1)
        target = {"boxes": boxes, "labels": torch.randint(1, classes, (3,))}
        if name.startswith("mask"):
            target["masks"] = (torch.rand(3, 72, 64) > 0.5).to(torch.uint8)
        if name.startswith("keypoint"):
            target["keypoints"] = torch.cat([boxes[:, None, :2] + torch.rand(3, 17, 2) * 10, torch.ones(3, 17, 1)], 2)
        targets.append(target)
    return model, {"images": [torch.rand(3, 72, 64), torch.rand(3, 64, 80)], "targets": targets}


def _video(name: str, frames: int, size: int) -> tuple[torch.nn.Module, Inputs]:
    model = torchvision().models.get_model(name, weights=None, num_classes=CLASSES)
    return model, {"images": torch.randn(1, 3, frames, size, size), "labels": torch.randint(CLASSES, (1,))}


def _raft() -> tuple[torch.nn.Module, Inputs]:
    model = torchvision().models.get_model("raft_small", weights=None)
    images = tuple(torch.rand(1, 3, 128, 128) * 2 - 1 for _ in range(2))
    return model, {"images": images, "flow": torch.randn(1, 2, 128, 128)}


# --- the operators of torchvision's compiled part, where it is missing

_libraries: list[torch.library.Library] = []


@functools.cache
def detection_operators() -> Any:
    """torchvision, with `nms` and `roi_align` callable."""
    vision = torchvision()
    if vision.extension._has_ops():
        return vision
    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio, bool aligned) -> Tensor"
    )
    # Kernels are C++ elsewhere: no compiler may look into these.
    library.impl("nms", torch.compiler.disable(_nms), "CPU")
    library.impl("roi_align", torch.compiler.disable(_roi_align), "CPU")
    torch.library.register_fake("torchvision::roi_align", _roi_align_shape, lib=library)
    torch.library.register_autograd("torchvision::roi_align", torch.compiler.disable(_roi_align_backward), setup_context=_keep, lib=library)
    modules = __import__("sys").modules
    for name in ("boxes", "roi_align"):
        modules[f"torchvision.ops.{name}"]._assert_has_ops = lambda: None  # type: ignore[attr-defined]
    modules["torchvision.ops.roi_align"]._has_ops = lambda: True  # type: ignore[attr-defined]
    return vision


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    order = scores.argsort(descending=True, stable=True).tolist()
    overlaps = torchvision().ops.box_iou(dets, dets).tolist()
    kept: list[int] = []
    for candidate in order:
        if all(overlaps[candidate][other] <= iou_threshold for other in kept):
            kept.append(candidate)
    return torch.tensor(kept, dtype=torch.int64)


def _roi_align(*args: Any) -> torch.Tensor:
    function = __import__("sys").modules["torchvision.ops.roi_align"]._roi_align
    with torch.no_grad():
        return function.__wrapped__(*args)  # not compiled behind our back


def _roi_align_shape(
    image: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> torch.Tensor:
    return image.new_empty((rois.size(0), image.size(1), height, width))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.rest = inputs[2:]


def _roi_align_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    image, rois = ctx.saved_tensors
    function = __import__("sys").modules["torchvision.ops.roi_align"]._roi_align
    with torch.enable_grad():
        leaf = image.detach().requires_grad_()
        (result,) = torch.autograd.grad(function.__wrapped__(leaf, rois, *ctx.rest), leaf, gradient)
    return (result, None, None, None, None, None, None)
