"""The ops of each step of each pipeline, rank by rank in the order of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS


@dataclass(frozen=True, slots=True)
class Op:
    index: int
    kind: str
    stage: int
    microbatch: int
    pair: str


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One step of one pipeline: by global rank the ops in time order."""

    pipeline: tuple[int, ...]
    step: int
    rows: Mapping[int, list[Op]]

    def num_ops(self) -> int:
        return sum(map(len, self.rows.values()))

    def kinds(self) -> dict[int, list[str]]:
        """The kinds of ops of each rank, by its place in the pipeline."""
        return {self.pipeline.index(rank): [op.kind for op in row] for rank, row in self.rows.items()}


def steps_of(ops: pd.DataFrame, mesh: MeshInfo) -> list[PipelineStep]:
    """Every step of every pipeline."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    columns = (compute[name].tolist() for name in ("step", "rank", "kind", "stage", "microbatch", "pair"))
    rows_by_step: dict[tuple[tuple[int, ...], int], dict[int, list[Op]]] = {}
    pipelines = {rank: pipeline for pipeline in mesh.pipelines for rank in pipeline}
    for index, step, rank, *fields in zip(compute.index.tolist(), *columns, strict=True):
        if rank in pipelines:
            rows_by_step.setdefault((pipelines[rank], step), {}).setdefault(rank, []).append(Op(index, *fields))
    return [PipelineStep(pipeline, step, rows) for (pipeline, step), rows in rows_by_step.items()]


def kinds_by_pp_rank(ops: pd.DataFrame, mesh: MeshInfo) -> dict[int, list[str]]:
    """The kinds of ops of each rank of a pipeline in its most complete step, by the rank's place."""
    steps = steps_of(ops, mesh)
    return max(steps, key=PipelineStep.num_ops).kinds() if steps else {}
