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
    number_formulas,
    number_lists,
    number_options,
    numpy_numbers,
    read_only,
    reference,
    rules_attention,
    rules_builtin,
    rules_cache,
    rules_checkpoint,
    rules_class,
    rules_container,
    rules_control_flow,
    rules_copy,
    rules_cudnn,
    rules_deque,
    rules_exception,
    rules_flex,
    rules_function,
    rules_function_hook,
    rules_functional_call,
    rules_generator,
    rules_gradient,
    rules_hook,
    rules_identity,
    rules_iterate,
    rules_masked,
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
    rules_transform,
    rules_transformer,
    rules_twins,
)
from magneto.dynamo.trackers.array import ArrayMemory
from magneto.dynamo.trackers.base import Awaited, CannotEmit, Raised, Tracker
from magneto.dynamo.trackers.build import from_value, wrap
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.construct import call_value as call
from magneto.dynamo.trackers.container import ListTracker, NamedTupleTracker, SequenceTracker, SliceTracker, TupleTracker
from magneto.dynamo.trackers.context import context_methods
from magneto.dynamo.trackers.device_mode import placed
from magneto.dynamo.trackers.dispatch import apply
from magneto.dynamo.trackers.draw import HostCall, put_back
from magneto.dynamo.trackers.exception import ExceptionTracker, OutsideException
from magneto.dynamo.trackers.existing_iterator import PUT, ExistingComposite
from magneto.dynamo.trackers.function import STAND_INS, BoundMethodTracker, BuiltinTracker, CellTracker, FunctionTracker
from magneto.dynamo.trackers.host import HostNumber
from magneto.dynamo.trackers.item import ItemTracker, number_of, texts_wanted
from magneto.dynamo.trackers.item_graph import graph_condition
from magneto.dynamo.trackers.iterator import ExistingGenerator, GeneratorState, GeneratorTracker, each, iterate, next_or_none
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.lifted import NumberInput, number_key
from magneto.dynamo.trackers.made_class import MadeClassTracker, forget_prototypes
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker
from magneto.dynamo.trackers.marked import MarkedTracker
from magneto.dynamo.trackers.membership import ObjectSet
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.number_size import SizedNumber
from magneto.dynamo.trackers.object import ObjectTracker, OpaqueTracker, forget_object, has_finaliser
from magneto.dynamo.trackers.pymodule import PyModuleTracker
from magneto.dynamo.trackers.reference import can_be_watched
from magneto.dynamo.trackers.rules_exception import catches, match_group
from magneto.dynamo.trackers.rules_hook import Hooked
from magneto.dynamo.trackers.rules_operator import try_truth as truth
from magneto.dynamo.trackers.rules_size import EXACT
from magneto.dynamo.trackers.rules_tensor_state import refuse_taken as refuse_taken
from magneto.dynamo.trackers.size import SizeTracker
from magneto.dynamo.trackers.tensor import MadeInput, TensorTracker, join_memory, join_views, written
from magneto.dynamo.trackers.torch_calls import lower
