"""The plan of a measured step in time: planned (mean costs, free messages) or simulated (each stage's costs, and messages), or
as the step would be after a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMMS as COMMS_SCHEMA
from pptrace.model.tables import COMPUTE_KINDS, empty_table
from pptrace.model.tables import OPS as OPS_SCHEMA
from pptrace.report.tiles.kept import Bars
from pptrace.report.tiles.measured import (
    BACK,
    COMMS,
    COMPUTE_LANE,
    OPS,
    Picture,
    Table,
    back_table,
    comms_table,
    ops_table,
)
from pptrace.report.tiles.tracks import Array, Tracks
from pptrace.schedule.actions import Kind, Phase
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay_table import replay_table
from pptrace.simulator import IDEAL, Costs, Simulation
from pptrace.timeline.windows import StepWindow

PLANNED, SIMULATED = "planned", "simulated"
CHANGED = "whatif:"
"""Begins the name of a source that is a change; its wishes follow, as in an address."""


def replayed_picture(
    source: str,
    plan: Plan,
    windows: Sequence[StepWindow],
    bars: Bars,
    mesh: MeshInfo,
) -> Picture:
    """The plan of a step in time, each pipeline from the start of its measured window on.

    Args:
        source: PLANNED: every op at the mean cost of its kind in the window, free messages. SIMULATED: at the mean cost of its
            kind and stage, and every message takes the median of what messages took for which their readers waited.
        windows: of all pipelines in the step.
        bars: what was measured, for the costs.
    """
    plan = plan.compute_only()
    table = plan.table
    position, ops = bars.layout.position, bars.measured[OPS]
    latency = bars.message_ns.get(windows[0].step, 0) if source == SIMULATED else 0
    durations = []
    for window in windows:
        at = [position[rank] for rank in window.ranks if rank in position]
        costs = _costs(ops, at, window.step, by_stage=source == SIMULATED)
        durations.append(costs.durations(plan))
    replays = replay_table(table, np.stack(durations), latency)
    parts = [
        _ops_of(plan, ranks_of(window, plan, mesh), window, replays.start[index], replays.end[index])
        for index, window in enumerate(windows)
    ]
    return _picture_of_ops(parts, position, bars.origin_ns)


def changed_picture(
    simulation: Simulation,
    windows: Sequence[StepWindow],
    position: Mapping[int, int],
    mesh: MeshInfo,
    origin_ns: int,
) -> Picture:
    """The replay of a changed step, each pipeline from the start of its measured window on."""
    ops, parts = simulation.ops(), []
    for window in windows:
        ranks = pd.Series(ranks_of(window, simulation.plan, mesh))
        times = {name: ops[name] + window.start_ns for name in ("start_ns", "end_ns")}
        parts.append(ops.assign(rank=ops["rank"].map(ranks), step=window.step, **times))
    return _picture_of_ops(parts, position, origin_ns)


def _picture_of_ops(parts: Sequence[pd.DataFrame], position: Mapping[int, int], origin_ns: int) -> Picture:
    """A picture of the ops of each pipeline, of ranks that have a row, with nothing else."""
    ops = pd.concat(parts, ignore_index=True)
    return {
        OPS: ops_table(ops[ops["rank"].isin(list(position))], position, origin_ns),
        COMMS: comms_table(empty_table(COMMS_SCHEMA), position, origin_ns),
        BACK: back_table([]),
    }


def rows_of_step(tracks: Tracks, ranks: Sequence[int], step: int, lanes: Sequence[int]) -> Array:
    """The rows of some ranks and lanes that belong to a step."""
    chosen = [track for track in tracks.tracks_of(ranks).tolist() if int(tracks.lane[track]) in lanes]
    parts = [
        first + np.flatnonzero(tracks.columns["step"][first:last] == step)
        for first, last in ((int(tracks.ptr[track]), int(tracks.ptr[track + 1])) for track in chosen)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _costs(ops: Table, ranks: Sequence[int], step: int, *, by_stage: bool) -> Costs:
    """Mean costs of a window; a kind that was not measured has its ideal proportion to the others."""
    tracks = ops.tracks
    rows = rows_of_step(tracks, ranks, step, (COMPUTE_LANE,))
    kind, stage = tracks.columns["kind"][rows].astype(np.int64), tracks.columns["stage"][rows].astype(np.int64)
    length = tracks.length[rows].astype(np.int64)
    names = ops.texts["kind"]
    measured = {Kind(names[code]): mean for code, mean in _means(kind, length).items() if names[code] in COMPUTE_KINDS}
    ideal = [known for known in measured if known in IDEAL.kinds]
    scale = sum(measured[known] for known in ideal) / sum(IDEAL.kinds[known] for known in ideal) if ideal else 1.0
    kinds = {known: round(cost * scale) for known, cost in IDEAL.kinds.items()} | measured
    if not by_stage:
        return Costs(kinds=kinds)
    num_kinds = len(names)
    of_stage = _means(stage * num_kinds + kind, length)
    stages = {(Kind(names[key % num_kinds]), key // num_kinds): mean for key, mean in of_stage.items() if key >= 0}
    return Costs(kinds=kinds, stages=stages)


def _means(group: Array, values: Array) -> dict[int, int]:
    keys, of_key = np.unique(group, return_inverse=True)
    sums, counts = np.bincount(of_key, values), np.bincount(of_key)
    return {key: round(total / count) for key, total, count in zip(keys.tolist(), sums, counts, strict=True)}


def ranks_of(window: StepWindow, plan: Plan, mesh: MeshInfo) -> tuple[int, ...]:
    """The global ranks of a window's pipeline; where it has other lengths than the plan, those of the plan."""
    ranks = mesh.pipeline_of(window.ranks[0])
    return ranks if len(ranks) == plan.pp else tuple(range(plan.pp))


def _ops_of(plan: Plan, ranks: Sequence[int], window: StepWindow, start: Array, end: Array) -> pd.DataFrame:
    table = plan.table
    pairs = np.full(len(table), "", dtype=object)
    if (table.second_kind >= 0).any():
        actions = [action for rank in range(plan.pp) for action in plan.compute_actions(rank)]
        pairs[:] = [str(action) if action.parts else "" for action in actions]
    columns = {
        "rank": np.array(ranks, dtype=np.int64)[table.rank],
        "step": np.full(len(table), window.step, dtype=np.int64),
        "kind": _texts(tuple(map(str, Kind)), table.kind),
        "stage": table.stage,
        "chunk": table.chunk,
        "microbatch": table.microbatch,
        "phase": _texts(tuple(map(str, Phase)), table.phase),
        "start_ns": start + window.start_ns,
        "end_ns": end + window.start_ns,
        "clock": "",
        "source": "simulated",
        "pair": pairs,
    }
    runs = start >= 0
    return pd.DataFrame({name: columns[name] for name in OPS_SCHEMA})[runs]


def _texts(names: Sequence[str], codes: Array) -> Array:
    """Texts of codes; "" of a negative one."""
    return np.array([*names, ""], dtype=object)[codes]
