"""Sizes of a model from a JSON file: by the names of ``pptrace estimate``'s options, or as Hugging Face's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pptrace.errors import UsageError
from pptrace.sizes.form import Family

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
    "family": (),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts",),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": (),
    "layer_parameters": (),
    "layer_activations": (),
    "embedding_parameters": (),
    "head_parameters": (),
    "head_activations": (),
}
"""Each option, and what ``config.json`` calls it."""
_FAMILIES = {"gpt2": Family.GPT, "llama": Family.LLAMA, "mistral": Family.LLAMA, "mixtral": Family.LLAMA}


def read_model(path: Path) -> dict[str, Any]:
    """The sizes that a file has, by the names of options.

    Raises:
        UsageError: it cannot be read, is no JSON object, or its heads are of another width than hidden / heads.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(
            f"{path}: cannot be read ({err.strerror}); expected a JSON file with sizes of a model"
        ) from None
    except ValueError as err:
        raise UsageError(f"{path}: no JSON that can be read ({err}); expected sizes of a model") from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{path}: holds no JSON object; expected sizes of a model, such as a config.json of Hugging Face"
        )
    sizes = {
        option: config[name]
        for option, names in _NAMES.items()
        for name in (option, *names)
        if config.get(name) is not None
    }
    if not sizes:
        raise UsageError(
            f"{path}: has no size of a model; expected names such as {', '.join(list(_NAMES)[:3])}, or config.json's"
        )
    kind = config.get("model_type")
    if kind in _FAMILIES:
        sizes = {"family": str(_FAMILIES[kind]), "tied": kind == "gpt2"} | sizes
    elif kind is not None and "family" not in sizes:
        sizes["unknown_family"] = str(kind)
    width, heads, hidden = config.get("head_dim"), sizes.get("heads"), sizes.get("hidden")
    if width is not None and isinstance(heads, int) and isinstance(hidden, int) and width * heads != hidden:
        raise UsageError(
            f"{path}: head_dim is {width} and hidden/heads {hidden}/{heads}; heads of another width are not known"
        )
    return sizes
