"""Models from JSON files, by the names of ``pptrace estimate``'s options, or as Hugging Face's ``config.json``.

The tables below say what a field means. :data:`_DEFAULTS` has what the classes of a ``model_type`` take for granted and a file
need not say, by the same names: over these the fields of the file win.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pptrace.api.options import require_whole
from pptrace.errors import UsageError
from pptrace.sizes.expert_options import Shared
from pptrace.sizes.form import Latent, ModelForm, Norms, QkNorm, Window

_SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner", "intermediate_size_mlp"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("intermediate_size", "moe_intermediate_size"),
    "layer_parameters": (),
    "layer_activations": (),
    "embedding_parameters": (),
    "head_parameters": (),
    "head_activations": (),
}
"""Each option, and what ``config.json`` calls it; the last one that a file has is taken."""
_FORM: Mapping[str, tuple[str, ...]] = {
    "is_gated": (),
    "has_layer_norm": (),
    "has_positions": (),
    "has_qkv_biases": ("use_bias", "attention_bias"),
    "has_output_biases": ("use_bias", "attention_bias", "attention_out_bias"),
    "has_mlp_biases": ("use_bias", "mlp_bias"),
    "has_router_biases": (),
    "has_sinks": (),
    "caps_logits": ("final_logit_softcapping",),
    "norms": (),
}
"""The same of fields of :class:`ModelForm`."""
_QK_NORMS = ("use_qk_norm", "qk_norm", "qk_layernorm")
"""Names of whether queries and keys are normed; which norm that is, no file says."""
_UNCOUNTED_LAYERS = (
    *("is_encoder_decoder", "add_cross_attention", "type_vocab_size"),
    *("layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern", "block_types", "block_configs"),
    *("attn_type_list", "attn_layer_period", "full_attention_interval", "linear_attn_config", "linear_num_key_heads"),
    *("state_size", "ssm_cfg", "ssm_state_size", "mamba_d_state", "attention_hidden_size", "lru_width", "conv_L_cache"),
    *("num_kv_shared_layers", "hidden_size_per_layer_input", "index_topk"),
    *("parallel_attn", "use_parallel_residual", "alibi"),
)
"""Fields of layers that are no attention with an MLP or experts behind it, all of one size: those of encoders, Mamba, RWKV,
linear and sparse attention, parallel ones."""
_NO_LAYERS = ("vision_config", "audio_config", "num_nextn_predict_layers")
"""Fields of what a model has besides its layers, its embedding and its head."""
_NESTED = ("text_config", "llm_config", "language_config")
_ATTENTIONS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Kinds of attention, and the fields of how many tokens a query sees, where not all."""

_LLAMA: Mapping[str, Any] = {
    **dict.fromkeys(("has_layer_norm", "has_positions"), False),
    **dict.fromkeys(("has_qkv_biases", "has_output_biases", "has_mlp_biases"), False),
    "is_gated": True,
}
_QWEN2 = {**_LLAMA, "has_qkv_biases": True, "use_sliding_window": False}
_QWEN3 = {**_LLAMA, "norm_of_qk": QkNorm.HEAD, "use_sliding_window": False}
_GEMMA = {**_LLAMA, "tied": True, "head_dim": 256}
_GEMMA2 = {**_GEMMA, "norms": Norms.BOTH, "sliding_window_pattern": 2}
_GEMMA3 = {
    **_GEMMA2,
    **{"norm_of_qk": QkNorm.HEAD, "sliding_window_pattern": 6},
    **{"heads": 8, "kv_heads": 4, "vocabulary": 262_208, "sequence": 131_072},
}
_GLM4_MOE = {**_LLAMA, "attention_out_bias": False, "norm_of_qk": QkNorm.HEAD, "use_qk_norm": False}
_GPT_OSS = {
    **_LLAMA,
    **dict.fromkeys(("has_mlp_biases", "has_router_biases", "has_sinks"), True),
    "sliding_window_pattern": 2,
}
_LLAMA4 = {**_LLAMA, "n_shared_experts": 1, "sliding_window_pattern": 4, "norm_of_qk": QkNorm.PLAIN}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "gpt2": {"tied": True},
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "granite", "seed_oss"), _LLAMA),
    "smollm3": {**_LLAMA, "tied": True, "use_sliding_window": False},
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2),
    "qwen2_moe": {**_QWEN2, "shared": Shared.GATED},
    **dict.fromkeys(("qwen3", "qwen3_vl_text", "qwen3_moe", "qwen3_vl_moe_text"), _QWEN3),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _LLAMA),
    "glm4_moe": _GLM4_MOE,
    "gpt_oss": _GPT_OSS,
    "llama4_text": _LLAMA4,
    "olmo2": {**_LLAMA, "norms": Norms.AFTER, "norm_of_qk": QkNorm.ALL},
    "olmoe": {**_LLAMA, "norm_of_qk": QkNorm.ALL},
    "starcoder2": {"has_positions": False, "tied": True},
}
FAMILIES = ("gpt", "llama")
"""Families that a user may name."""
_ONLY_DEFAULTS = {name for name, names in _FORM.items() if name not in names} | {"norm_of_qk", "shared"}
"""Names of what no file says."""


