"""Estimates of a model on a mesh before it runs: memory, FLOPs and bytes sent, and how long a step would take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from pptrace.api.copies import CopiedTable
from pptrace.api.files import ExportsJson, FilePath, text_or_file
from pptrace.api.model_file import FAMILIES, ModelFile, model_of, read_model
from pptrace.api.options import Value, argument, option, options_of, require_number, require_whole, same, takes_options
from pptrace.api.simulate import SimulateOptions, Spelling
from pptrace.errors import UsageError
from pptrace.schedule import registry
from pptrace.schedule.layout import fits
from pptrace.schedule.plan import Plan
from pptrace.simulator.estimated_step import EstimatedStep, Speeds, estimated_step
from pptrace.sizes.estimate import Estimate, ParameterBytes
from pptrace.sizes.expert_options import ExpertOptions, Scoring, Shared, check_experts
from pptrace.sizes.form import OF_OUR_GPT, LayerNumbers, ModelForm, QkNorm
from pptrace.sizes.gpt_facts import ITEM_BYTES, GptFacts
from pptrace.sizes.mesh import MeshSizes

if TYPE_CHECKING:
    import pandas as pd

MOST_LAYERS = 10_000
RECOMPUTES = ("none", "selective", "full")
ATTENTIONS = ("fused", "stored")
CP_COMM_TYPES = ("p2p", "all_gather")
_DTYPES = {num_bytes: name for name, num_bytes in ITEM_BYTES.items()}
_STEP = options_of(SimulateOptions)
_OF_TOKENS = ("hidden", "sequence")
"""Sizes that layers by their numbers alone do not need: without them less is known."""
_AXES = ("pp", "tp", "cp", "dp", "ep")
_SAME_LINKS = {"cp": ("dp-cp",), "dp": ("dp-cp", "edp"), "ep": ("etp",), "pp": ("embd", "mirror")}
"""Axes whose calls take the links of another one, where no speed of theirs is given."""
_NUMBERS = ("layer_parameters", "layer_activations", "embedding_parameters", "head_parameters", "head_activations")

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


@dataclass(frozen=True, eq=False)
class EstimatedRun(ExportsJson):
    """Result of :func:`estimate`. ``limit_bytes`` is what a rank has; ``step`` is None where no speed is given,
    or hidden or sequence is not.
    """

    estimate: Estimate
    limit_bytes: int | None
    speeds: Speeds | None
    link_speeds: Mapping[str, float]
    linked_axes: tuple[str, ...] = ()
    """Axes that a speed of links is given for, besides that of all."""

    @property
    def unused_links(self) -> list[str]:
        """Axes of them along which nothing is sent: they have one rank."""
        sent = {axis for rank in self.estimate.ranks for axis, _ in rank.volume}
        return [axis for axis in self.linked_axes if not sent & {axis, *_SAME_LINKS.get(axis, ())}]

    @cached_property
    def step(self) -> EstimatedStep | None:
        """The predicted step; None where the sizes do not tell how long ops or messages take."""
        is_unknown = self.estimate.tokens is None or (self.estimate.missing and self.link_speeds)
        return None if self.speeds is None or is_unknown else estimated_step(self.estimate, self.speeds)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that needs most."""
        return self.estimate.peak_bytes

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each once."""
        return self.estimate.num_parameters

    @property
    def step_ns(self) -> int | None:
        """Time of a step, ns; None where no speed is given."""
        return None if self.step is None else self.step.step_ns

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all pipelines in a second; None where no speed is given."""
        tokens = self.estimate.tokens
        return None if self.step_ns is None or tokens is None else tokens / self.step_ns * 1e9

    @CopiedTable
    def ranks(self) -> pd.DataFrame:
        """One row per pipeline rank, with the columns of ``--csv``."""
        import pandas as pd

        from pptrace.report.estimate.columns import rank_columns

        return pd.DataFrame(rank_columns(self.estimate))

    @CopiedTable
    def communication(self) -> pd.DataFrame:
        """One row per pipeline rank, axis and kind of call: ``calls``, ``bytes`` as marks count them, ``wire_bytes`` as rings
        send them and ``ms`` at the given speed.
        """
        import pandas as pd

        from pptrace.report.estimate.columns import communication_columns

        return pd.DataFrame(communication_columns(self.estimate, self.link_speeds))

    def _json_object(self) -> dict[str, Any]:
        from pptrace.report.estimate.columns import estimate_object

        return estimate_object(
            self.estimate,
            self.link_speeds,
            self.limit_bytes,
            self.step,
            None if self.speeds is None else self.speeds.flops_per_ns,
        )

    @overload
    def to_csv(self, path: None = None) -> str: ...
    @overload
    def to_csv(self, path: FilePath) -> None: ...
    def to_csv(self, path: FilePath | None = None) -> str | None:
        """The table of ranks as CSV, as text or written to a file.

        Raises:
            PptraceError: the file cannot be written.
        """
        from pptrace.report.estimate.columns import as_csv, rank_columns

        return text_or_file(as_csv(rank_columns(self.estimate)), path)

    def __repr__(self) -> str:
        plan = self.estimate.plan
        return f"<pptrace.EstimatedRun: {plan.name}, pp={plan.pp}, {self.peak_bytes / 1e9:.1f} GB on the fullest rank>"


