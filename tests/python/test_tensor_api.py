"""The whole tensor API, one small generated call each, traced against plain: values, dtypes, strides, aliasing, mutation, versions, exceptions.

What breaks, and what no generic call can reach, stands in the tables below with its reason: a name that newly breaks fails here.
"""

from __future__ import annotations

import collections
import os
import re

import pytest
import torch

from tests.python.tensor_api import Api, calls_of, compare, every_api

NO_CALL = {
    r".*(quantize|q_per_channel|q_scale|q_zero|qparams|qscheme|int_repr|fake_quant).*": "quantised tensors",
    r".*(sparse|crow|ccol|row_indices|col_indices|coalesce|smm|hspmm|sspaddmm|saddmm).*|Tensor\.(in)?dices|Tensor\.indices|Tensor\.values|torch\.(indices|values)_copy": "sparse tensors",
    r"torch\.(cudnn|miopen|mkldnn|fbgemm)_.*|torch\.batch_norm_(backward|elemt|gather|stats|update).*": "kernels of one device",
    r"Tensor\.(cuda|ipu|xpu|mtia|pin_memory|record_stream)": "devices that are not here",
    r"Tensor\.(eig|solve|symeig|lstsq|reinforce|volatile)": "removed from torch",
    r"Tensor\.(map_|map2_|as_subclass|register_\w+|backward|retain_grad)|torch\.(fork|wait)": "takes a function, a class, or needs a graph of autograd: see test_tensor_objects",
    r"torch\.(import_ir|parse_|merge_type|unify_type|sym_|set_|init_num|autocast_)\w*|.*autocast.*": "not about tensors",
    r".*(bool__|float__|index__|int__|item|is_nonzero)": "one number: see test_values",
    r"torch\.(gru|lstm|rnn_)\w*|nn\.functional\.multi_head_attention_forward": "recurrent cells: see test_nn_modules",
    r".*(ctc_loss|bilinear|unpool\dd|embedding_bag|grid_sampler_3d|conv_tbc|istft|lu_solve|lu_unpack|ormqr|triangular|native_(group_)?norm|poisson.*|from_numpy|frombuffer|"
    r"binary_cross_entropy|convolution|index_add_|index_copy_|index_reduce_|scatter_add_|scatter_reduce_|put_|float_power_|geometric_|imag|view_as_\w+|to_padded_tensor|"
    r"saved|one_hot|resize_as_sparse_)": "no row of arguments fits; covered by test_tensors and test_functional",
}
"""Names (regular expressions) that no row of arguments reaches, and why."""

NO_NUMBERS = r".*(empty|data_ptr|fbgemm|autocast_\w+_nesting|set_num_|init_num_|set_flush|share_memory).*|torch\.quantize_per_tensor|torch\.seed|torch\.initial_seed"
"""Results without meaning (memory not written, addresses, counters), and what would change the process."""

BREAKS = {
    r"depends on data": "the shape or a number of the result is in the data",
    r"value of a tensor needed": "a number, an address, a storage: or the tensor becomes another one",
    r"layout torch\.sparse": "sparse results",
    r"attribute '(grad_dtype|name|output_nr|retains_grad|volatile|storage_offset)'": "bookkeeping of autograd; where in its storage an input begins is not guarded",
    r"it changes torch's state|reads or sets the state of the random stream": "not an operation",
    r"mutation of class LOBPCG": "sets an attribute of a class of torch",
    r"_has_torch_function|layout torch\.\w+|_mkldnn|mkldnn": "questions and layouts of torch's own",
}
"""Reasons (regular expressions) for which a call may break, and what they mean."""

APIS = [api for api in every_api() if not re.fullmatch(NO_NUMBERS, api.name)]
CHUNKS = 24


def failures(apis: list[Api], kinds: tuple[str, ...], count: int) -> tuple[list[str], collections.Counter[str], list[str]]:
    """(what differs or breaks for no good reason, what happened, names that no row of arguments fits)."""
    wrong: list[str] = []
    seen: collections.Counter[str] = collections.Counter()
    unreached = []
    for api in apis:
        reached = False
        for kind in kinds:
            for row in calls_of(api, kind, count):
                reached = True
                outcome = compare(api, row, kind)
                if not outcome.same:
                    wrong.append(f"{api.name}{row} of {kind}: {outcome.ours} against {outcome.plain}")
                unnamed = [reason for reason in outcome.breaks if not any(re.search(known, reason) for known in BREAKS)]
                if unnamed:
                    wrong.append(f"{api.name}{row} of {kind} breaks: {unnamed}")
                seen["break" if outcome.breaks else "captured"] += 1
        if not reached:
            unreached.append(api.name)
    return wrong, seen, unreached


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_name(chunk: int) -> None:
    wrong, seen, unreached = failures(APIS[chunk::CHUNKS], ("float",), 1)
    assert not wrong, "\n".join(wrong)
    assert seen["captured"] > 5 * seen["break"]
    if torch.__version__.startswith("2.13"):
        assert not [name for name in unreached if not any(re.fullmatch(known, name) for known in NO_CALL)]


def test_the_table_reaches_most_names() -> None:
    assert len(APIS) > 1200
    named = [api for api in APIS if not any(re.fullmatch(known, api.name) for known in NO_CALL)]
    assert len(named) > 0.8 * len(APIS)


@pytest.mark.slow
@pytest.mark.skipif("MAGNETO_WHOLE_API" not in os.environ, reason="several minutes; MAGNETO_WHOLE_API=1 runs it")
@pytest.mark.parametrize("kind", ["grad", "float64", "bfloat16", "complex64", "int64", "uint8", "bool"])
def test_every_name_of_every_kind(kind: str) -> None:
    wrong, _, _ = failures(APIS, (kind,), 2)
    assert not wrong, "\n".join(wrong)