@dataclass(frozen=True)
class ModelFile:
    """A model as a file has it, or of options alone. ``fields`` are the file's and, where it has them not, what its ``kind``
    (``model_type``, or a family; "" where a ``config.json`` has none) takes for granted; ``sizes`` those that are options,
    by their names.

    Raises:
        UsageError: of its methods: a field has a value that is not known; the message names it.
    """

    kind: str
    fields: Mapping[str, Any]
    path: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Return whether it is known what its kind takes for granted."""
        return self.kind in _DEFAULTS

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what of the file does not count."""
        model_type = self.fields.get("model_type", self.kind)
        as_family = [f"{self.path}: model_type {model_type} is taken for family {self.kind}"] * (
            model_type != self.kind
        )
        not_counted = [name for name in _NO_LAYERS if self.fields.get(name)]
        return (*as_family, *([f"{self.path}: {', '.join(not_counted)} not counted"] if not_counted else []))

    @property
    def required(self) -> Mapping[str, str]:
        """Options whose usual values are not those of a ``config.json``, and the fields that it should have for them."""
        if "model_type" not in self.fields:
            return {}
        of_experts = {"experts_per_token": "num_experts_per_tok"} if "experts" in self.sizes else {}
        return of_experts | ({"ffn": "intermediate_size"} if self.fields.get("is_gated") else {})

    def require_counted(self) -> None:
        """Refuse layers that are no attention with an MLP or experts behind it, and texts in place of true and false."""
        for name in ("tied", *_SIZES["tied"], *(each for names in _FORM.values() for each in names)):
            if isinstance(self.fields.get(name), str):
                raise UsageError(f"{self.path}: {name} is {self.fields[name]!r}; expected true or false")
        of_experts = (name for name in self.fields if "expert" in name and name not in (*_SIZES, "n_shared_experts"))
        for name in (*_UNCOUNTED_LAYERS, *(() if "experts" in self.sizes else of_experts)):
            if self.fields.get(name):
                raise self._refusal(f"{name} is of layers that are not counted")
        kinds = self.fields.get("layer_types")
        for kind in kinds if isinstance(kinds, list) else ():
            if str(kind) not in _ATTENTIONS:
                raise self._refusal(f"layer_types has {kind!r}, of layers that are not counted")

    @property
    def num_positions(self) -> int | None:
        """Rows of learned positions that ``config.json`` has, however long the sequences are; None: as many as these."""
        return next((self._whole(name) for name in reversed(_SIZES["sequence"]) if name in self.fields), None)

    def form(self, layers: int) -> ModelForm:
        """The form of a model of so many layers."""
        given = {name: value for name, names in _FORM.items() if (value := _last(self.fields, name, names)) is not None}
        flags: dict[str, Any] = {name: bool(value) for name, value in given.items() if name != "norms"}
        form = ModelForm(
            **flags,
            norms=given.get("norms", Norms.BEFORE),
            qk_norm=self._qk_norm(),
            head_dim=self._optional("head_dim"),
            value_dim=self._optional("v_head_dim"),
            windows=self._windows(layers),
            dense_layers=self._dense_layers(layers),
        )
        if self.fields.get("kv_lora_rank") is None:
            return form
        if form.has_qkv_biases:
            raise self._refusal("attention_bias is of biases that are not counted")
        kv_rank, rotary = self._whole("kv_lora_rank"), self._whole("qk_rope_head_dim")
        head_dim, value_dim = self._whole("qk_nope_head_dim") + rotary, self._whole("v_head_dim")
        latent = Latent(kv_rank, rotary, self._optional("q_lora_rank"))
        return replace(form, latent=latent, head_dim=head_dim, value_dim=value_dim)

    def shared_width(self, expert_width: int) -> int:
        """Width of the MLP that all tokens go through besides their experts; 0: none."""
        if self.fields.get("shared_expert_intermediate_size"):
            return self._whole("shared_expert_intermediate_size")
        return self._whole("n_shared_experts", 0) * expert_width

    @property
    def shared(self) -> Shared:
        """Way in which that MLP joins the experts."""
        return Shared(self.fields.get("shared", Shared.ADDED))

    def _qk_norm(self) -> QkNorm:
        used = [name for name in _QK_NORMS if self.fields.get(name)]
        if used and "norm_of_qk" not in self.fields:
            raise self._refusal(f"{used[0]} is of a norm that is not counted")
        is_off = self.fields.get(_QK_NORMS[0]) is False
        return QkNorm.NONE if is_off else QkNorm(self.fields.get("norm_of_qk", QkNorm.NONE))

    def _windows(self, layers: int) -> tuple[Window | None, ...]:
        chunk, size = self.fields.get("attention_chunk_size"), self.fields.get("sliding_window")
        kind = "sliding_attention" if chunk is None else "chunked_attention"
        if self.fields.get("layer_types"):
            kinds = self._of_layers("layer_types", layers)
        elif chunk is None and (size is None or self.fields.get("use_sliding_window") is False):
            return ()
        elif chunk is not None and self.fields.get("no_rope_layers"):
            kinds = [kind if rotates else "full_attention" for rotates in self._of_layers("no_rope_layers", layers)]
        else:
            every, first = self._whole("sliding_window_pattern", 0), self._whole("max_window_layers", 0)
            sees_all = ((every and (layer + 1) % every == 0) or layer < first for layer in range(layers))
            kinds = ["full_attention" if sees else kind for sees in sees_all]
        sizes = {each: self._whole(name) for each in set(kinds) if (name := _ATTENTIONS[each])}
        return tuple(Window(sizes[each], each == "chunked_attention") if each in sizes else None for each in kinds)

    def _dense_layers(self, layers: int) -> frozenset[int]:
        """Layers with an MLP where others have experts."""
        first, numbers = self._whole("first_k_dense_replace", 0), range(layers)
        steps = (self._whole(name, 0) for name in ("decoder_sparse_step", "interleave_moe_layer_step"))
        step = max(*steps, 1)
        dense = {layer for layer in numbers if layer < first or (layer + 1) % step}
        if isinstance(self.fields.get("moe_layer_freq"), list):
            dense |= {layer for layer, sparse in enumerate(self._of_layers("moe_layer_freq", layers)) if not sparse}
        elif frequency := self._whole("moe_layer_freq", 0):
            dense |= {layer for layer in numbers if layer % frequency}
        if listed := self._numbers("moe_layers"):
            dense |= set(numbers) - listed
        return frozenset(dense | self._numbers("mlp_only_layers"))

    def _numbers(self, name: str) -> set[int]:
        """The layers that a field lists, none where there is no such field."""
        values = self.fields.get(name) or []
        if not isinstance(values, list):
            raise self._refusal(f"{name} is no list of layers")
        for value in values:
            require_whole(f"{self.path}: {name}", value, 0)
        return set(values)

    def _of_layers(self, name: str, layers: int) -> list[Any]:
        """A field that has a value for each layer."""
        values = self.fields[name]
        if not isinstance(values, list) or len(values) < layers:
            raise self._refusal(f"{name} has no value for each of {layers} layers")
        return values[:layers]

    def _whole(self, name: str, otherwise: int | None = None) -> int:
        """A field that is a whole number, at least 1 where there is nothing ``otherwise``."""
        value: Any = self.fields.get(name, otherwise)
        require_whole(f"{self.path}: {name}", value, int(otherwise is None))
        return int(value)

    def _optional(self, name: str) -> int | None:
        """A field that is a whole number, None where there is none."""
        return self._whole(name) if name in self.fields else None

    def _refusal(self, what: str) -> UsageError:
        return UsageError(
            f"{self.path}: {what}; expected attention with an MLP or experts in each layer, or layers by their numbers alone"
        )


