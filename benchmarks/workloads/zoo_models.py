"""The model types of `predict_zoo`, by what they are trained for, and how each is made small.

The choice is one of breadth: what people fine-tune, in every family that transformers has, old and new. It says nothing of
what works: a model type that fails stays in the list. Nothing here needs torch.
"""

from typing import Any

# fmt: off
MODELS: dict[str, tuple[str, ...]] = {
    "text-classification": (
        "albert", "bert", "big_bird", "camembert", "canine", "convbert", "data2vec-text", "deberta", "deberta-v2",
        "distilbert", "electra", "ernie", "esm", "eurobert", "flaubert", "fnet", "funnel", "ibert", "layoutlm",
        "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "nomic_bert", "nystromformer",
        "reformer", "rembert", "roberta", "roberta-prelayernorm", "roformer", "squeezebert", "xlm", "xlm-roberta",
        "xlm-roberta-xl", "xlnet", "yoso",
    ),
    "causal-lm": (
        "biogpt", "bloom", "codegen", "cohere", "cohere2", "ctrl", "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5",
        "falcon", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode",
        "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "jamba", "lfm2", "llama",
        "llama4_text", "mamba", "mamba2", "ministral", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmoe",
        "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "qwen3_next", "recurrent_gemma", "rwkv", "smollm3", "stablelm", "starcoder2", "xglm", "zamba2",
    ),
    "seq2seq": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100", "marian",
        "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers", "t5",
        "t5gemma", "umt5",
    ),
    "image-classification": (
        "beit", "bit", "convnext", "convnextv2", "cvt", "deit", "dinov2", "efficientnet", "focalnet", "hiera", "levit",
        "mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "poolformer", "pvt", "pvt_v2", "regnet", "resnet",
        "swiftformer", "swin", "swinv2", "timm_wrapper", "vit", "vit_msn",
    ),
    "image-pretraining": ("vit_mae",),
    "segmentation": ("dpt", "segformer", "upernet"),
    "detection": ("conditional_detr", "deformable_detr", "detr", "rt_detr", "yolos"),
    "video-classification": ("timesformer", "videomae", "vivit"),
    "audio-classification": (
        "audio-spectrogram-transformer", "data2vec-audio", "hubert", "sew", "unispeech-sat", "wavlm",
    ),
    "ctc": ("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer"),
    "speech-recognition": ("moonshine", "speech_to_text", "whisper"),
    "contrastive": ("align", "chinese_clip", "clip", "siglip", "siglip2"),
    "question-about-image": ("vilt",),
    "document-classification": ("layoutlmv3",),
    "captioning": ("blip", "git", "vision-encoder-decoder"),
    "image-text-to-text": ("idefics3", "llava", "llava_next", "paligemma", "qwen2_vl"),
}

# One or more of every kind, and of every way in which code can depend on values.
QUICK = (
    "bert", "deberta-v2", "longformer", "gpt2", "llama", "mixtral", "mamba", "t5", "vit", "swin", "wav2vec2", "clip",
)

# Fields of a configuration that are made small wherever they are whole numbers, in parts of a configuration as well.
SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "attention_hidden_size", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "d_inner", "n_inner", "dff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "ffn_hidden_size"), 128),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("encoder_num_hidden_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("kv_n_heads", "num_experts_per_tok", "moe_top_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_group"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("attention_head_size", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "moe_intermediate_size", "projection_dim"), 32),
}

# What the table above gets wrong: sizes that must agree with others, and pieces that small models have once in a while.
SETTINGS: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 33},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "lsh"]},
    "squeezebert": {"embedding_size": 64},
    "deepseek_v2": {
        "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    },
    "deepseek_v3": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "attention_hidden_size": None},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "align": {
        "projection_dim": 640,
        "vision_config": {"hidden_dim": None, "image_size": 128, "num_block_repeats": [1] * 7},
    },
    "cvt": {"depth": [1, 2, 3]},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "levit": {"architectures": ["LevitForImageClassification"]},
    "efficientnet": {"hidden_dim": None, "image_size": 128, "num_block_repeats": [1] * 7},
    "dpt": {"image_size": 96, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "upernet": {"backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "rt_detr": {"backbone_config": {"out_features": ["stage2", "stage3", "stage4"]}},
    "conditional_detr": {"backbone_config": None, "use_timm_backbone": False},
    "detr": {"backbone_config": None, "use_timm_backbone": False},
    "deformable_detr": {"backbone_config": None, "use_timm_backbone": False},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "idefics3": {"text_config": {"vocab_size": 128_259}, "vision_config": {"image_size": 364, "patch_size": 14}},
    **dict.fromkeys(
        ("llava", "llava_next"),
        {
            "text_config": {"vocab_size": 32_064, "use_cache": False},
            "vision_config": {"image_size": 336, "patch_size": 14},
        },
    ),
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64}},
    "qwen2_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        "vision_config": {"depth": 2, "embed_dim": 64},
    },
}
# fmt: on


def task_of(model_type: str) -> str:
    return next(task for task, models in MODELS.items() if model_type in models)


def all_models() -> tuple[str, ...]:
    return tuple(model for models in MODELS.values() for model in models)
