"""Traces → ops and comms of all ranks, with the mesh and the schedule behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pptrace.recognise.devices import DeviceWork, device_work
from pptrace.recognise.from_labels import tables_from_labels, with_peers, with_stages
from pptrace.recognise.from_marks import tables_from_marks
from pptrace.recognise.matching import match_comms
from pptrace.recognise.mesh import MeshInfo, mesh_from_metadata, mesh_from_stages, mesh_in_order
from pptrace.recognise.schedule import COMPUTE_KINDS, ScheduleInfo, recognise_schedule
from pptrace.tables import COMMS, OPS, Trace, empty_table


@dataclass(frozen=True, slots=True)
class Recognised:
    """What the traces hold, each rank still on its own clock.

    ``work`` is each rank's device work; ``facts`` what each rank's recorder wrote about itself ({} for others' traces).
    """

    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: Mapping[int, DeviceWork]
    mesh: MeshInfo
    schedule: ScheduleInfo
    facts: Mapping[int, Mapping[str, Any]]
    warnings: tuple[str, ...]


def recognise(traces: Sequence[Trace], schedule: str | None = None, num_ranks: int | None = None) -> Recognised:
    """Find the ops, the communication, the mesh and the schedule of a run.

    Args:
        traces: one per rank, each with its rank set.
        schedule: the name of the schedule to compare with, instead of the one that is found.
        num_ranks: the ranks that the run had, when known; more than ``traces`` when some have none.

    Raises:
        UsageError, ScheduleError: ``schedule`` is unknown or does not fit the run.
    """
    ops: list[pd.DataFrame] = []
    comms: list[pd.DataFrame] = []
    memory: list[pd.DataFrame] = []
    work: dict[int, DeviceWork] = {}
    warnings: list[str] = []
    facts: dict[int, Mapping[str, Any]] = {}
    frameworks: set[str] = set()
    for trace in traces:
        assert trace.rank is not None
        rank = trace.rank
        facts[rank] = trace.metadata
        work[rank] = device_work(trace.events)
        if not trace.memory.empty:
            memory.append(trace.memory.assign(rank=rank))
        marked = tables_from_marks(trace, rank, work[rank])
        labelled = tables_from_labels(trace, rank, work[rank]) if marked is None else None
        if labelled is not None:
            frameworks.add(labelled.framework)
        elif marked is not None:
            frameworks.add("pptrace")
        if (tables := marked or labelled) is not None:
            ops.append(tables.ops)
            comms.append(tables.comms)
            warnings += tables.warnings
    all_ops, all_comms = _concat(ops, OPS), _concat(comms, COMMS)
    warnings += _inferences(all_ops)
    metadata = list(facts.values())
    mesh = _mesh(metadata, all_ops, num_ranks or len(traces))
    all_ops, all_comms = with_stages(all_ops, mesh), with_stages(all_comms, mesh)
    all_comms = with_peers(all_comms, all_ops, mesh)
    found = recognise_schedule(all_ops, mesh, metadata, schedule)
    return Recognised(
        framework=min(frameworks, default="unlabelled"),
        ops=all_ops,
        comms=match_comms(all_comms, mesh),
        memory=pd.concat(memory, ignore_index=True) if memory else pd.DataFrame(),
        work=work,
        mesh=mesh,
        schedule=found,
        facts=facts,
        warnings=(*warnings, *found.warnings),
    )


def _inferences(ops: pd.DataFrame) -> list[str]:
    """What no label says and order had to, with what it was taken from."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    told = []
    if (compute["source"] == "inferred").any():
        told.append(
            "no labels of ops: forwards, backwards and microbatches are inferred from the order of operators, autograd's "
            "engine and messages on each rank's thread, with one stage per rank"
        )
    if len(compute) and (compute["stage"] < 0).all():
        told.append("no label tells the stages: the ranks are taken as one pipeline in their order")
    return told


def _concat(tables: list[pd.DataFrame], schema: Mapping[str, str]) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True) if tables else empty_table(schema)


def _mesh(metadata: Sequence[Mapping[str, Any]], ops: pd.DataFrame, num_ranks: int) -> MeshInfo:
    """The mesh of the facts, else that of the ops; where the facts name no pipelines, those of the ops."""
    told = mesh_from_metadata(metadata, num_ranks)
    if told is None:
        return _mesh_of_ops(ops, num_ranks)
    return told if told.pipelines else replace(told, pipelines=_mesh_of_ops(ops, num_ranks).pipelines)


def _mesh_of_ops(ops: pd.DataFrame, num_ranks: int) -> MeshInfo:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    if len(compute) and (compute["stage"] < 0).all():
        return mesh_in_order(sorted(compute["rank"].unique().tolist()), num_ranks)
    stages = {
        rank: frozenset(compute.loc[compute["rank"] == rank, "stage"].tolist())
        for rank in compute["rank"].unique().tolist()
    }
    return mesh_from_stages(stages, num_ranks)
