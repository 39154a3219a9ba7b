"""Metadata of tensors and how operations change it; fake tensors; printing and checking of FX graphs."""

from __future__ import annotations

from magneto.graph.fake import FakeMode, FakeResult, FakeTensor, fake_call, fake_probes
from magneto.graph.fallback import DataDependent, UnsupportedFake
from magneto.graph.meta import TensorMeta, map_metas
from magneto.graph.remember import Remembered
from magneto.graph.rules import META_RULES, propagate
from magneto.graph.show import show
from magneto.graph.unknown import EXAMPLE, Sizes, SizeUnknown, UnknownMeta, UnknownNumber, arithmetic
from magneto.graph.verify import GraphFault, verify

__all__ = [
    "EXAMPLE",
    "META_RULES",
    "DataDependent",
    "FakeMode",
    "FakeResult",
    "FakeTensor",
    "GraphFault",
    "Remembered",
    "SizeUnknown",
    "Sizes",
    "TensorMeta",
    "UnknownMeta",
    "UnknownNumber",
    "UnsupportedFake",
    "arithmetic",
    "fake_call",
    "fake_probes",
    "map_metas",
    "propagate",
    "show",
    "verify",
]
