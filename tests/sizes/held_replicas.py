"""Memory that two replicas hold of a model and its optimizer after a step. Functions here are called in worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.data.text import TextData
from instrument.mesh import fit_shape, make_mesh
from instrument.models.gpt_config import GptConfig
from instrument.models.gpt_pipeline import GptPipeline, Wiring, make_gpt_runtime
from instrument.optim.main_parameters import Zero, make_adamw
from instrument.pipeline.partition import partition
from instrument.recorder import Recorder
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build
from pptrace.sizes.expert_options import ExpertOptions

MICROBATCH, SEQUENCE, MICROBATCHES = 2, 16, 4


@dataclass(frozen=True, slots=True)
class Sharded:
    """A way to train."""

    zero: Zero
    dtype: str
    experts: ExpertOptions | None = None
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of the model's parameters, and of what the optimizer has besides them."""

    weights: int
    optimizer: int


def hold(cases: Sequence[Sharded]) -> list[Held]:
    """Every case on two replicas."""
    held = []
    for case in cases:
        mesh = make_mesh(fit_shape(2, 1, 2, ep=case.ep), "cpu", "gloo", experts=case.experts is not None)
        config = GptConfig(2, 32, 4, SEQUENCE, dtype=getattr(torch, case.dtype), experts=case.experts)
        plan = lower(build("1f1b", 1, MICROBATCHES))
        gpt = GptPipeline(plan, config, partition(2, 1), MICROBATCH)
        runtime = make_gpt_runtime(mesh, gpt, Wiring(torch.device("cpu"), zero=case.zero), Recorder())
        optimizer = make_adamw(runtime.program.parameters(), runtime.gradients.main, 1e-3)
        runtime.run(TextData(MICROBATCHES, MICROBATCH, SEQUENCE).batch(0, mesh.dp_rank), 0)
        runtime.optimize(optimizer, 0)
        weights = storages(runtime.program.parameters())
        held.append(
            Held(
                sum(weights.values()),
                sum((storages([*optimizer.parameters, *optimizer.moments]) | weights).values()) - sum(weights.values()),
            )
        )
    return held


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage; of a DTensor those of its shard."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in local}