@takes_options(EstimateOptions)
def estimate(options: EstimateOptions) -> EstimatedRun:
    """Estimate memory, FLOPs and communication of a step from sizes alone: what ``pptrace estimate`` shows.

        >>> import pptrace
        >>> sizes = dict(layers=24, hidden=1024, heads=16, sequence=2048, vocabulary=50304, tied=True)
        >>> run = pptrace.estimate("1f1b", pp=4, microbatches=8, microbatch_size=2, **sizes)
        >>> run.ranks.parameters.tolist()
        [129185792, 75577344, 75577344, 127090688]

    Raises:
        PptraceError: a size is missing, or sizes do not divide; the message is one line.
    """
    return estimate_as(options)


def estimate_as(options: EstimateOptions, spell: Spelling = str) -> EstimatedRun:
    """:func:`estimate`, with the names of arguments in messages as ``spell`` has them."""
    run = estimate_of(options, spell)
    require_change(options, [options.tp], spell)
    return run


def estimate_of(options: EstimateOptions, spell: Spelling = str) -> EstimatedRun:
    """The same, also with options that change nothing on this mesh, as one of several has them."""
    _require_either(options, spell)
    options, model = _with_file(options, spell)
    _require_sizes(options, spell)
    mesh = MeshSizes(options.pp, options.tp, options.cp, options.dp, options.ep)
    if options.microbatches is None:
        raise UsageError(f"{spell('microbatches')} is not given; expected the microbatches of one pipeline in a step")
    plan = _plan(options.schedule, options.pp, options.microbatches, options.chunks, options.group_size)
    facts = _facts(options, model, plan, spell)
    _require_divisible(facts, mesh, options, spell)
    given = options.parameter_bytes
    each = ParameterBytes.of_adam(options.number_bytes) if given is None else ParameterBytes(*given)
    links = _links(options.link, spell)
    speeds = None if options.tflops is None else Speeds(options.tflops * 1e3, links)
    missing = tuple(name for name in _OF_TOKENS if getattr(options, name) is None)
    axes = dict.fromkeys(text.rpartition("=")[0] for text in _texts(options.link))
    return EstimatedRun(
        Estimate(facts, mesh, plan, each, missing, model.notes),
        options.fits,
        speeds,
        links,
        tuple(axis for axis in axes if axis),
    )


@lru_cache(64)
def _plan(schedule: str, *sizes: Any) -> Plan:
    return registry.build(schedule, *sizes)


def _with_file(options: EstimateOptions, spell: Spelling) -> tuple[EstimateOptions, ModelFile]:
    """The options, with the sizes of a file where they are not given, and the model of the file."""
    if options.model is None:
        return options, model_of(options.family)
    model = read_model(Path(os.fspath(options.model)), options.family)
    missing = {
        name: value
        for name, value in model.sizes.items()
        if getattr(options, name) is None or getattr(options, name) is False
    }
    options = replace(options, **missing)
    if options.layer_parameters is None:
        model.require_counted()
        if not model.is_known and options.family is None:
            what = f"its model_type {model.kind} is not known" if model.kind else "has no model_type"
            raise UsageError(f"{options.model}: {what}; say {spell('family')}, gpt or llama")
        for name, of_file in model.required.items():
            if getattr(options, name) is None:
                raise UsageError(f"{options.model}: has no {of_file}; give {spell(name)}")
    return options, model


def _require_either(options: EstimateOptions, spell: Spelling) -> None:
    """Refuse parts of a transformer's layer next to the numbers that stand for all of it; a file may have both."""
    given = [name for name in _PARTS if getattr(options, name) not in (None, False, ATTENTIONS[0])]
    if given and options.layer_parameters is not None:
        numbers = f"{spell('layer_parameters')} and {spell('layer_activations')}"
        raise UsageError(f"{spell(given[0])} changes nothing of a layer known by {numbers} alone; leave one out")


def _require_sizes(options: EstimateOptions, spell: Spelling) -> None:
    """Refuse sizes that are missing or none."""
    for name, one in options_of(EstimateOptions).items():
        value = getattr(options, name)
        if one.takes is Value.WHOLE and value is not None:
            require_whole(spell(name), value, 1, MOST_LAYERS if name == "layers" else 2**62)
        if one.choices and value is not None and value not in one.choices:
            raise UsageError(f"{spell(name)} is {value!r}; expected one of {', '.join(one.choices)}")
    if options.layer_parameters is None and (given := [name for name in _NUMBERS if getattr(options, name)]):
        raise UsageError(f"{spell(given[0])} needs {spell('layer_parameters')}: layers known by their numbers alone")
    of_layers = (*_OF_TOKENS, "heads", "vocabulary") if options.layer_parameters is None else ("layer_activations",)
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
    if options.number_bytes not in _DTYPES:
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


