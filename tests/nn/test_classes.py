"""Every public class of torch.nn as a program: forward and backward, in training and in evaluation, one graph, eager's values, gradients and buffers."""

# ruff: noqa

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal

SEQ, IMG, VOL = (
    torch.linspace(-1, 1, 96).reshape(2, 4, 12),
    torch.linspace(-1, 1, 512).reshape(2, 4, 8, 8),
    torch.linspace(-1, 1, 1024).reshape(2, 4, 4, 4, 8),
)
V, W = torch.linspace(-1, 1, 48).reshape(3, 16), torch.linspace(1, -2, 48).reshape(3, 16)
X = torch.linspace(-2, 2, 256).reshape(2, 8, 16)
IDS, CLASSES, SIGNS = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([1, 0, 3]), torch.tensor([1.0, -1.0, 1.0])
P = torch.linspace(0.1, 0.9, 48).reshape(3, 16)  # probabilities
MULTI = torch.tensor([[3, 0, -1, 1]])


def unpool(dims, x):
    pooled, indices = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)(x)
    return pooled, indices


def ctc():
    torch.manual_seed(0)
    return torch.randn(10, 2, 5).log_softmax(2), torch.tensor([[1, 2, 3], [2, 2, 4]]), torch.tensor([10, 8]), torch.tensor([3, 2])


class InContainer(nn.Module):
    """Calls what a container holds."""

    def __init__(self, container):
        super().__init__()
        self.held = container

    def forward(self, x):
        values = self.held.values() if hasattr(self.held, "values") else self.held
        for value in values:
            x = x * value if isinstance(value, torch.Tensor) else value(x)
        return x, len(self.held)


class Everything(nn.Module):
    def forward(self, x):
        return x + len(list(self.modules()))


def table():
    """name -> (maker, arguments)"""
    t = {}

    def add(name, *args, maker=None, options=(), **kwargs):
        cls = getattr(nn, name)
        t[name] = (maker or (lambda: cls(*options, **kwargs)), args)

    for n, x in ((1, SEQ), (2, IMG), (3, VOL)):
        for kind in ("Adaptive", ""):
            add(f"{kind}AvgPool{n}d", x, options=(2,))
            add(f"{kind}MaxPool{n}d", x, options=(2,))
        add(f"BatchNorm{n}d", x, options=(4,))
        add(f"InstanceNorm{n}d", x, options=(4,), affine=True, track_running_stats=True)
        for kind in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
            add(f"{kind}{n}d", x, options=(1,))
        add(f"ConstantPad{n}d", x, options=(1, 0.5))
        add(f"Conv{n}d", x, options=(4, 6, 3), padding=1, padding_mode="circular" if n == 1 else "zeros", groups=2)
        add(f"ConvTranspose{n}d", x, options=(4, 2, 3), stride=2, output_padding=1)
        add(f"Dropout{n}d", x)
        add(f"LPPool{n}d", x.abs() + 0.1, options=(2, 2))
        add(f"MaxUnpool{n}d", *unpool(n, x), options=(2,))
        add(f"LazyBatchNorm{n}d", x)
        add(f"LazyInstanceNorm{n}d", x)
        add(f"LazyConv{n}d", x, options=(2, 3))
        add(f"LazyConvTranspose{n}d", x, options=(2, 3))
    for name in (
        "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus "
        "Softshrink Softsign Tanh Tanhshrink Dropout AlphaDropout Flatten"
    ).split():
        add(name, V)
    for name in ("Softmax", "LogSoftmax", "Softmin"):
        add(name, V, options=(-1,))
    add("Softmax2d", IMG)
    add("Threshold", V, options=(0.1, 0.2))
    add("FeatureAlphaDropout", IMG)
    add("Linear", V, options=(16, 4))
    add("LazyLinear", V, options=(4,))
    add("Bilinear", V, W, options=(16, 16, 4))
    add("ChannelShuffle", IMG, options=(2,))
    add("PixelShuffle", IMG, options=(2,))
    add("PixelUnshuffle", IMG, options=(2,))
    add("Unflatten", V, options=(1, (4, 4)))
    add("Fold", torch.linspace(-1, 1, 64).reshape(1, 4, 16), options=((5, 5), (2, 2)))
    add("Unfold", IMG, options=((2, 2),))
    add("FractionalMaxPool2d", IMG, options=(2,), output_ratio=0.5)
    add("FractionalMaxPool3d", VOL, options=(2,), output_ratio=0.5)
    add("CrossMapLRN2d", IMG, options=(2,))
    add("LocalResponseNorm", IMG, options=(2,))
    add("GroupNorm", IMG, options=(2, 4))
    add("LayerNorm", V, options=(16,))
    add("RMSNorm", V, options=(16,))
    add("SyncBatchNorm", IMG, options=(4,))
    add("Upsample", IMG, scale_factor=2, mode="bicubic")
    add("UpsamplingBilinear2d", IMG, scale_factor=2)
    add("UpsamplingNearest2d", IMG, scale_factor=2)
    add("Embedding", IDS, options=(10, 4), padding_idx=0)
    add("EmbeddingBag", IDS, options=(10, 4), mode="max")
    add("CosineSimilarity", V, W)
    add("PairwiseDistance", V, W)
    # losses
    for name in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss"):
        add(name, V, W)
    add("BCELoss", P, 1 - P)
    add("BCEWithLogitsLoss", V, P, pos_weight=torch.linspace(1, 2, 16))
    add("KLDivLoss", V, P, reduction="batchmean")
    add("CrossEntropyLoss", V, CLASSES, label_smoothing=0.1, weight=torch.linspace(1, 2, 16))
    add("NLLLoss", V.log_softmax(1), CLASSES, ignore_index=3)
    add("NLLLoss2d", IMG.log_softmax(1), torch.ones(2, 8, 8, dtype=torch.long))
    add("CosineEmbeddingLoss", V, W, SIGNS)
    add("CTCLoss", *ctc())
    add("GaussianNLLLoss", V, W, P)
    add("HingeEmbeddingLoss", V[:, 0], SIGNS)
    add("MarginRankingLoss", V[:, 0], W[:, 0], SIGNS)
    add("MultiLabelMarginLoss", V[:1, :4], MULTI)
    add("MultiLabelSoftMarginLoss", V, (W > 0).float())
    add("MultiMarginLoss", V, CLASSES)
    add("SoftMarginLoss", V, W.sign().long())
    add("TripletMarginLoss", V, W, V * W)
    add("TripletMarginWithDistanceLoss", V, W, V * W, distance_function=nn.PairwiseDistance())
    add("AdaptiveLogSoftmaxWithLoss", V, CLASSES * 3, options=(16, 10, [3, 6]))
    # recurrent, attention
    for name in ("RNN", "LSTM", "GRU"):
        add(name, X, options=(16, 6, 2), batch_first=True, bidirectional=True)
        add(f"{name}Cell", V, options=(16, 6))
    add("MultiheadAttention", X, X, X, options=(16, 4), batch_first=True)
    add("Transformer", X, X, options=(16, 4, 1, 1, 32), batch_first=True)
    add("TransformerEncoderLayer", X, options=(16, 4, 32), batch_first=True)
    add("TransformerDecoderLayer", X, X, options=(16, 4, 32), batch_first=True)
    add("TransformerEncoder", X, maker=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2))
    add("TransformerDecoder", X, X, maker=lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2))
    # containers
    add("Module", V, maker=Everything)
    add("Sequential", V, maker=lambda: nn.Sequential(nn.Linear(16, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))))
    add("ModuleList", V, maker=lambda: InContainer(nn.ModuleList([nn.Linear(16, 16), nn.Tanh()])))
    add("ModuleDict", V, maker=lambda: InContainer(nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Tanh()})))
    add("ParameterList", V, maker=lambda: InContainer(nn.ParameterList([torch.ones(16), torch.ones(3, 1) * 2])))
    add("ParameterDict", V, maker=lambda: InContainer(nn.ParameterDict({"a": torch.ones(16), "b": torch.ones(3, 1) * 2})))
    add("DataParallel", V, maker=lambda: nn.DataParallel(nn.Linear(16, 4)))
    if hasattr(nn, "LinearCrossEntropyLoss"):
        add("LinearCrossEntropyLoss", V, CLASSES, options=(16, 10))
    return t


