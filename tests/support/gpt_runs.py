"""Small runs of the GPT, as their facts tell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from pptrace.analysis.volume.gpt_facts import GptFacts
from pptrace.analysis.volume.step import StepVolume
from pptrace.analysis.volume.transformer import Volume
from pptrace.model.mesh import MeshInfo
from pptrace.schedule.registry import build


def facts(**changes: object) -> GptFacts:
    plain = GptFacts(
        hidden=32,
        heads=4,
        kv_heads=4,
        sequence=16,
        microbatch_size=2,
        vocabulary=256,
        dtype="float32",
        tied=False,
        layers_per_stage=(4,),
        sequence_parallel=False,
        overlap=False,
        ulysses=1,
        recompute="none",
        recompute_microbatches_beyond=None,
        zero=0,
        bucket_bytes=25 * 2**20,
        clip_grad=0.0,
        optimizer_sync="synchronous",
        steps=10,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def mesh(pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> MeshInfo:
    inner = dp * cp * tp
    pipelines = tuple(tuple(first + inner * stage for stage in range(pp)) for first in range(inner))
    return MeshInfo(pp * inner, pp, 1, tp, cp, dp, 1, pipelines=pipelines)


def step_of(facts: GptFacts, mesh: MeshInfo, schedule: str = "1f1b", microbatches: int = 4) -> list[Volume]:
    predicted = StepVolume(facts, mesh, build(schedule, mesh.pp or 1, microbatches))
    return [predicted.of_rank(rank, step=3) for rank in range(mesh.num_ranks)]


def facts_of_run(**changes: object) -> Mapping[str, object]:
    return {"name": "gpt"} | asdict(facts()) | {"layers_per_stage": [4]} | changes
