"""transformers: architectures built from tiny configurations, with labels, attention masks, encoder-decoders and KV caches.

A row is a model class and the sizes that are its own; the sizes common to most configurations are in SIZES and apply where a
configuration has the name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.models import tensors_of, transformers
from benchmarks.zoo import Inputs, Program
from benchmarks.zoo_transformers_rows import DEFAULT, NO_CACHE, RANDOM, ROWS

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BATCH, LENGTH, VOCABULARY, CLASSES = 2, 16, 120, 5
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embed_dim", "word_embed_proj_dim", "emb_dim", "hidden_dim"), 32
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner", "d_inner", "ffn_hidden_size"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_dim", "ffn_hidden_dim"), 32),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_source_positions", "max_target_positions", "seq_length"), 64
    ),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    "image_size": 64,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
    "qk_rope_head_dim": 4,
    "type_vocab_size": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "num_labels": CLASSES,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}


def transformers_programs() -> Iterator[Program]:
    for name, own in ROWS.items():
        steps = {"eval": loss_step} if name in RANDOM else {"eval": loss_step, "train": loss_step}
        if name in NO_CACHE:
            pass
        elif "ForCausalLM" in name or "LMHead" in name:
            steps["decode"] = decode_step
        elif "ForConditionalGeneration" in name:
            steps["decode"] = encoder_decoder_step
        yield Program(f"transformers/{name}", functools.partial(build, name, own), steps)


def build(name: str, own: dict[str, Any]) -> tuple[torch.nn.Module, Inputs]:
    model_class = getattr(transformers(), name)
    config = tiny(model_class.config_class, own)
    model = model_class(config)
    return model, inputs_of(model, config)


def tiny(config_class: Any, own: dict[str, Any]) -> Any:
    """A configuration with the common sizes where it has them, and the row's own; a dictionary is for a configuration inside."""
    plain = config_class()
    inside = getattr(plain, "sub_configs", {})
    values = {key: value for key, value in SIZES.items() if _applies(plain, key)}
    for key in inside:
        part = getattr(plain, key, None)
        if part is not None and getattr(part, "model_type", ""):
            values[key] = tiny(type(part), own.get(key, {}))
    values |= {key: value for key, value in own.items() if key not in inside}
    config = config_class(**{key: value for key, value in values.items() if value is not DEFAULT})
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]
    return config


def _applies(plain: Any, key: str) -> bool:
    """Numbers take the place of numbers; a property computes its own."""
    if key in ("pad_token_id", "num_labels"):
        return True
    value = getattr(plain, key, None)
    return type(value) is int and not isinstance(getattr(type(plain), key, None), property)


def inputs_of(model: torch.nn.Module, config: Any) -> Inputs:
    """What the class asks for, by its main input; labels by the kind of head."""
    kind, main = type(model).__name__, model.main_input_name
    if main in ("pixel_values", "input_values", "input_features"):
        return _perception_inputs(kind, main, config)
    vocabulary = getattr(config.get_text_config(), "vocab_size", VOCABULARY)
    ids = torch.randint(4, vocabulary, (BATCH, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    inputs: Inputs = {"input_ids": ids, "attention_mask": mask}
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        return inputs | {"pixel_values": torch.randn(BATCH, 3, vision.image_size, vision.image_size), "return_loss": True}
    if "SequenceClassification" in kind:
        inputs["labels"] = torch.randint(CLASSES, (BATCH,))
    elif "TokenClassification" in kind:
        inputs["labels"] = torch.randint(CLASSES, (BATCH, LENGTH))
    elif "QuestionAnswering" in kind:
        inputs |= {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([4, 5])}
    elif "MultipleChoice" in kind:
        inputs = {key: value[:, None].expand(BATCH, 3, LENGTH).clone() for key, value in inputs.items()} | {"labels": torch.tensor([0, 2])}
    elif kind.endswith(("LM", "LMHeadModel", "LMHead", "ForConditionalGeneration", "MTModel")):
        inputs["labels"] = ids.masked_fill((mask == 0) | (torch.rand(ids.shape) < 0.2), -100)
    elif getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(4, vocabulary, (BATCH, LENGTH - 4))
    return inputs


def _perception_inputs(kind: str, main: str, config: Any) -> Inputs:
    if main == "pixel_values":
        size = getattr(config, "image_size", 64) or 64
        height, width = (size, size) if isinstance(size, int) else size
        inputs: Inputs = {main: torch.randn(BATCH, getattr(config, "num_channels", 3) or 3, height, width)}
        if "ImageClassification" in kind:
            inputs["labels"] = torch.randint(CLASSES, (BATCH,))
        elif "SemanticSegmentation" in kind:
            inputs["labels"] = torch.randint(CLASSES, (BATCH, height, width))
        elif "ObjectDetection" in kind:
            inputs["labels"] = [{"class_labels": torch.tensor([0, 2]), "boxes": torch.rand(2, 4) * 0.3 + 0.3} for _ in range(BATCH)]
        return inputs
    if main == "input_values":
        inputs = {main: torch.randn(BATCH, 2000)}
    else:
        inputs = {main: torch.randn(BATCH, getattr(config, "num_mel_bins", None) or 80, 2 * getattr(config, "max_source_positions", 64))}
    if "CTC" in kind:
        inputs["labels"] = torch.randint(4, VOCABULARY, (BATCH, 3))
    elif "Classification" in kind:
        inputs["labels"] = torch.randint(CLASSES, (BATCH,))
    elif "ConditionalGeneration" in kind:
        inputs["labels"] = torch.randint(4, VOCABULARY, (BATCH, 6))
    return inputs


def loss_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    """The model's own loss; where it has none, a number in which all its outputs take part."""
    outputs = model(**inputs)
    loss = outputs.get("loss")
    if loss is None:
        loss = sum(t.float().square().mean() for t in tensors_of(outputs) if t.is_floating_point())
    return outputs, loss


def decode_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    """A prompt, then two tokens chosen greedily, with the KV cache that the model makes."""
    ids = inputs["input_ids"]
    outputs = model(input_ids=ids, use_cache=True)
    logits = [outputs.logits[:, -1]]
    for _ in range(2):
        ids = outputs.logits[:, -1:].argmax(-1)
        outputs = model(input_ids=ids, past_key_values=outputs.past_key_values, use_cache=True)
        logits.append(outputs.logits[:, -1])
    return outputs, torch.stack(logits).float().logsumexp(-1).mean()


def encoder_decoder_step(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, torch.Tensor]:
    """The encoder once, then three tokens of the decoder with its caches."""
    main = {key: value for key, value in inputs.items() if key in (model.main_input_name, "attention_mask")}
    encoded = model.get_encoder()(**main)
    rest = {key: value for key, value in main.items() if key == "attention_mask"}
    ids = torch.full((BATCH, 1), model.config.decoder_start_token_id)
    logits, cache, outputs = [], None, None
    for _ in range(3):
        outputs = model(encoder_outputs=encoded, decoder_input_ids=ids, past_key_values=cache, use_cache=True, **rest)
        cache = outputs.past_key_values
        ids = outputs.logits[:, -1:].argmax(-1)
        logits.append(outputs.logits[:, -1])
    return outputs, torch.stack(logits).float().logsumexp(-1).mean()
