"""Options of estimates, as a user gives them, and the refusal of those that are missing, contradict or do not divide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from pptrace.api.files import FilePath
from pptrace.api.model_file import FAMILIES
from pptrace.api.options import Value, argument, option, options_of, require_whole, same
from pptrace.api.simulate import SimulateOptions, Spelling
from pptrace.errors import UsageError
from pptrace.sizes.estimate import ParameterBytes
from pptrace.sizes.expert_options import check_experts
from pptrace.sizes.form import OF_OUR_GPT, QkNorm
from pptrace.sizes.gpt_facts import ITEM_BYTES, GptFacts
from pptrace.sizes.mesh import MeshSizes

MOST_LAYERS = 10_000
RECOMPUTES = ("none", "selective", "full")
ATTENTIONS = ("fused", "stored")
CP_COMM_TYPES = ("p2p", "all_gather")
DTYPES = {num_bytes: name for name, num_bytes in ITEM_BYTES.items()}
_STEP = options_of(SimulateOptions)
OF_TOKENS = ("hidden", "sequence")
"""Sizes that layers by their numbers alone do not need: without them less is known."""
NUMBERS = ("layer_parameters", "layer_activations", "embedding_parameters", "head_parameters", "head_activations")
_PARTS = ("ffn", "family", "vocabulary", "attention", "dropout")
"""Sizes of a transformer that change nothing of layers known by their numbers alone."""


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """A model, a mesh and a schedule, as a user gives them."""

    schedule: str = argument("A key of pptrace.schedules.")
    _: KW_ONLY
    pp: int = same(_STEP["pp"], 1)
    microbatches: int | None = same(_STEP["microbatches"], None)
    chunks: int | None = same(_STEP["chunks"], None)
    group_size: int | None = same(_STEP["group_size"], None)
    model: FilePath | None = option(
        None,
        Value.FILE,
        "JSON with sizes of the model: by these options' names, or Hugging Face's config.json.",
        "FILE",
    )
    layers: int | None = option(None, Value.WHOLE, "Layers of the model.", "L", label="layers")
    hidden: int | None = option(None, Value.WHOLE, "Hidden size.", "H", label="hidden")
    heads: int | None = option(None, Value.WHOLE, "Attention heads.", "A", label="heads")
    kv_heads: int | None = option(
        None, Value.WHOLE, "Heads of keys and values (GQA) [default: all].", "K", label="KV heads"
    )
    ffn: int | None = option(None, Value.WHOLE, "Width of the MLP's inner layer [default: 4h].", "F", label="FFN")
    family: str | None = option(
        None,
        Value.TEXT,
        "gpt: LayerNorm, biases, learned positions, GELU; llama: RMSNorm, none, rotary, SwiGLU [default: gpt].",
        choices=FAMILIES,
        label="family",
    )
    tied: bool = option(False, Value.FLAG, "Embedding and head are one matrix.", label="tied")
    vocabulary: int | None = option(
        None, Value.WHOLE, "Rows of embedding and head; more where tp does not divide them.", "V", label="vocabulary"
    )
    sequence: int | None = option(None, Value.WHOLE, "Tokens of a sequence.", "S", label="sequence")
    microbatch_size: int = option(1, Value.WHOLE, "Sequences of a microbatch.", "B", label="microbatch size")
    dropout: bool = option(False, Value.FLAG, "With dropout, whose masks are kept.")
    attention: str = option(
        "fused",
        Value.TEXT,
        "fused: scores are computed again; stored: a layer keeps sbh(34 + 5as/h), as in arXiv 2205.05198.",
        choices=ATTENTIONS,
    )
    experts: int | None = option(None, Value.WHOLE, "Experts in place of each layer's MLP.", "N", label="experts")
    experts_per_token: int | None = option(None, Value.WHOLE, "Experts of a token [default: 2].", "N", label="top k")
    expert_ffn: int | None = option(
        None, Value.WHOLE, "Width of an expert's inner layer [default: the MLP's].", "F", label="expert FFN"
    )
    tp: int = option(1, Value.WHOLE, "Tensor-parallel ranks.", "T", label="tp")
    cp: int = option(1, Value.WHOLE, "Context-parallel ranks (ring attention).", "C", label="cp")
    dp: int = option(1, Value.WHOLE, "Data-parallel pipelines.", "D", label="dp")
    ep: int = option(1, Value.WHOLE, "Ranks of a stage that share its experts.", "E", label="ep")
    ulysses: int = option(1, Value.WHOLE, "Context-parallel ranks that exchange heads (Ulysses); a divisor of cp.", "N")
    cp_comm_type: str = option(
        "p2p",
        Value.TEXT,
        "How keys reach the other context-parallel ranks: p2p (ring), all_gather.",
        choices=CP_COMM_TYPES,
    )
    sequence_parallel: bool = option(False, Value.FLAG, "Sequence parallelism along tp.", label="sp")
    zero: int = option(
        0, Value.DEPTH, "What replicas share: 1 optimizer, 2 also gradients, 3 also weights.", "0-3", label="ZeRO"
    )
    recompute: str = option(
        "none", Value.TEXT, "What the backward computes again.", choices=RECOMPUTES, label="recompute"
    )
    split: Sequence[int] | None = option(
        None, Value.SPLIT, "Layers of each stage, or Megatron-LM's layout [default: equal shares].", "N,N,…"
    )
    number_bytes: int = option(2, Value.WHOLE, "Bytes of a number: 2, 4 or 8.", "N")
    parameter_bytes: Sequence[int] | None = option(
        None,
        Value.LIST,
        "Bytes of a parameter, its gradient, its optimizer [default: AdamW's, 2,4,12 of 16 bits].",
        "W,G,O",
    )
    layer_parameters: int | None = option(
        None, Value.WHOLE, "Parameters of a layer, in place of its sizes.", "N", label="layer params"
    )
    layer_activations: int | None = option(
        None, Value.WHOLE, "Bytes that a layer keeps of a sequence, with them.", "BYTES", label="layer bytes"
    )
    embedding_parameters: int | None = option(
        None, Value.WHOLE, "Parameters before the layers, with them.", "N", label="embed params"
    )
    head_parameters: int | None = option(
        None, Value.WHOLE, "Parameters behind the layers, with them.", "N", label="head params"
    )
    head_activations: int | None = option(
        None, Value.WHOLE, "Bytes that the head keeps of a sequence, with them.", "BYTES", label="head bytes"
    )
    fits: int | None = option(
        None, Value.SIZE, "Memory that a rank has, such as 80GB or 74GiB.", "BYTES", label="rank memory"
    )
    tflops: float | None = option(
        None, Value.TIMES, "TFLOP/s that a rank reaches in matrix products: predict the step.", "X", label="TFLOP/s"
    )
    link: Sequence[str] | None = option(
        None,
        Value.NAMES,
        "GB/s that a rank sends along an axis, or along all.",
        "[AXIS=]GBPS",
        label="GB/s",
        hint="of a rank along all axes, or of some: 25,tp=300",
    )


def require_either(options: EstimateOptions, spell: Spelling) -> None:
    """Refuse parts of a transformer's layer next to the numbers that stand for all of it; a file may have both."""
    given = [name for name in _PARTS if getattr(options, name) not in (None, False, ATTENTIONS[0])]
    if given and options.layer_parameters is not None:
        numbers = f"{spell('layer_parameters')} and {spell('layer_activations')}"
        raise UsageError(f"{spell(given[0])} changes nothing of a layer known by {numbers} alone; leave one out")