def read_model(path: Path, family: str | None = None) -> ModelFile:
    """Read the model of a file, as one of a family where that is named.

    Raises:
        UsageError: it cannot be read, or is no JSON object with sizes of a model.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(
            f"{path}: cannot be read ({err.strerror}); expected a JSON file with sizes of a model"
        ) from None
    except (ValueError, RecursionError) as err:
        raise UsageError(f"{path}: no JSON that can be read ({err}); expected sizes of a model") from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{path}: holds no JSON object; expected sizes of a model, such as a config.json of Hugging Face"
        )
    for name in _NESTED:
        config |= config[name] if isinstance(config.get(name), dict) else {}
    usual = "" if any(name in config for names in _SIZES.values() for name in names) else FAMILIES[0]
    kind = str(family or config.get("family") or config.get("model_type") or usual)
    of_file = {name: value for name, value in config.items() if value is not None and name not in _ONLY_DEFAULTS}
    fields = {**_DEFAULTS.get(kind, {}), **of_file}
    sizes = {name: value for name, names in _SIZES.items() if (value := _last(fields, name, names)) is not None}
    if not any(name in of_file for size, names in _SIZES.items() for name in (size, *names)):
        raise UsageError(
            f"{path}: has no size of a model; expected names such as {', '.join(list(_SIZES)[:3])}, or config.json's"
        )
    if not sizes.get("experts"):
        sizes = {name: size for name, size in sizes.items() if name in of_file or name not in ("experts", "expert_ffn")}
    return ModelFile(kind, fields, str(path), sizes)


def model_of(family: str | None) -> ModelFile:
    """The model of options alone, of a family."""
    kind = family or FAMILIES[0]
    return ModelFile(kind, _DEFAULTS.get(kind, {}))


def _last(fields: Mapping[str, Any], name: str, names: tuple[str, ...]) -> Any:
    """The value of the last one of these names that a file has, None where it has none."""
    return next((fields[each] for each in reversed((name, *names)) if each in fields), None)
