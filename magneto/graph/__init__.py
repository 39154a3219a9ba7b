"""Metadata of tensors and how operations change it; fake tensors; printing and checking of FX graphs."""

from __future__ import annotations

from magneto.graph.fake import FakeResult, fake_call, fake_probes
from magneto.graph.fake_tensor import FakeMode, FakeTensor
from magneto.graph.fallback import DataDependent, UnsupportedFake
from magneto.graph.meta import TensorMeta, map_metas
from magneto.graph.remember import Remembered
from magneto.graph.show import show
from magneto.graph.unknown import EXAMPLE, Sizes, SizeUnknown, UnknownMeta, UnknownNumber, arithmetic
from magneto.graph.verify import GraphFault, verify