def require_sizes(options: EstimateOptions, spell: Spelling) -> None:
    """Refuse sizes that are missing or none."""
    for name, one in options_of(EstimateOptions).items():
        value = getattr(options, name)
        if one.takes is Value.WHOLE and value is not None:
            require_whole(spell(name), value, 1, MOST_LAYERS if name == "layers" else 2**62)
        if one.choices and value is not None and value not in one.choices:
            raise UsageError(f"{spell(name)} is {value!r}; expected one of {', '.join(one.choices)}")
    if options.layer_parameters is None and (given := [name for name in NUMBERS if getattr(options, name)]):
        raise UsageError(f"{spell(given[0])} needs {spell('layer_parameters')}: layers known by their numbers alone")
    of_layers = (*OF_TOKENS, "heads", "vocabulary") if options.layer_parameters is None else ("layer_activations",)
    for name in ("layers", *of_layers):
        if getattr(options, name) is None:
            raise UsageError(f"{spell(name)} is not given; expected it, or {spell('model')} with it")
    for name in ("experts_per_token", "expert_ffn"):
        if options.experts is None and getattr(options, name) is not None:
            raise UsageError(
                f"{spell(name)} is for {spell('experts')}, of which there are none; give some, or leave it out"
            )
    if options.experts is not None and (options.experts_per_token or 0) > options.experts:
        raise UsageError(
            f"{spell('experts_per_token')} is {options.experts_per_token} of {options.experts} {spell('experts')}; "
            "expected at most all of them"
        )
    require_whole(spell("zero"), options.zero, 0, 3)
    if options.fits is not None and options.fits < 1:
        raise UsageError(f"{spell('fits')} is {options.fits}; expected more than 0 bytes, such as 80GB")
    if options.number_bytes not in DTYPES:
        raise UsageError(f"{spell('number_bytes')} is {options.number_bytes}; expected 2, 4 or 8")
    if options.parameter_bytes is not None and len(options.parameter_bytes) != len(ParameterBytes._fields):
        raise UsageError(
            f"{spell('parameter_bytes')} has {len(options.parameter_bytes)} numbers; expected 3, such as 2,4,12"
        )
    if options.tflops is not None and options.tflops <= 0:
        raise UsageError(f"{spell('tflops')} is {options.tflops:g}; expected more than 0")
    if options.recompute == "selective" and options.layer_parameters is not None:
        raise UsageError(
            f"{spell('recompute')} is selective; of layers known by their numbers alone no part is known: give what they keep "
            f"as {spell('layer_activations')}"
        )
    if options.recompute == "full" and None in (options.hidden, options.sequence):
        raise UsageError(
            f"{spell('recompute')} is full: a layer keeps its input, b·s·h numbers; give {spell('hidden')} and "
            f"{spell('sequence')}"
        )


