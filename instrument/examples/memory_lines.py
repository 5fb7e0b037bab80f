"""The lines of ``train_gpt.py --memory``: what a rank keeps in a step, and what is predicted of it.

The prediction is that of a trace (:mod:`pptrace.sizes.memory`), of experts with the rows of the step that was
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instrument.data.text import Batch
from instrument.examples.gpt_settings import Settings
from instrument.mesh import Mesh
from instrument.models.rank_form import RankForm
from instrument.optim.main_parameters import Zero
from instrument.pipeline.memory import MemoryUse, measure
from instrument.pipeline.runtime import PipelineRuntime
from pptrace.sizes.activations import PAPER, ActivationSizes
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.predicted import routes_of
from pptrace.sizes.step import StepVolume


@dataclass(frozen=True, slots=True)
class AtPeak:
    """Bytes of layers, of embeddings and heads, and of layers by the paper's formula, of all forwards in flight together."""

    layers_bytes: int
    ends_bytes: int
    paper_bytes: int
    num_layers: int

    @classmethod
    def of(cls, sizes: ActivationSizes, forwards: Sequence[tuple[int, bool]]) -> AtPeak:
        """Sums over the forwards in flight, each given as (stage of the model, whether it recomputes fully)."""
        last = len(sizes.facts.layers_per_stage) - 1
        layers = [how for stage, fully in forwards for how in sizes.facts.recompute_of(stage, fully=fully)]
        return cls(
            sum(map(sizes.layer, layers)),
            sum(sizes.ends(stage == 0, stage == last) for stage, _ in forwards),
            sum(map(sizes.paper_layer, layers)),
            len(layers),
        )


def memory_lines(
    runtime: PipelineRuntime, batch: Batch, step: int, settings: Settings, mesh: Mesh, facts: GptFacts
) -> str:
    """Two lines on this rank: measured in a step that trains nothing, and predicted. Every rank of the mesh calls it.

    Args:
        step: its number in the ranges, used by no other step.
        facts: of the model and how it is trained.
    """
    use = measure(runtime, batch, step)
    volume = StepVolume(facts, settings.shape, settings.plan, routes_of(mesh.rank, use.routes))
    prediction = MemoryPrediction(volume, on_device=settings.wiring.device.type == "cuda")
    form = RankForm.of(settings.model, facts.microbatch_size, settings.shape, settings.wiring.parallel)
    kernel = facts.attention_kernel
    attention = form.attention if kernel is None else f"{form.attention}, {kernel} kernel"
    most = None
    if facts.experts is None and not facts.encoder_layers:
        most = AtPeak.of(prediction.sizes, prediction.forwards_at_peak(mesh.rank))
    words = [f"memory   rank {mesh.rank}", _predicted(prediction, mesh.rank, use, most, attention)]
    if most is not None:
        words.append(_by_the_paper(most, use))
    if settings.wiring.zero >= Zero.GRADIENTS:
        words.append("without gathered parameters and their gradients")
    return f"{_measured_line(mesh, use)}\n{'   '.join(words)}"


def _measured_line(mesh: Mesh, use: MemoryUse) -> str:
    """One line: planned and measured memory of one rank."""
    words = [
        f"memory   rank {mesh.rank}",
        f"in flight {use.in_flight} (planned {use.planned.in_flight})",
        f"deferred W {use.deferred_weight_grads} (planned {use.planned.deferred_weight_grads})",
        f"activations {use.peak_bytes / 2**20:,.2f} MiB at most",
        f"{use.bytes_per_microbatch / 2**20:,.3f} MiB for each in flight",
    ]
    if use.allocator_bytes is not None:
        words.append(f"allocator {use.allocator_bytes / 2**20:,.2f} MiB with gradients and temporaries")
    return "   ".join(words)


def _predicted(prediction: MemoryPrediction, rank: int, use: MemoryUse, most: AtPeak | None, attention: str) -> str:
    """Predicted memory of a rank, to compare with the measured one, which includes messages in transit.

    Args:
        most: of its forwards along the plan, None with experts.
    """
    parts = prediction.of_rank(rank)
    if parts.activations is None:
        return f"predicted nothing, because {prediction.reason} ({attention})"
    with_work, without = (" with what W reads", "without it ") if use.planned.deferred_weight_grads else ("", "")
    total = f"predicted {_mib(parts.activations, use)} MiB for each in flight{with_work}"
    if most is None:
        return f"{total}, by the rows of experts in this step ({attention})"
    layers, ends = _mib(most.layers_bytes, use), _mib(most.ends_bytes, use)
    of_layer = f"{most.layers_bytes / max(most.num_layers, 1) / 2**20:,.3f}"
    return f"{total}: {without}layers {layers} ({of_layer} a layer), embedding and head {ends} ({attention})"


def _by_the_paper(most: AtPeak, use: MemoryUse) -> str:
    of_layer = f"{most.paper_bytes / max(most.num_layers, 1) / 2**20:,.3f}"
    layers = _mib(most.paper_bytes, use)
    return f"{PAPER}: layers {layers} ({of_layer} a layer; 16 bit, dropout masks, scores stored)"


def _mib(num_bytes: int, use: MemoryUse) -> str:
    """MiB for each microbatch in flight."""
    return f"{num_bytes / use.in_flight / 2**20:,.3f}"