TABLE = table()
NO_MODULES = {
    *("Buffer", "Parameter", "UninitializedBuffer", "UninitializedParameter", "RNNBase", "RNNCellBase", "Container"),
    "LinearCrossEntropyOptions",
}
BREAKS = {
    "CTCLoss",  # lengths are read out of tensors
    "AdaptiveLogSoftmaxWithLoss",  # indexes with a mask
    "CrossMapLRN2d",  # a custom autograd function
    "GaussianNLLLoss",  # looks at the signs of the variances
}


def test_every_class_is_in_the_table() -> None:
    public = {name for name in dir(nn) if isinstance(getattr(nn, name), type) and not name.startswith("_")}
    assert public - set(TABLE) - NO_MODULES <= LATER


LATER: set[str] = set()
"""Classes that a torch newer than this table has."""


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return []


def step(module, args):
    """One forward and backward: (result, gradients of inputs, gradients of parameters)."""
    args = [arg.clone().requires_grad_(arg.is_floating_point()) for arg in args]
    torch.manual_seed(1)
    result = module(*args)
    outputs = [leaf for leaf in leaves(result) if leaf.requires_grad]
    if outputs:
        sum((leaf * torch.linspace(1, 2, leaf.numel()).reshape(leaf.shape)).sum() for leaf in outputs).backward()
    return result, [arg.grad for arg in args], {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", TABLE)
def test_class(name: str, training: bool) -> None:
    make, args = TABLE[name]
    torch.manual_seed(0)
    plain = make().train(training)
    if name.startswith("Lazy"):
        torch.manual_seed(0)
        ours = make().train(training)
    else:
        ours = copy.deepcopy(plain)
    compiled = magneto.optimize("eager", nopython=name not in BREAKS and not name.startswith("Lazy"))(ours)
    for _ in range(2):
        if name.startswith("Lazy"):
            torch.manual_seed(0)
        expected = step(plain, args)
        if name.startswith("Lazy"):
            torch.manual_seed(0)
        found = step(compiled, args)
        assert_equal(found, expected)
        with torch.no_grad():
            torch.manual_seed(2)
            expected = plain(*args)
            torch.manual_seed(2)
            assert_equal(compiled(*args), expected)
    assert_equal(dict(ours.named_buffers()), dict(plain.named_buffers()))
    assert type(ours) is type(plain)
