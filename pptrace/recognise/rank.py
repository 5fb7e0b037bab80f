"""Recognise one rank's trace, whose many events are not needed afterwards; and what of its ops other ranks contradict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.intervals import EMPTY
from pptrace.marks import SpanKind
from pptrace.model.damage import CLOCK_KINDS
from pptrace.model.device import UNKNOWN_CLOCK, DeviceWork, Pieces
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import CALLS, COMMS, COMPUTE_KINDS, OPS, Int64, empty_table
from pptrace.model.traces import SPANS_DEVICE, Events, InputFormat, Trace, no_events
from pptrace.recognise.backward_parts import backward_parts
from pptrace.recognise.calls.find_calls import find_calls
from pptrace.recognise.calls.marked_calls import GROUPS_KEY, calls_with_marks, describe_group
from pptrace.recognise.damage import unrelated_work
from pptrace.recognise.device.idle import times_between_operators
from pptrace.recognise.device.lost_launches import with_lost_calls
from pptrace.recognise.device.work import device_rows, device_work, kernel_launches, lost_in_graphs, lost_kernels
from pptrace.recognise.ops.from_marks import tables_from_marks
from pptrace.recognise.ops.host_compute import host_work, with_places_on_device
from pptrace.recognise.ops.label_steps import RankTables
from pptrace.recognise.ops.mark_ranges import KINDS_OF_SPANS, MarkedRanges, split_marks, without_evaluations
from pptrace.recognise.ops.named_ranges import ranges_around, with_named_ranges, working_threads
from pptrace.recognise.pieces import pieces_of
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.repeats.loop import (
    capture_times,
    capturing_steps,
    outside_captures,
    steps_of_loop,
    with_steps_on_device,
    without_steps,
)
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps
from pptrace.recognise.steps.step_ranges import with_step_ranges
from pptrace.slices import rows_among, rows_where


def without_disagreeing_ops(ranks: Sequence[RecognisedRank]) -> list[RecognisedRank]:
    """Drop ops taken from the gaps between messages, where ranks that should have run equally many do not agree.

    A message that was posted ahead of its op shifts what lies between the messages, on some ranks and not on others.
    """
    by_gaps = [recognised for recognised in ranks if recognised.by_gaps]
    lacking = {recognised.framework for recognised in ranks if not recognised.by_gaps} & {
        recognised.framework for recognised in by_gaps
    }
    counts = [
        Counter(zip(recognised.ops["step"].tolist(), recognised.ops["kind"].tolist(), strict=True))
        for recognised in by_gaps
    ]
    last = max((step for count in counts for step, _ in count), default=0)
    whole_steps = [
        {key: number for key, number in count.items() if key[1] in ("F", "B") and (key[0] < last or last == 0)}
        for count in counts
    ]
    if not lacking and all(count == whole_steps[0] for count in whole_steps):
        return list(ranks)
    line = (
        "the ranks do not have equally many ops between their labelled messages: ops, steps and bubbles are "
        "null; record with ranges around forward_step and backward_step"
    )

    ops, comms = empty_table(OPS), empty_table(COMMS)
    return [
        replace(recognised, ops=ops, comms=comms, warnings=(*recognised.warnings, line), by_gaps=False)
        if recognised.by_gaps
        else recognised
        for recognised in ranks
    ]


def with_missing_devices(ranks: Sequence[RecognisedRank]) -> Sequence[RecognisedRank]:
    """The ranks, those of a pipeline without device events marked as such where others of its ranks have some.

    The pipeline of a run computes on devices or on hosts: what such ranks have are the times of launching.
    """
    with_devices = [rank.number for rank in ranks if len(rank.work) and len(rank.ops)]
    if not with_devices:
        return ranks
    proof = f"device events of rank {min(with_devices)}"
    return [
        replace(rank, work=replace(rank.work, missing_device_events=proof, pieces=Pieces()), host_work=EMPTY)
        if len(rank.ops)
        and not len(rank.work)
        and not rank.work.missing_device_events
        and not (rank.ops["clock"] == "device").any()
        else rank
        for rank in ranks
    ]


def recognise_rank(trace: Trace) -> RecognisedRank:
    """Recognise the ops, the communication and the device work of one rank.

    Marks tell what they name; what they do not name is taken from labels, else from order, kernels and calls.
    """
    trace, step_ranges = _with_watched_job(trace), ""
    if trace.events.names:
        recorded, step_ranges = with_step_ranges(trace.events)
        marks, events = split_marks(recorded)
        trace = replace(trace, events=events)
        work = device_work(trace.events, str(trace.distributed.get("backend", "")))
        if not len(work) and trace.damage.has(*CLOCK_KINDS):
            work = replace(work, missing_device_events=UNKNOWN_CLOCK)
        if trace.format.has_all_calls:  # those of one process under Nsight, and the work of one device
            work = _with_lost(work, trace.events, recorded)
        pauses = (
            times_between_operators(trace.events)
            if work.idle.between_operators is None
            else work.idle.between_operators
        )
        if pauses is not None and len(pauses):
            work = replace(work, idle=replace(work.idle, in_ranges=ranges_around(trace.events, pauses)))
        parts = backward_parts(trace.events, marks, work)
        work = replace(work, pieces=pieces_of(trace.events, work), backward=parts)
    else:
        marks, work = _found_in_no_events()
    if trace.calls is not None:
        return _recognised_rank(trace, work, None, trace.calls)
    if trace.format is InputFormat.OTLP and (device := trace.distributed.get(SPANS_DEVICE)):
        work = replace(work, missing_device_events=str(device))
    calls = empty_table(CALLS) if trace.ops is not None else find_calls(trace.events)
    if trace.ops is not None or trace.comms is not None:  # tables that the format's reader made
        ops = empty_table(OPS) if trace.ops is None else trace.ops
        comms = empty_table(COMMS) if trace.comms is None else trace.comms
        tables = RankTables(trace.framework, ops.assign(rank=-1), comms.assign(rank=-1))
        return _recognised_rank(trace, work, tables, calls)
    marked = None
    if marks:
        calls = calls_with_marks(calls, marks, work, trace.metadata)
        marked = tables_from_marks(_loading_on(working_threads(trace.events), without_evaluations(marks)), work)
        if marked.framework:
            return _recognised_rank(trace, work, marked, calls)
    from pptrace.recognise.infer.evidence import find_host_order  # ranks with marks need none of what infers ops
    from pptrace.recognise.ops.from_labels import tables_from_labels

    labelled = tables_from_labels(trace, work, calls)
    joined = labelled if marked is None else marked.joined_with(labelled)
    recognised = _recognised_rank(trace, work, joined, calls, step_ranges)
    return replace(recognised, host=find_host_order(trace.events, calls))


def _loading_on(threads: Int64, marks: MarkedRanges) -> MarkedRanges:
    """The marks without those of data on other threads."""
    is_data = marks.spans["kind"] == KINDS_OF_SPANS.index(SpanKind.DATA)
    return replace(marks, spans=marks.spans.where(~is_data | np.isin(marks.thread[marks.spans["at"]], threads)))


def _with_lost(work: DeviceWork, events: Events, recorded: Events) -> DeviceWork:
    """The device work with what was launched, outside of captures of graphs, and is missing; ``recorded`` are the events."""
    if not len(work):
        return work
    rows = device_rows(events)
    calls, lost = kernel_launches(events, rows)
    lost = outside_captures(events, lost) if len(lost) else lost
    in_graphs = lost_in_graphs(events, rows)
    without_calls = recorded.middles_of(outside_captures(recorded, with_lost_calls(recorded)))
    times = np.concatenate((events.start_ns[lost], events.start_ns[in_graphs], without_calls))
    unrelated = unrelated_work(events, rows, work)
    if not len(times) and not len(unrelated):
        return work
    num_launches = max(len(calls), len(rows) if len(in_graphs) else 0) + len(without_calls)
    found = lost_kernels(np.sort(times), num_launches, work)
    return replace(work, lost=found.with_unrelated(events.start_ns[unrelated], events.ends_of(unrelated)))


@cache
def _found_in_no_events() -> tuple[MarkedRanges, DeviceWork]:
    """Marks and device work of a rank without events, as those of tables are."""
    return split_marks(no_events())[0], device_work(no_events())


def _with_watched_job(trace: Trace) -> Trace:
    """The trace with what hooks learnt of the job, where its profiler began before the job did and wrote nothing."""
    groups = trace.metadata.get(GROUPS_KEY)
    if not isinstance(groups, Mapping) or not groups or trace.distributed.get("pg_config"):
        return trace
    config = [
        {"pg_name": name, "pg_size": len(facts.get("ranks") or ()), **describe_group(facts)}
        for name, facts in groups.items()
        if isinstance(facts, Mapping)
    ]
    job = {"world_size": trace.metadata.get("world_size"), "backend": trace.metadata.get("backend")}
    known_facts = {name: value for name, value in job.items() if value is not None}
    return replace(trace, distributed={**known_facts, "pg_config": config, **trace.distributed})


def _recognised_rank(
    trace: Trace, work: DeviceWork, tables: RankTables | None, calls: pd.DataFrame, step_ranges: str = ""
) -> RecognisedRank:
    tables = tables or RankTables(trace.framework, empty_table(OPS), empty_table(COMMS))
    ops, teardown = tables.ops, trace.metadata.get("teardown")
    if isinstance(teardown, int):  # the range of a step that was only the end of the script
        ops = ops[~((ops["kind"] == "STEP") & (ops["step"] == teardown))].reset_index(drop=True)
    ops = with_places_on_device(_without_empty_end(ops, work), tables.comms, work)
    tables = replace(tables, ops=with_named_ranges(with_steps_on_device(ops, work), trace.events, work))
    framework = str(trace.metadata.get("framework") or "") or tables.framework
    # Those that are inferred here may turn out to be no pipeline's.
    sure = ~rows_among(tables.ops["source"], ("inferred",))
    has_ops = bool((rows_among(tables.ops["kind"], COMPUTE_KINDS) & sure).any())
    host = EMPTY if has_ops or len(work) or work.missing_device_events else host_work(trace.events)
    recognised = (tables.ops, tables.comms, trace.memory, work, tables.warnings, calls, host, tables.by_gaps)
    captures = capture_times(trace.events)
    capturing = capturing_steps(tables.ops, captures)
    is_step = rows_among(without_steps(tables.ops, capturing)["kind"], ("STEP",))
    has_steps = has_ops or (is_step.any() and not step_ranges)
    is_labelled = tables.framework not in ("", "unlabelled")  # labels say what a step is, if not when
    repeats = RepeatedSteps()
    if not (has_steps or is_labelled):
        repeats = steps_of_loop(trace.events, captures, work, has_captured=bool(capturing))
    if len(repeats):  # the ranges of data, checkpoints and the like in them
        table = with_named_ranges(concat_tables([repeats.ranges, repeats.spans]), trace.events, work)
        are_inside = (table["end_ns"] > repeats.start_ns[0]) & (table["start_ns"] < repeats.end_ns[-1])
        spans = table[~rows_among(table["kind"], ("STEP",)) & are_inside].reset_index(drop=True)
        repeats = replace(repeats, spans=spans)
    return RecognisedRank(
        trace.info,
        framework,
        *recognised,
        capturing=capturing,
        repeats=repeats,
        step_ranges=step_ranges,
        run_sizes=tables.run_sizes,
    )


def _without_empty_end(ops: pd.DataFrame, work: DeviceWork) -> pd.DataFrame:
    """The ops without the range of a last step that launched nothing, where all before it did: what torch's profiler begins with
    the ``step()`` behind the last iteration, and ends with the recording.
    """
    rows = np.flatnonzero(rows_among(ops["kind"], ("STEP",)))
    if len(rows) < 2 or not len(work):
        return ops
    rows = rows[np.argsort(ops["start_ns"].to_numpy()[rows], kind="stable")]
    launches = np.sort(work.launch_ns[work.launch_ns >= 0])
    begun, over = (np.searchsorted(launches, ops[name].to_numpy()[rows]) for name in ("start_ns", "end_ns"))
    if begun[-1] < over[-1] or (begun >= over)[:-1].any():
        return ops
    return rows_where(ops, np.arange(len(ops)) != rows[-1]).reset_index(drop=True)


def without_other_numbers(ranks: Sequence[RecognisedRank]) -> tuple[Sequence[RecognisedRank], tuple[int, ...]]:
    """(the ranks, those without labels of which others have some).

    Ranks of a pipeline run equally many forwards and backwards in a step: inferred ops of which there are others than the
    labelled ranks have are dropped.
    """
    labelled = {_usual_number(rank.ops) for rank in ranks if _is_labelled(rank)}
    if not labelled:
        return ranks, ()
    without = tuple(rank.number for rank in ranks if rank.info.num_events and not _is_labelled(rank))
    wrong = {rank.number for rank in ranks if rank.number in without and _usual_number(rank.ops) not in labelled}
    line = (
        "its trace has no labels of ops, and not as many ops are inferred from it as the labelled ranks have: its ops are "
        "null; record all ranks with the same ranges"
    )
    checked = []
    for rank in ranks:
        dropped = rank.without_inferred() if rank.number in wrong else rank
        has_fewer = len(dropped.ops) < len(rank.ops)
        checked.append(replace(dropped, warnings=(*dropped.warnings, line)) if has_fewer else dropped)
    return checked, without


def _is_labelled(rank: RecognisedRank) -> bool:
    is_label = rows_among(rank.ops["source"], ("label",))
    return bool((is_label & rows_among(rank.ops["kind"], COMPUTE_KINDS)).any())


def _usual_number(ops: pd.DataFrame) -> tuple[int, int]:
    """(forwards, other compute) of most steps."""
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS)]
    steps, step = np.unique(compute["step"].to_numpy(), return_inverse=True)
    forwards = np.bincount(step[rows_among(compute["kind"], ("F",))], minlength=len(steps))
    others = np.bincount(step, minlength=len(steps)) - forwards
    numbers = Counter(zip(forwards.tolist(), others.tolist(), strict=True))
    return numbers.most_common(1)[0][0] if numbers else (0, 0)