def _facts(options: EstimateOptions, model: ModelFile, plan: Plan, spell: Spelling) -> GptFacts:
    heads, layers = options.heads or 1, options.layers
    hidden, sequence = options.hidden or options.tp, options.sequence or 2 * options.cp * options.tp
    assert layers is not None
    form = _form(options, model, layers)
    return GptFacts(
        hidden=hidden,
        heads=heads,
        kv_heads=heads if form.latent is not None else options.kv_heads or heads,
        sequence=sequence,
        microbatch_size=options.microbatch_size,
        vocabulary=options.vocabulary or options.tp,
        dtype=_DTYPES[options.number_bytes],
        tied=options.tied,
        layers_per_stage=_layers(options.split, layers, plan.chain_length, spell),
        sequence_parallel=options.sequence_parallel,
        overlap=False,
        ulysses=options.ulysses,
        cp_comm_type=options.cp_comm_type,
        recompute=options.recompute,
        recompute_microbatches_beyond=None,
        zero=options.zero,
        bucket_bytes=2**62,
        clip_grad=0.0,
        optimizer_sync="synchronous",
        steps=3,
        experts=_experts(options, model),
        form=form,
        num_positions=None if model.num_positions is None else max(model.num_positions, sequence),
        dropout=float(options.dropout),
        attention_kernel="flash",
    )


def _form(options: EstimateOptions, model: ModelFile, layers: int) -> ModelForm:
    """The form of the layers, or their numbers."""
    gradient_bytes = None if options.parameter_bytes is None else options.parameter_bytes[1]
    if options.layer_parameters is not None:
        numbers = LayerNumbers(*(getattr(options, name) or 0 for name in _NUMBERS))
        return ModelForm(options.ffn, gradient_bytes, numbers=numbers)
    is_stored = options.attention == "stored"
    form = model.form(layers)
    return replace(form, width=options.ffn, gradient_bytes=gradient_bytes, scores_stored=is_stored)


def _experts(options: EstimateOptions, model: ModelFile) -> ExpertOptions | None:
    """The experts of a layer that has some; None where no layer has."""
    if options.experts is None:
        return None
    per_token = min(options.experts_per_token or 2, options.experts)
    scoring = Scoring.SOFTMAX_AFTER if per_token > 1 else Scoring.SOFTMAX_BEFORE
    width = options.expert_ffn or options.ffn
    shared_width = model.shared_width(width or 4 * (options.hidden or 1))
    shared = model.shared if shared_width else Shared.ADDED
    return ExpertOptions(
        options.experts, per_token, width=width, shared_width=shared_width, scoring=scoring, shared=shared
    )


def _layers(split: Sequence[int] | None, layers: int, stages: int, spell: Spelling) -> tuple[int, ...]:
    """Layers of each stage; the first stages take one more where they do not divide."""
    if split is None:
        share, rest = divmod(layers, stages)
        if not share:
            raise UsageError(f"{stages} stages need at least {stages} layers and the model has {layers}")
        return tuple(share + (stage < rest) for stage in range(stages))
    if len(split) != stages or sum(split) != layers or not fits(split):
        given = ",".join(map(str, split))
        raise UsageError(
            f"{spell('split')} {given} has {len(split)} stages and {sum(split)} layers; expected {stages} and {layers}, "
            "and none without a layer but the first and the last"
        )
    return tuple(split)


def _require_divisible(facts: GptFacts, mesh: MeshSizes, options: EstimateOptions, spell: Spelling) -> None:
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


def _texts(given: Sequence[str] | None) -> list[str]:
    """The speeds of links as texts."""
    return [given] if isinstance(given, str) else list(map(str, given or ()))


def _links(given: Sequence[str] | None, spell: Spelling) -> dict[str, float]:
    """Bytes per ns of each axis: as given for it, else for the axis whose links it takes, else for all."""
    of_axis: dict[str, float] = {}
    for text in _texts(given):
        axis, _, number = text.rpartition("=")
        try:
            speed = float(number)
        except ValueError:
            speed = 0.0
        if axis not in ("", *_AXES) or not speed > 0:
            raise UsageError(
                f"{spell('link')} {text}: expected GB/s above 0, such as 25, or of an axis, tp=300 ({', '.join(_AXES)})"
            )
        if axis in of_axis:
            raise UsageError(f"{spell('link')} gives the speed of {axis or 'all axes'} twice; give it once")
        require_number(spell("link"), speed, "GB/s", 1e6)
        of_axis[axis] = speed
    everywhere = of_axis.pop("", None)
    speeds: dict[str, float] = {}
    for axis, speed in [*((axis, everywhere) for axis in _AXES if everywhere), *of_axis.items()]:
        speeds |= dict.fromkeys((axis, *_SAME_LINKS.get(axis, ())), speed)
    return speeds
