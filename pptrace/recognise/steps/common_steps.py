"""Steps common to all ranks: numbers for ranks whose steps have none, and the steps that all ranks recorded.

Captures of graphs are no steps, and what repeats is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.marks import P2P
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import COMPUTE_KINDS, MESSAGES, What
from pptrace.model.wording import as_ranges, counted, listed
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.repeats.loop import without_steps
from pptrace.slices import rows_among


def with_common_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Number the steps of ranks without step ranges like those of the others; with a warning.

    A rank without step ranges (recorded without pptrace's launcher, say) is taken in order where it has as many steps as every
    rank that has ranges; where it has more or fewer, which they are is unknown, and its numbers stay.
    """
    numbers = {recognised.number: _steps_with_ops(recognised) for recognised in ranks}
    with_ranges = [recognised for recognised in ranks if numbers[recognised.number] and _has_ranges(recognised)]
    step_lists = {tuple(numbers[recognised.number]) for recognised in with_ranges}
    if len(step_lists) != 1:
        return list(ranks), ()
    (steps,) = step_lists
    counted = {
        recognised.number
        for recognised in ranks
        if not _has_ranges(recognised) and numbers[recognised.number] == list(range(len(steps))) != list(steps)
    }
    if not counted:
        return list(ranks), ()
    line = (
        f"the steps of rank {listed(sorted(counted))} have no numbers: assumed to be steps {steps[0]} to {steps[-1]} of the "
        "other ranks, in order"
    )

    def renamed(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(step=table["step"].map(lambda step: names.get(step, -1)).astype("int64"))

    names = dict(enumerate(steps))
    return [
        replace(recognised, ops=renamed(recognised.ops), comms=renamed(recognised.comms))
        if recognised.number in counted
        else recognised
        for recognised in ranks
    ], (line,)


def with_recorded_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Keep only the steps that all ranks recorded; with a warning where that drops any.

    Ranks of one run recorded different ones where a profiler of the script ran on some of them. In a step that some did not
    record, ranks cannot be compared. Where no step was recorded by all, every rank keeps its own.
    """
    recorded = {recognised.number: steps for recognised in ranks if (steps := _recorded(recognised)) is not None}
    if len(recorded) < len(ranks) or len(set(recorded.values())) < 2:
        return list(ranks), ()
    steps = range(
        max(rank_steps.start for rank_steps in recorded.values()),
        min(rank_steps.stop for rank_steps in recorded.values()),
    )
    by_steps: dict[tuple[int, int], list[int]] = {}
    for rank, rank_steps in sorted(recorded.items()):
        by_steps.setdefault((rank_steps.start, rank_steps.stop), []).append(rank)
    parts = (
        f"{'rank' if len(same) == 1 else 'ranks'} {listed(same)}: {_steps_text(range(*edges))}"
        for edges, same in sorted(by_steps.items())
    )
    line = f"ranks recorded different steps ({'; '.join(parts)})"
    if not steps:
        return list(ranks), (
            f"{line}, and no step is common to all: figures that compare ranks are null; record steps in which the script's own "
            "profiler runs on no rank (--steps A:B)",
        )

    def common(table: pd.DataFrame) -> pd.DataFrame:
        return table[(table["step"] < 0) | table["step"].isin(steps)].reset_index(drop=True)

    return [replace(recognised, ops=common(recognised.ops), comms=common(recognised.comms)) for recognised in ranks], (
        f"{line}: the report is of {_steps_text(steps)}, which all ranks recorded",
    )


_LAUNCHED = "pptrace.trace/1"


def with_common_runs(ranks: Sequence[RecognisedRank]) -> list[RecognisedRank]:
    """Number microbatches from 0 in each run of a step that not all ranks have as often, as where a profiler began within it:
    which runs are the same is unknown.
    """
    if not any(recognised.run_sizes for recognised in ranks):
        return list(ranks)
    num_runs: dict[int, set[int]] = {}
    for recognised in ranks:
        ops = recognised.ops[rows_among(recognised.ops["kind"], COMPUTE_KINDS) & (recognised.ops["microbatch"] >= 0)]
        counts = ops.groupby("step")["microbatch"].max() + 1
        for step, count in zip(counts.index.tolist(), counts.tolist(), strict=True):
            num_runs.setdefault(step, set()).add(count // recognised.run_sizes.get(step, count))

    def within_runs(table: pd.DataFrame, sizes: Mapping[int, int]) -> pd.DataFrame:
        size = table["step"].map(sizes)
        return table.assign(
            microbatch=table["microbatch"]
            .where(size.isna() | (table["microbatch"] < 0), table["microbatch"] % size)
            .astype("int64")
        )

    unlike = {step for step, runs in num_runs.items() if len(runs) > 1}
    result = []
    for recognised in ranks:
        sizes = {step: size for step, size in recognised.run_sizes.items() if step in unlike}
        tables = {name: within_runs(getattr(recognised, name), sizes) for name in ("ops", "comms")} if sizes else {}
        result.append(replace(recognised, **tables))
    return result


def _recorded(recognised: RecognisedRank) -> range | None:
    """The steps that pptrace's launcher recorded; None for other recorders or where none is complete."""
    steps = recognised.info.metadata.get("steps")
    if recognised.info.metadata.get("schema") != _LAUNCHED or not isinstance(steps, list) or len(steps) != 2:
        return None
    rank_steps = range(*steps) if all(isinstance(step, int) for step in steps) else range(0)
    return rank_steps or None


def _steps_text(steps: range) -> str:
    return f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start}–{steps.stop - 1}"


