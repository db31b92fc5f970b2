"""The one description of the nano model: widths, mechanisms, special tokens, file names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_NAME = "nano-qwen3.8-flash-next"
SOURCE_DIR = Path(__file__).resolve().parent
MODEL_DIR = SOURCE_DIR.parent / "nano_models" / MODEL_NAME

# Added tokens in id order; True marks those that a decoder may skip as "special".
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """Sizes of the nano model; names follow the release's `text_config`."""

    vocab_size: int = 1024  # rows from `tokenizer_size` on are never trained, as in the release
    tokenizer_size: int = 1008
    hidden_size: int = 128
    layer_types: tuple[str, ...] = (
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    )
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 1e7
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 6
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 128
    hc_count: int = 4
    hc_lowrank: int = 16
    ple_layer_index: int = 1  # zero-based; the release writes the one-based id
    ple_embed_dim: int = 128
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 4
    ngram_vocab_size_base: int = 1500
    ngram_divisor: int = 128
    split_ngram_parts: int = 4
    ngram_seed: int = 1234
    indexer_n_heads: int = 4
    indexer_head_dim: int = 32
    indexer_budget: int = 64  # tokens that a query may select
    indexer_compress_ratio: int = 4  # tokens of one block

    @property
    def first_added_id(self) -> int:
        """Id of `<|endoftext|>`, the first added token."""
        return self.tokenizer_size - len(ADDED_TOKENS)

    def token_id(self, token: str) -> int:
        """Id of an added token."""
        return self.first_added_id + [name for name, _ in ADDED_TOKENS].index(token)

    @property
    def endoftext_id(self) -> int:
        return self.token_id("<|endoftext|>")


def text_config(cfg: NanoConfig) -> dict[str, Any]:
    """Return the `text_config` object of config.json with the release's field names."""
    return {
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": len(cfg.layer_types),
        "layer_types": list(cfg.layer_types),
        "full_attention_interval": 3,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "output_gate_type": "sigmoid",
        "max_position_embeddings": cfg.max_position_embeddings,
        "rms_norm_eps": cfg.rms_norm_eps,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "linear_conv_kernel_dim": cfg.linear_conv_kernel_dim,
        "linear_key_head_dim": cfg.linear_key_head_dim,
        "linear_value_head_dim": cfg.linear_value_head_dim,
        "linear_num_key_heads": cfg.linear_num_key_heads,
        "linear_num_value_heads": cfg.linear_num_value_heads,
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.num_experts_per_tok,
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "shared_expert_intermediate_size": cfg.shared_expert_intermediate_size,
        "hc_count": cfg.hc_count,
        "hc_lowrank": cfg.hc_lowrank,
        "ple_layer_ids": [cfg.ple_layer_index + 1],
        "ple_embed_dim": cfg.ple_embed_dim,
        "ple_conv_kernel_size": cfg.ple_conv_kernel_size,
        "ngram_size": cfg.ngram_size,
        "heads_per_ngram": cfg.heads_per_ngram,
        "ngram_vocab_size_base": cfg.ngram_vocab_size_base,
        "make_ngram_vocab_size_divisible_by": cfg.ngram_divisor,
        "split_ngram_parts": cfg.split_ngram_parts,
        "indexer_n_heads": cfg.indexer_n_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": cfg.indexer_head_dim,
        "indexer_budget": cfg.indexer_budget,
        "indexer_compress_ratio": cfg.indexer_compress_ratio,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mtp": {
            "hybrid": True,
            "layer_types": ["full_attention"],
            "num_hidden_layers": 1,
            "rope_theta": cfg.rope_theta,
            "mtp_use_hidden_state_from_layer": None,
        },
        "bos_token_id": cfg.endoftext_id,
        "eos_token_id": cfg.endoftext_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": cfg.rope_theta,
            "partial_rotary_factor": cfg.rotary_dim / cfg.head_dim,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }


def model_config(cfg: NanoConfig, not_converted: list[str]) -> dict[str, Any]:
    """Return config.json. `not_converted` lists the modules that stay BF16."""
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": "bfloat16",
        "image_token_id": cfg.token_id("<|image_pad|>"),
        "video_token_id": cfg.token_id("<|video_pad|>"),
        "vision_start_token_id": cfg.token_id("<|vision_start|>"),
        "vision_end_token_id": cfg.token_id("<|vision_end|>"),
        "tie_word_embeddings": False,
        "text_config": text_config(cfg),
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": not_converted,
        },
    }


def generation_config(cfg: NanoConfig) -> dict[str, Any]:
    """Return generation_config.json; the temperature is lower than the release's 1.0."""
    return {
        "bos_token_id": cfg.endoftext_id,
        "eos_token_id": [cfg.token_id("<|im_end|>"), cfg.endoftext_id],
        "pad_token_id": cfg.endoftext_id,
        "do_sample": True,
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.95,
    }
