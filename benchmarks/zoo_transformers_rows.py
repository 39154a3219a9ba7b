"""The model classes of the sweep and the sizes that are their own (a configuration inside another is a dictionary)."""

from __future__ import annotations

from typing import Any

MASKED = (
    *(
        "Albert",
        "Bert",
        "BigBird",
        "ConvBert",
        "Data2VecText",
        "Deberta",
        "DebertaV2",
        "DistilBert",
        "Electra",
        "Ernie",
        "Esm",
        "FNet",
        "Funnel",
    ),
    *(
        "IBert",
        "LayoutLM",
        "Longformer",
        "Luke",
        "MegatronBert",
        "MobileBert",
        "ModernBert",
        "MPNet",
        "NomicBert",
        "Nystromformer",
        "RemBert",
    ),
    *("Roberta", "RobertaPreLayerNorm", "RoFormer", "SqueezeBert", "Xmod"),
)
CAUSAL = (
    *("BioGpt", "Bloom", "CodeGen", "Cohere", "DeepseekV2", "DeepseekV3", "Exaone4", "Falcon", "FalconH1", "FalconMamba", "Gemma"),
    *(
        "Gemma2",
        "Gemma3",
        "Glm4",
        "GPTBigCode",
        "GPTJ",
        "GPTNeo",
        "GPTNeoX",
        "GptOss",
        "Granite",
        "GraniteMoe",
        "Jamba",
        "Lfm2",
        "Llama",
        "Mamba",
    ),
    *(
        "Mamba2",
        "MiniMax",
        "Mistral",
        "Mixtral",
        "Mpt",
        "Nemotron",
        "Olmo2",
        "Olmoe",
        "OPT",
        "Persimmon",
        "Phi",
        "Phi3",
        "Qwen2",
        "Qwen2Moe",
    ),
    *("Qwen3", "Qwen3Next", "RecurrentGemma", "SmolLM3", "StableLm", "Starcoder2", "XGLM"),
)
ENCODER_DECODER = (
    *("Bart", "BigBirdPegasus", "Blenderbot", "FSMT", "LED", "LongT5", "M2M100", "MBart", "MT5", "Mvp", "NllbMoe", "Pegasus", "PegasusX"),
    *("PLBart", "ProphetNet", "SwitchTransformers", "T5", "UMT5", "Whisper"),
)
IMAGES = (
    *("Beit", "Bit", "ConvNext", "ConvNextV2", "Cvt", "DeiT", "Dinov2", "EfficientNet", "FocalNet", "Levit", "MobileNetV2", "MobileViT"),
    *("PoolFormer", "Pvt", "RegNet", "ResNet", "Segformer", "Swinv2", "ViT", "ViTMSN"),
)
OTHERS = (
    *("CTRLLMHeadModel", "FlaubertWithLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"),
    *(
        "ReformerModelWithLMHead",
        "MarianMTModel",
        "AlbertForMultipleChoice",
        "BertForSequenceClassification",
        "CanineForSequenceClassification",
    ),
    *("DistilBertForQuestionAnswering", "GPT2ForSequenceClassification", "RobertaForTokenClassification", "CLIPModel", "SiglipModel"),
    *(
        "DetrForObjectDetection",
        "YolosForObjectDetection",
        "SegformerForSemanticSegmentation",
        "Wav2Vec2ForCTC",
        "HubertForCTC",
        "WavLMForCTC",
    ),
    *("SEWForCTC", "UniSpeechForCTC"),
)
NAMES = (
    *(f"{name}ForMaskedLM" for name in MASKED),
    *(f"{name}ForCausalLM" for name in CAUSAL),
    *(f"{name}ForConditionalGeneration" for name in ENCODER_DECODER),
    *(f"{name}ForImageClassification" for name in IMAGES),
    *OTHERS,
)

DEFAULT = object()  # the configuration's own value, where the common size does not fit
_WAV2VEC = {
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_STAGES = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
_SWIN = {
    "embed_dim": 24,
    "num_heads": [3, 6, 12, 24],
    "depths": [1, 1, 1, 1],
    "window_size": 4,
    "hidden_size": DEFAULT,
    "num_hidden_layers": DEFAULT,
}
OWN: dict[str, dict[str, Any]] = {
    "BigBirdForMaskedLM": {"block_size": 2, "num_random_blocks": 1},
    "BigBirdPegasusForConditionalGeneration": {"block_size": 2, "num_random_blocks": 1},
    "BitForImageClassification": {"hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "embedding_size": 32, "num_groups": 8},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "ConvNextForImageClassification": _STAGES | {"num_hidden_layers": DEFAULT},
    "ConvNextV2ForImageClassification": _STAGES | {"num_hidden_layers": DEFAULT},
    "CvtForImageClassification": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "DeepseekV2ForCausalLM": {"topk_method": "greedy", "num_experts_per_tok": 2, "head_dim": 4, "num_key_value_heads": 4},
    "DeepseekV3ForCausalLM": {"head_dim": 4, "num_key_value_heads": 4},
    "DistilBertForQuestionAnswering": {"num_labels": 2},
    "EfficientNetForImageClassification": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "EsmForMaskedLM": {"vocab_size": 120},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8},
    "FalconMambaForCausalLM": {"state_size": 4, "time_step_rank": 4},
    "FocalNetForImageClassification": {"embed_dim": 16, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128]},
    "FunnelForMaskedLM": {"num_hidden_layers": DEFAULT, "block_sizes": [1, 1], "d_head": 8},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "HubertForCTC": _WAV2VEC,
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "LongformerForMaskedLM": {"attention_window": 4},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1, "state_size": 4, "chunk_size": 8},
    "MambaForCausalLM": {"state_size": 4, "time_step_rank": 4},
    "MobileBertForMaskedLM": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "ModernBertForMaskedLM": {"global_attn_every_n_layers": 2},
    "NemotronForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "ProphetNetForConditionalGeneration": {"num_hidden_layers": DEFAULT, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "PvtForImageClassification": _STAGES | {"num_attention_heads": [1, 2, 2, 4]},
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "RegNetForImageClassification": _STAGES | {"embedding_size": 16, "groups_width": 8},
    "ReformerModelWithLMHead": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "is_decoder": True},
    "ResNetForImageClassification": _STAGES | {"embedding_size": 16},
    "SEWForCTC": _WAV2VEC | {"squeeze_factor": 1},
    "Swinv2ForImageClassification": _SWIN,
    "UniSpeechForCTC": _WAV2VEC,
    "Wav2Vec2ForCTC": _WAV2VEC,
    "WavLMForCTC": _WAV2VEC,
    "XmodForMaskedLM": {"default_language": "en_XX"},
}
NO_CACHE = frozenset(
    "FalconH1ForCausalLM FalconMambaForCausalLM FlaubertWithLMHeadModel JambaForCausalLM Mamba2ForCausalLM MambaForCausalLM OpenAIGPTLMHeadModel "
    "ProphetNetForConditionalGeneration Qwen3NextForCausalLM RecurrentGemmaForCausalLM ReformerModelWithLMHead XLMWithLMHeadModel XLNetLMHeadModel".split()
)
"""No KV cache among their outputs, or one that eager cannot differentiate (a recurrent state updated in place)."""
RANDOM = frozenset({"ReformerModelWithLMHead"})
"""Another result at each call in training: `torch.seed()` in the model."""
ROWS: dict[str, dict[str, Any]] = {name: OWN.get(name, {}) for name in NAMES}