def _has_ranges(recognised: RecognisedRank) -> bool:
    return bool(rows_among(recognised.ops["kind"], ("STEP",)).any())


def _steps_with_ops(recognised: RecognisedRank) -> list[int]:
    step = recognised.ops["step"].to_numpy()
    steps: list[int] = np.unique(step[rows_among(recognised.ops["kind"], COMPUTE_KINDS) & (step >= 0)]).tolist()
    return steps


def without_capturing_steps(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Drop the steps in which any rank captured a graph, on all ranks; with a line where there are any."""
    steps = tuple(sorted({step for recognised in ranks for step in recognised.capturing}))
    if not steps:
        return list(ranks), ()
    without = [
        replace(recognised, ops=without_steps(recognised.ops, steps), comms=without_steps(recognised.comms, steps))
        for recognised in ranks
    ]
    what = "hold captures of CUDA graphs, which are no steps" if len(steps) > 1 else "holds the capture of a CUDA graph"
    line = f"{'steps' if len(steps) > 1 else 'step'} {as_ranges(steps)} {what}: left out"
    return without, (line if len(steps) > 1 else f"{line}, since that is no step",)


def with_step_ranges_of_most(ranks: Sequence[RecognisedRank]) -> tuple[list[RecognisedRank], tuple[str, ...]]:
    """Keep steps from ranges that the script numbers, with a line that names them, where most ranks have some.

    Else they stay on ranks of a pipeline alone; for others :func:`with_repeated_steps` finds those that all ranks have.
    """
    step_ranges = [recognised.step_ranges for recognised in ranks if recognised.step_ranges]
    if 2 * len(step_ranges) > len(ranks):
        return list(ranks), (f"nothing else marks the steps: they are the ranges {step_ranges[0]} of the script",)
    return [
        replace(recognised, ops=recognised.ops[:0])
        if recognised.step_ranges and not _steps_with_ops(recognised)
        else recognised
        for recognised in ranks
    ], ()


def with_repeated_steps(ops: pd.DataFrame, ranks: Sequence[RecognisedRank]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Add the steps that repetition tells, where the ops of all ranks tell none; with a line.

    Ranks of one run take the same number of steps: where they differ, which belong together is unknown, and there are none.
    Neither are there, without graphs or optimizers on all ranks, where messages may be those of a pipeline that was not
    recognised: what repeats may be a microbatch.

    Args:
        ops: of all ranks.
    """
    if rows_among(ops["kind"], (*COMPUTE_KINDS, "STEP")).any():
        return ops, ()
    has_graphs = any(recognised.repeats.has_graphs or recognised.capturing for recognised in ranks)
    are_updates = all(recognised.repeats.of_optimizers for recognised in ranks)
    if not has_graphs and not are_updates and any(map(_may_be_of_a_pipeline, ranks)):
        return ops, ()
    counts = {len(recognised.repeats) for recognised in ranks}
    if counts == {0} or not counts:
        # Why there are none where something would have shown them: optimizers, graphs or a capture.
        reason = next((recognised.repeats.reason for recognised in ranks if recognised.repeats.reason), "")
        return ops, (f"nothing marks the steps, and {reason}: the report is of the whole trace",) if reason else ()
    if len(counts) > 1:
        line = "nothing marks the steps, and what repeats does so differently often by rank: the report is of the whole trace"
        return ops, (line,)
    (count,) = counts
    first = ranks[0].repeats
    clock = "device" if all(recognised.repeats.on_device for recognised in ranks) else "host"
    begins = "the first work of one to the first work of the next" if clock == "device" else "one begin to the next"
    line = (
        f"nothing marks the steps: {counted(count, 'step')} from what repeats, each from {first.boundary or begins} "
        f"({first.what}{' on rank ' + str(ranks[0].number) if len(ranks) > 1 else ''})"
    )
    return concat_tables([ops, *map(_rows, ranks)]), (line,)


def _may_be_of_a_pipeline(recognised: RecognisedRank) -> bool:
    """Return whether a rank has messages that are not all exchanges, as in rings of context parallelism: of a pipeline the first
    and the last message go one way, with compute behind what is received and before what is sent.
    """
    messages = [table[rows_among(table["kind"], MESSAGES)] for table in (recognised.calls, recognised.comms)]
    if not any(map(len, messages)):
        return False
    calls, what = messages[0], recognised.host["what"]
    works = recognised.host.loc[what.isin((What.OPERATOR.value, What.ENGINE.value)), "start_ns"].to_numpy()
    if len(messages[1]) or not len(works) or not rows_among(calls["kind"], P2P).all():
        return True
    between = np.searchsorted(works, calls["host_ns"].to_numpy())
    sent = rows_among(calls["kind"], ("send",))
    return not np.array_equal(np.sort(between[sent]), np.sort(between[~sent]))


def _rows(recognised: RecognisedRank) -> pd.DataFrame:
    """The steps of a rank, and the other ranges in them."""
    return concat_tables([recognised.repeats.ranges, recognised.repeats.spans]).assign(rank=recognised.number)
