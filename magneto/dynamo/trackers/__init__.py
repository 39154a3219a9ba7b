"""Trackers and the dispatch table: what the machine needs of them. Importing the rules fills the table."""

from __future__ import annotations

from magneto.dynamo.trackers import (
    bytearray,
    draw,
    host,
    late_text,
    lazy_number,
    lifted,
    made_class,
    read_only,
    reference,
    rules_attention,
    rules_builtin,
    rules_cache,
    rules_class,
    rules_container,
    rules_copy,
    rules_cudnn,
    rules_deque,
    rules_exception,
    rules_function_hook,
    rules_generator,
    rules_gradient,
    rules_hook,
    rules_identity,
    rules_iterate,
    rules_methods,
    rules_namespace,
    rules_number,
    rules_numpy,
    rules_operator,
    rules_optimizer,
    rules_output,
    rules_pure,
    rules_set,
    rules_size,
    rules_subscript,
    rules_tensor,
    rules_tensor_index,
    rules_tensor_state,
    rules_tensor_values,
    rules_text,
    rules_torch,
    rules_twins,
)
from magneto.dynamo.trackers.array import ArrayMemory
from magneto.dynamo.trackers.base import MISSING, Awaited, CannotEmit, Const, Raised, Tracker
from magneto.dynamo.trackers.build import from_value, wrap
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.construct import call_value
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, NamedTupleTracker, SequenceTracker, SliceTracker, TupleTracker
from magneto.dynamo.trackers.context import GradModeTracker, context_methods
from magneto.dynamo.trackers.device_mode import placed
from magneto.dynamo.trackers.dispatch import apply
from magneto.dynamo.trackers.draw import HostCall, put_back
from magneto.dynamo.trackers.exception import ExceptionTracker, OutsideException
from magneto.dynamo.trackers.existing_iterator import PUT
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker, CellTracker, FunctionTracker, PartialTracker
from magneto.dynamo.trackers.host import HostNumber
from magneto.dynamo.trackers.item import ItemTracker, number_of, texts_wanted
from magneto.dynamo.trackers.iterator import ExistingGenerator, GeneratorState, GeneratorTracker, each, iterate, next_or_none
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.lifted import NumberInput
from magneto.dynamo.trackers.made_class import MadeClassTracker, forget_prototypes
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker
from magneto.dynamo.trackers.marked import MarkedTracker
from magneto.dynamo.trackers.membership import ObjectSet
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import ObjectTracker, OpaqueTracker, forget_object, has_finaliser
from magneto.dynamo.trackers.pymodule import PyModuleTracker
from magneto.dynamo.trackers.reference import can_be_watched
from magneto.dynamo.trackers.rules_exception import catches, match_group
from magneto.dynamo.trackers.rules_hook import Hooked as Hooked
from magneto.dynamo.trackers.rules_operator import try_truth as truth
from magneto.dynamo.trackers.rules_size import EXACT
from magneto.dynamo.trackers.size import SizeTracker
from magneto.dynamo.trackers.tensor import MadeInput, TensorTracker, join_memory, join_views, written
from magneto.dynamo.trackers.torch_calls import Plain, element, graph_argument, lower

call = call_value
RULES = (
    bytearray,
    draw,
    host,
    lazy_number,
    late_text,
    lifted,
    made_class,
    read_only,
    reference,
    rules_attention,
    rules_builtin,
    rules_cache,
    rules_class,
    rules_container,
    rules_copy,
    rules_cudnn,
    rules_deque,
    rules_exception,
    rules_generator,
    rules_gradient,
    rules_hook,
    rules_iterate,
    rules_methods,
    rules_namespace,
    rules_number,
    rules_numpy,
    rules_identity,
    rules_operator,
    rules_optimizer,
    rules_output,
    rules_pure,
    rules_set,
    rules_size,
    rules_subscript,
    rules_tensor,
    rules_tensor_index,
    rules_tensor_state,
    rules_tensor_values,
    rules_text,
    rules_torch,
    rules_twins,
)

__all__ = [
    "Awaited",
    "EXACT",
    "MISSING",
    "PUT",
    "RULES",
    "ArrayMemory",
    "BoundMethodTracker",
    "BuiltinTracker",
    "CannotEmit",
    "CellTracker",
    "ClassTracker",
    "Const",
    "ConstTracker",
    "DequeTracker",
    "DictTracker",
    "DictViewTracker",
    "ExceptionTracker",
    "ExistingGenerator",
    "FunctionTracker",
    "GeneratorState",
    "GeneratorTracker",
    "GradModeTracker",
    "HostCall",
    "HostNumber",
    "ItemTracker",
    "ListTracker",
    "MadeClassTracker",
    "MadeInput",
    "MarkedTracker",
    "ModuleTracker",
    "NamedTupleTracker",
    "ObjectSet",
    "NumberInput",
    "ObjectTracker",
    "OpaqueTracker",
    "OutsideException",
    "PartialTracker",
    "Plain",
    "PyModuleTracker",
    "Raised",
    "SequenceTracker",
    "SetTracker",
    "SizeTracker",
    "SliceTracker",
    "TensorTracker",
    "Tracker",
    "TupleTracker",
    "apply",
    "call",
    "can_be_watched",
    "call_value",
    "context_methods",
    "placed",
    "each",
    "element",
    "forget_object",
    "forget_prototypes",
    "from_value",
    "graph_argument",
    "has_finaliser",
    "iterate",
    "join_memory",
    "join_views",
    "lower",
    "catches",
    "match_group",
    "put_back",
    "next_or_none",
    "number_of",
    "texts_wanted",
    "truth",
    "wrap",
    "written",
]
