"""Models as their public ``config.json`` have them, and how many parameters were published of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_NAMES = (*_NAMES, "vocab_size", "max_position_embeddings", "tie_word_embeddings")


class PublicModel(NamedTuple):
    """A configuration; the parameters of its checkpoint, without parts that are no layers; and how many of them are active for a
    token, in billions as its card or report rounds them, 0 without experts.
    """

    config: Mapping[str, Any]
    parameters: int
    active: float = 0.0


def _config(kind: str, *sizes: int | bool | None, **more: Any) -> dict[str, Any]:
    """A configuration of sizes in the order of ``_NAMES``, without those that are None: left to the class of the model."""
    named = {name: size for name, size in zip(_NAMES, sizes, strict=True) if size is not None}
    return {"model_type": kind, **named, **more}


def _nested(kind: str, text: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": kind, "text_config": text, "vision_config": {"model_type": "vision", "hidden_size": 1408}}


def _experts(width: int, num: int, top_k: int, name: str = "n_routed_experts", **more: Any) -> dict[str, Any]:
    return {"moe_intermediate_size": width, name: num, "num_experts_per_tok": top_k, **more}


_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}
_GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3_MOE = {"head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False}
_GPT_OSS = {
    **{"head_dim": 64, "num_experts_per_tok": 4, "attention_bias": True, "sliding_window": 128},
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
_LLAMA4 = {
    **{"head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "use_qk_norm": True},
    **{"attention_chunk_size": 8192, "no_rope_layers": []},
}

PUBLIC: Mapping[str, PublicModel] = {
    "GPT-2": PublicModel(_GPT2, 124_439_808),
    "Llama 2 7B": PublicModel(_config("llama", 32, 4096, 32, 32, 11008, 32000, 4096, False), 6_738_415_616),
    "Llama 2 70B": PublicModel(_config("llama", 80, 8192, 64, 8, 28672, 32000, 4096, False), 68_976_648_192),
    "Llama 3 8B": PublicModel(_config("llama", 32, 4096, 32, 8, 14336, 128256, 8192, False), 8_030_261_248),
    "Llama 3.1 405B": PublicModel(_config("llama", 126, 16384, 128, 8, 53248, 128256, 131072, False), 405_853_388_800),
    "Llama 3.2 1B": PublicModel(
        _config("llama", 16, 2048, 32, 8, 8192, 128256, 131072, True, head_dim=64), 1_235_814_400
    ),
    "Mistral 7B": PublicModel(
        _config("mistral", 32, 4096, 32, 8, 14336, 32000, 32768, False, sliding_window=4096), 7_241_732_096
    ),
    "Mistral Nemo": PublicModel(
        _config("mistral", 40, 5120, 32, 8, 14336, 131072, 131072, False, head_dim=128), 12_247_782_400
    ),
    "Mixtral 8x7B": PublicModel(
        _config("mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, False, **_MIXTRAL), 46_702_792_704, 12.9
    ),
    "Qwen2.5 7B": PublicModel(
        _config("qwen2", 28, 3584, 28, 4, 18944, 152064, 131072, False, sliding_window=131072), 7_615_616_512
    ),
    "Qwen1.5-MoE": PublicModel(
        _config(
            *("qwen2_moe", 24, 2048, 16, 16, 5632, 151936, 8192, False),
            **_experts(1408, 60, 4, "num_experts", shared_expert_intermediate_size=5632),
        ),
        14_315_784_192,
        2.69,
    ),
    "Qwen3 8B": PublicModel(
        _config("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, False, head_dim=128), 8_190_735_360
    ),
    "Qwen3 30B-A3B": PublicModel(
        _config(
            *("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 40960, False),
            **_experts(768, 128, 8, "num_experts", **_QWEN3_MOE),
        ),
        30_532_122_624,
        3.35,
    ),
    "Gemma 7B": PublicModel(_config("gemma", 28, 3072, 16, 16, 24576, 256000, 8192, None, head_dim=256), 8_537_680_896),
    "Gemma 2 9B": PublicModel(
        _config("gemma2", 42, 3584, 16, 8, 14336, 256000, 8192, None, head_dim=256, sliding_window=4096), 9_241_705_984
    ),
    "Gemma 3 4B": PublicModel(
        _nested("gemma3", _config("gemma3_text", 34, 2560, None, None, 10240, None, None, None, sliding_window=1024)),
        3_880_263_168,
    ),
    "Gemma 3 27B": PublicModel(
        _nested("gemma3", _config("gemma3_text", 62, 5376, 32, 16, 21504, None, None, None, head_dim=128)),
        27_009_346_304,
    ),
    "DeepSeek-V2-Lite": PublicModel(
        _config(
            *("deepseek_v2", 27, 2048, 16, 16, 10944, 102400, 163840, False),
            **_experts(1408, 64, 6, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=None, **_MLA),
        ),
        15_706_484_224,
        2.66,
    ),
    "DeepSeek-V3": PublicModel(
        _config(
            *("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, 163840, False),
            **_experts(2048, 256, 8, n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=1536, **_MLA),
            num_nextn_predict_layers=1,
        ),
        671_026_404_352,
        37.55,
    ),
    "gpt-oss-20b": PublicModel(
        _config("gpt_oss", 24, 2880, 64, 8, 2880, 201088, 131072, False, num_local_experts=32, **_GPT_OSS),
        20_914_757_184,
        3.61 + 0.58,  # its card leaves out the embedding
    ),
    "gpt-oss-120b": PublicModel(
        _config("gpt_oss", 36, 2880, 64, 8, 2880, 201088, 131072, False, num_local_experts=128, **_GPT_OSS),
        116_829_156_672,
        5.13 + 0.58,
    ),
    "Llama 4 Scout": PublicModel(
        _nested(
            "llama4",
            _config("llama4_text", 48, 5120, 40, 8, 8192, 202048, 262144, False, num_local_experts=16, **_LLAMA4),
        ),
        107_769_861_120,
        17.17,
    ),
    "Llama 4 Maverick": PublicModel(
        _nested(
            "llama4",
            _config(
                *("llama4_text", 48, 5120, 40, 8, 8192, 202048, 262144, False),
                **{"num_local_experts": 128, "interleave_moe_layer_step": 2, **_LLAMA4},
            ),
        ),
        400_711_848_960,
        17.18,
    ),
    "Phi-3 mini": PublicModel(
        _config("phi3", 32, 3072, 32, 32, 8192, 32064, 4096, False, sliding_window=2047), 3_821_079_552
    ),
    "OLMo 2 7B": PublicModel(_config("olmo2", 32, 4096, 32, 32, 11008, 100352, 4096, False), 7_298_617_344),
    "OLMoE": PublicModel(
        _config(
            *("olmoe", 16, 2048, 16, 16, 1024, 50304, 4096, False), **{"num_experts": 64, "num_experts_per_tok": 8}
        ),
        6_919_161_856,
        1.28,
    ),
    "SmolLM3": PublicModel(_config("smollm3", 36, 2048, 16, 4, 11008, 128256, 65536, None), 3_075_098_624),
    "StarCoder2 3B": PublicModel(
        _config("starcoder2", 30, 3072, 24, 2, 12288, 49152, 16384, None, use_bias=True, sliding_window=4096),
        3_030_371_328,
    ),
}


def config_file(folder: Path, config: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path
