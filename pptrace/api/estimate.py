"""Estimates of a model on a mesh before it runs: memory, FLOPs and bytes sent, and how long a step would take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from pptrace.api.copies import CopiedTable
from pptrace.api.estimate_options import (
    DTYPES,
    NUMBERS,
    OF_TOKENS,
    EstimateOptions,
    require_change,
    require_divisible,
    require_either,
    require_sizes,
)
from pptrace.api.files import ExportsJson, FilePath, text_or_file
from pptrace.api.model_file import ModelFile, model_of, read_model
from pptrace.api.options import require_number, takes_options
from pptrace.api.simulate import Spelling
from pptrace.errors import UsageError
from pptrace.schedule import registry
from pptrace.schedule.layout import fits
from pptrace.schedule.plan import Plan
from pptrace.simulator.estimated_step import EstimatedStep, Speeds, estimated_step
from pptrace.sizes.estimate import Estimate, ParameterBytes
from pptrace.sizes.expert_options import ExpertOptions, Scoring, Shared
from pptrace.sizes.form import LayerNumbers, ModelForm
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.mesh import MeshSizes

if TYPE_CHECKING:
    import pandas as pd

_AXES = ("pp", "tp", "cp", "dp", "ep")
_SAME_LINKS = {"cp": ("dp-cp",), "dp": ("dp-cp", "edp"), "ep": ("etp",), "pp": ("embd", "mirror")}
"""Axes whose calls take the links of another one, where no speed of theirs is given."""


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
        from pptrace.report.columns import as_csv
        from pptrace.report.estimate.columns import rank_columns

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
    require_either(options, spell)
    options, model = _with_file(options, spell)
    require_sizes(options, spell)
    mesh = MeshSizes(options.pp, options.dp, options.cp, options.tp, ep=options.ep)
    if options.microbatches is None:
        raise UsageError(f"{spell('microbatches')} is not given; expected the microbatches of one pipeline in a step")
    plan = _plan(options.schedule, options.pp, options.microbatches, options.chunks, options.group_size)
    facts = _facts(options, model, plan, spell)
    require_divisible(facts, mesh, options, spell)
    given = options.parameter_bytes
    each = ParameterBytes.of_adam(options.number_bytes) if given is None else ParameterBytes(*given)
    links = _links(options.link, spell)
    speeds = None if options.tflops is None else Speeds(options.tflops * 1e3, links)
    missing = tuple(name for name in OF_TOKENS if getattr(options, name) is None)
    axes = dict.fromkeys(text.rpartition("=")[0] for text in _texts(options.link))
    return EstimatedRun(
        Estimate(facts, mesh, plan, each, missing, model.notes),
        options.fits,
        speeds,
        links,
        tuple(axis for axis in axes if axis),
    )


_plan = lru_cache(64)(registry.build)


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
        dtype=DTYPES[options.number_bytes],
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
        numbers = LayerNumbers(*(getattr(options, name) or 0 for name in NUMBERS))
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
