"""Small runs of the GPT, as their facts tell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from instrument.mesh import MeshShape
from instrument.models.gpt_config import GptConfig
from pptrace.schedule.registry import build
from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.step import StepVolume
from pptrace.sizes.transformer import Volume


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
    return replace(plain, **changes)


def facts_of_model(config: GptConfig, microbatch_size: int, **changes: object) -> GptFacts:
    """Facts of runs of a model."""
    same = ("hidden", "heads", "sequence", "tied", "dropout", "experts", "vocabulary", "vocabulary_multiple")
    of_parts = ("recompute_num_layers", "encoder_layers", "encoder_sequence")
    return facts(
        **{name: getattr(config, name) for name in (*same, *of_parts)},
        kv_heads=config.num_kv_heads,
        microbatch_size=microbatch_size,
        dtype=str(config.dtype).removeprefix("torch."),
        recompute=str(config.recompute),
        recompute_method=str(config.recompute_method),
        recompute_modules=tuple(map(str, config.recompute_modules)),
        **changes,
    )


def step_of(facts: GptFacts, mesh: MeshShape, schedule: str = "1f1b", microbatches: int = 4) -> list[Volume]:
    predicted = StepVolume(facts, mesh, build(schedule, mesh.pp, microbatches))
    return [predicted.of_rank(rank, step=3) for rank in range(mesh.world)]


def facts_of_run(options: ExpertOptions, mesh: Mapping[str, object], **changes: object) -> dict[str, object]:
    """The facts of a trace of a run with experts, in one stage; of the others what ``changes`` tells."""
    model = facts(experts=options, **changes).as_json() | {"layers_per_stage": [4]}
    return {"model": model, "mesh": {"pp": 1, "cp": 1, "tp": 1, "etp": 1, "order": "tp-cp-dp-pp", **mesh}}