def require_divisible(facts: GptFacts, mesh: MeshSizes, options: EstimateOptions, spell: Spelling) -> None:
    """Refuse sizes that cannot be shared out."""
    tokens = facts.sequence // mesh.cp
    pairs = [
        ("cp", mesh.cp * (2 if mesh.cp > 1 else 1), "sequence", facts.sequence),
        ("ulysses", options.ulysses, "cp", mesh.cp),
        *([("tp", mesh.tp, "tokens of a rank of cp", tokens)] if facts.sequence_parallel or facts.experts else []),
    ]
    if facts.form.numbers is None:
        pairs += [
            *([("heads", facts.heads, "hidden", facts.hidden)] if facts.form.head_dim is None else []),
            ("tp", mesh.tp, "heads", facts.heads),
            ("kv_heads", facts.kv_heads, "heads", facts.heads),
            ("tp", mesh.tp, "ffn", facts.mlp_width),
            ("ulysses", options.ulysses, "heads of a rank of tp", facts.heads // mesh.tp),
        ]
    for name, part, what, number in pairs:
        if number % part:
            twice = " twice" if part != getattr(options, name) and name == "cp" else ""
            raise UsageError(
                f"{spell(name)} {getattr(options, name) or part}{twice} does not divide {what} {number}; choose a divisor"
            )
    _require_shared_heads(facts, mesh, spell)
    if facts.cp_comm_type == "all_gather" and mesh.cp == facts.ulysses:
        raise UsageError(
            f"{spell('cp_comm_type')} all_gather is for the ranks of cp that exchange no heads, of which there is 1; give "
            f"{spell('cp')} a larger multiple of {spell('ulysses')}"
        )
    if facts.cp_comm_type == "all_gather" and facts.ulysses > 1 and facts.zero and mesh.dp == 1:
        raise UsageError(
            f"{spell('cp_comm_type')} all_gather with {spell('ulysses')}, {spell('zero')} and one pipeline: groups of two sizes "
            f"gather along cp, which the bytes of an axis do not tell apart; leave out {spell('zero')} or {spell('ulysses')}"
        )
    if facts.experts is not None:
        check_experts(facts.experts, mesh.ep, mesh.tp, tokens)
    elif mesh.ep > 1:
        raise UsageError(f"{spell('ep')} {mesh.ep} shares experts and the model has none; say {spell('experts')}")


def _require_shared_heads(facts: GptFacts, mesh: MeshSizes, spell: Spelling) -> None:
    """Refuse heads that ranks of tp cannot share, and formulas that are not of this form."""
    if facts.kv_heads % mesh.tp and mesh.tp % facts.kv_heads:
        raise UsageError(
            f"{spell('tp')} {mesh.tp} neither divides kv_heads {facts.kv_heads} nor is a multiple of them; choose another"
        )
    if facts.form.qk_norm is QkNorm.ALL and mesh.tp > 1:
        raise UsageError(f"{spell('tp')} {mesh.tp} cuts the heads of which this model makes one norm; leave it out")
    form = replace(facts.form, width=None, gradient_bytes=None, scores_stored=False)
    is_papers = form == OF_OUR_GPT and facts.mlp_width == 4 * facts.hidden and facts.kv_heads == facts.heads
    if facts.form.scores_stored and not (is_papers and facts.experts is None):
        raise UsageError(
            f"{spell('attention')} stored takes the formulas of arXiv 2205.05198, of family gpt, an MLP of 4h, as many KV heads "
            "as heads and no experts; leave it out"
        )


def require_change(options: EstimateOptions, sizes_of_tp: Iterable[Any], spell: Spelling) -> None:
    """Refuse sequence parallelism where every tp is 1: it would change nothing."""
    name = spell("sequence_parallel")
    if options.sequence_parallel and all(tp == 1 for tp in sizes_of_tp):
        raise UsageError(
            f"{name} is for the ranks of tp, which is 1; give it 2 or more with {spell('tp')}, or leave {name} out"
        )
