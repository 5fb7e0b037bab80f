"""The report that workers make rank by rank and step by step: byte for byte that of all rows in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from pptrace.clock import estimate_clock
from pptrace.errors import UsageError
from pptrace.ingest import open_inputs, read_each
from pptrace.model.damage import Damage
from pptrace.model.device import DeviceWork
from pptrace.model.traces import Trace
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.run import recognise_ranks
from pptrace.report.to_json import dump, report_object
from pptrace.schedule.actions import Action
from pptrace.schedule.registry import build
from pptrace.workflow import analyse_on_workers as split
from pptrace.workflow.analyse import Analysis, analyse_ranks
from pptrace.workflow.dask_engine import DaskEngine
from pptrace.workflow.rank_store import recognise_trace
from pptrace.workflow.remote_rank import RemoteRank
from tests.analysis.experts.test_experts import HOT
from tests.support.damages import KINDS, OF_CLOCK, RANK, damaged
from tests.support.here_engine import HereEngine
from tests.support.programs import SAMPLES
from tests.support.synthetic import START, record, run_on_paper, without


def on_workers(ranks: Sequence[RecognisedRank], **options: Any) -> Analysis:
    engine = HereEngine()
    return split.analyse_on_workers([engine.remote(rank) for rank in ranks], cast(DaskEngine, engine), **options)


def json_of(analysis: Analysis) -> str:
    return dump(report_object(analysis.report, with_ops=True))


@cache
def _recognised(make: Callable[[], list[Trace]]) -> tuple[RecognisedRank, ...]:
    return tuple(map(recognise_trace, make()))


def ranks_of(make: Callable[[], list[Trace]]) -> list[RecognisedRank]:
    """The ranks of traces, recognised once for all tests."""
    return list(_recognised(make))


def traces_of(path: Path) -> list[Trace]:
    return list(read_each(open_inputs([path]), lambda trace: trace, jobs=1).traces)


def of_sample() -> list[Trace]:
    return traces_of(SAMPLES / "1f1b_p4")


def of_experts() -> list[Trace]:
    return traces_of(SAMPLES / "gpu_nccl_experts_pp2_ep2")


def noisy(action: Action) -> int:
    """A time for each op that differs from op to op, ns."""
    return 50_000 + random.Random(str(action)).randrange(20_000)


def of_replicas() -> list[Trace]:
    """Two pipelines with collectives between them, on hosts whose clocks are apart."""
    recording = record(build("1f1b", 3, 3), noisy, latency=700, dp=2, steps=3)
    return recording.traces(shifts_ns={rank: 10_000 * rank**2 for rank in range(6)}, one_host=False)


def of_devices() -> list[Trace]:
    return record(build("interleaved-1f1b", 2, 4, 2), noisy, latency=900, steps=3, device=True).traces()


def of_pairs() -> list[Trace]:
    return record(build("dualpipe-v", 2, 6, 2), noisy, latency=300, steps=2).traces(with_plan=False)


def of_some_ranks() -> list[Trace]:
    """A run whose plan is known, with a pipeline of which one rank has a trace."""
    return without(without(of_replicas(), 3), 5)


def of_drifting_clocks() -> list[Trace]:
    """Clocks that run fast by up to 600 parts per million, for long enough to show it."""
    recording = record(build("gpipe", 3, 6), lambda action: 40 * noisy(action), latency=20_000, steps=8)
    return [_running_fast(trace, 3e-4 * (trace.rank or 0)) for trace in recording.traces(one_host=False)]


def _running_fast(trace: Trace, rate: float) -> Trace:
    events = trace.events
    start, end = (
        times + np.rint(rate * (times - START)).astype(np.int64)
        for times in (events.start_ns, events.start_ns + events.dur_ns)
    )
    return replace(trace, events=replace(events, start_ns=start, dur_ns=end - start))


@pytest.mark.parametrize("traces", [of_sample, of_replicas, of_devices, of_pairs, of_some_ranks])
def test_a_report_made_on_workers_is_the_same(traces: Callable[[], list[Trace]]) -> None:
    ranks = ranks_of(traces)
    assert json_of(on_workers(ranks, warnings=("a line",))) == json_of(analyse_ranks(ranks, warnings=("a line",)))


def test_experts_are_the_same_with_their_rows_from_rank_to_rank() -> None:
    ranks = [recognise_trace(trace) for trace in HOT.traces()]
    analysis, expected = on_workers(ranks), analyse_ranks(ranks)
    assert json_of(analysis) == json_of(expected)
    assert analysis.expert_traffic is not None
    assert expected.expert_traffic is not None
    pd.testing.assert_frame_equal(analysis.expert_traffic.table(), expected.expert_traffic.table())


def test_clocks_that_drift_are_corrected_alike() -> None:
    ranks = ranks_of(of_drifting_clocks)
    analysis, expected = on_workers(ranks), analyse_ranks(ranks)
    assert len(expected.data.clock.rates) == 2
    assert analysis.data.clock == expected.data.clock
    assert json_of(analysis) == json_of(expected)


def test_one_step_and_another_schedule_are_the_same() -> None:
    ranks = ranks_of(of_replicas)
    for options in ({"step": 2}, {"schedule": "gpipe"}):
        assert json_of(on_workers(ranks, **options)) == json_of(analyse_ranks(ranks, **options))
    with pytest.raises(UsageError, match="step 9: the trace has no such step; it has 0 to 2"):
        on_workers(ranks, step=9)


def test_messages_without_another_side_are_counted_over_all_blocks() -> None:
    ranks = ranks_of(of_replicas)
    kept = ranks[2].comms[(ranks[2].comms["kind"] != "recv") | (ranks[2].comms["microbatch"] % 2 == 0)]
    ranks[2] = replace(ranks[2], comms=kept.reset_index(drop=True))
    expected = analyse_ranks(ranks)
    assert any("no matching receive in the peer's trace" in line for line in expected.report.warnings)
    assert json_of(on_workers(ranks)) == json_of(expected)


def test_a_rank_whose_device_was_not_recorded_has_the_same_nulls() -> None:
    ranks = ranks_of(of_devices)
    none = np.zeros(0, dtype=np.int64)
    ranks[1] = replace(ranks[1], work=DeviceWork(*[none] * 4, none.astype(bool), none.astype(bool), "nccl:all_reduce"))
    assert json_of(on_workers(ranks)) == json_of(analyse_ranks(ranks))


CHANGES = {
    kind: KINDS[kind][0]
    for kind in (
        Damage.LOST_KERNELS,
        Damage.NO_DEVICE_EVENTS,
        Damage.KERNELS_WITHOUT_LAUNCH,
        Damage.KERNELS_BEFORE_LAUNCH,
    )
} | OF_CLOCK


@pytest.mark.parametrize("damage", CHANGES)
def test_damaged_recordings_have_the_same_figures_and_nulls(damage: str, tmp_path: Path) -> None:
    folder, ranks = damaged(SAMPLES / "gpu_nccl_experts_pp2_ep2", tmp_path, CHANGES[damage]), ranks_of(of_experts)
    (ranks[RANK],) = map(recognise_trace, traces_of(folder / f"rank{RANK}.json"))
    assert json_of(on_workers(ranks)) == json_of(analyse_ranks(ranks))


def test_waits_whose_ranges_are_lost_have_the_same_nulls(tmp_path: Path) -> None:
    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            event for event in events if not event.get("name", "").startswith("pp1:wait") or "RECV" not in event["name"]
        ]

    folder = damaged(SAMPLES / "gpu_1f1b_p4", tmp_path, change)
    ranks = [recognise_trace(trace) for trace in traces_of(folder)]
    analysis = analyse_ranks(ranks)
    assert analysis.data.clock.early_ends
    assert json_of(on_workers(ranks)) == json_of(analysis)


def test_a_rank_alone_in_its_pipeline_without_messages_has_the_same_bounds() -> None:
    ranks = ranks_of(of_some_ranks)
    ranks[1] = replace(ranks[1], comms=ranks[1].comms.head(0))
    expected = analyse_ranks(ranks)
    assert {rank.bubble_low_ns for step in expected.report.steps for rank in step.ranks if rank.rank == 1} == {0}
    assert json_of(on_workers(ranks)) == json_of(expected)


def test_posting_calls_of_a_rank_with_devices_have_no_transfer_time_there_either() -> None:
    ranks = ranks_of(of_devices)
    sends = ranks[0].comms["kind"] == "send"
    assert sends.any()
    posted = ranks[0].comms["posted_ns"].where(~sends, ranks[0].comms["end_ns"])
    clock = ranks[0].comms["clock"].astype(object).where(~(sends & (ranks[0].comms["microbatch"] > 0)), "host")
    ranks[0] = replace(ranks[0], comms=ranks[0].comms.assign(posted_ns=posted, clock=clock))
    assert json_of(on_workers(ranks)) == json_of(analyse_ranks(ranks))


def _without_labels(traces: Sequence[Trace]) -> list[Trace]:
    return [
        replace(trace, events=replace(trace.events, names=tuple("aten::mm" for _ in trace.events.names)))
        for trace in traces
    ]


@pytest.mark.parametrize(
    "traces",
    [
        lambda: without(record(build("1f1b", 3, 4)).traces(with_metadata=False), 1),
        lambda: _without_labels(of_devices()),
    ],
    ids=["a rank is missing", "no labels"],
)
def test_what_is_inferred_from_other_ranks_is_left_to_one_process(traces: Callable[[], list[Trace]]) -> None:
    with pytest.raises(split.NotSplitError):
        on_workers([recognise_rank(trace) for trace in traces()])


def test_a_message_of_two_parts_is_left_to_one_process() -> None:
    ranks = ranks_of(of_replicas)
    twice = [replace(rank, comms=rank.comms.loc[rank.comms.index.repeat(2)].reset_index(drop=True)) for rank in ranks]
    with pytest.raises(split.NotSplitError, match="in an order"):
        on_workers(twice)


def test_what_a_rank_sends_to_the_program_does_not_grow_with_its_communication() -> None:
    def num_rows(steps: int) -> set[int]:
        traces = record(build("1f1b", 3, 4), dp=2, steps=steps).traces()
        return {len(HereEngine().remote(recognise_trace(trace)).lean.comms) for trace in traces}

    assert num_rows(1) == num_rows(4)
    assert max(num_rows(4)) <= 8


def test_a_table_without_peers_with_messages_inside_ops_and_calls_of_no_group_is_the_same(tmp_path: Path) -> None:
    for rank, table in enumerate(_tables()):
        table.to_csv(tmp_path / f"rank{rank}.csv", index=False)
    ranks = read_each(open_inputs([tmp_path]), recognise_trace, jobs=1).traces
    expected = analyse_ranks(ranks)
    for line in ("communication inside ops of host-clock tables", "communication without a recorded group or peer"):
        assert any(line in warning for warning in expected.report.warnings), line
    assert json_of(on_workers(ranks)) == json_of(expected)


def _tables() -> list[pd.DataFrame]:
    """Ops and messages of each rank, the last rank's on its device; messages name no peer, and end in the op that reads them."""
    run, steps = run_on_paper(build("1f1b", 3, 4), noisy, 700), 3
    tables = []
    for rank, done_by_rank in enumerate(run.ranks):
        clock = "device" if rank == 2 else "host"
        rows = [
            {
                "kind": str(done.action.kind),
                "stage": done.action.stage,
                "microbatch": done.action.microbatch,
                "start_ns": done.start + step * (run.end + 9_000),
                "end_ns": done.end + step * (run.end + 9_000) + (40 if done.action.kind.is_recv else 0),
                "step": step,
                "clock": clock if done.action.kind.is_compute or done.action.microbatch else "host",
            }
            for step in range(steps)
            for done in done_by_rank
        ]
        rows += [
            {"kind": kind, "start_ns": begin, "end_ns": begin + 300, "step": step, "clock": "host"}
            for step in range(steps)
            for kind, begin in (("all_reduce", 60_000 + step * (run.end + 9_000)), ("barrier", 90_000 + step * run.end))
        ]
        table = pd.DataFrame(rows).astype({"stage": "Int64", "microbatch": "Int64"}).assign(rank=rank)
        tables.append(table)
    return tables


def test_what_relates_the_clocks_comes_in_the_order_and_with_the_numbers_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, seen = ranks_of(of_replicas), []
    monkeypatch.setattr(
        split, "estimate_clock", lambda rows, *others: seen.append(rows) or estimate_clock(rows, *others)
    )
    on_workers(ranks)
    (rows,) = seen
    expected = recognise_ranks(ranks).comms
    columns = ["rank", "kind", "start_ns", "end_ns", "match", "clock"]
    matched = rows.loc[rows["match"] >= 0, columns].astype({"kind": str, "clock": str}).reset_index(drop=True)
    assert matched.equals(expected[columns].astype({"kind": str, "clock": str}))
    times = {"begin": ("start_ns", "min"), "end": ("end_ns", "max")}
    assert rows[rows["match"] < 0].groupby("rank").agg(**times).equals(expected.groupby("rank").agg(**times))


def test_tables_of_one_rank_in_several_files_are_joined(tmp_path: Path) -> None:
    engine, header = HereEngine(), "rank,step,kind,stage,microbatch,start_us,end_us\n"
    paths = []
    for name, step in (("a", 0), ("b", 1)):
        path = tmp_path / f"{name}.csv"
        rows = [f"{rank},{step},{kind},{rank},0,{at},{at + 5}" for rank in (0, 1) for kind, at in _times(rank, step)]
        path.write_text(header + "\n".join(rows) + "\n")
        paths.append(path)
    inputs = open_inputs(paths)
    whole = read_each(inputs, recognise_trace, jobs=1)

    def read(files: Any, read_file: Any, _meter: Any) -> Any:
        return [tuple(map(engine.remote, read_file(file))) for file in files]

    remote = cast(
        "tuple[RemoteRank, ...]", read_each(inputs, cast(Any, recognise_trace), None, None, None, read).traces
    )
    assert [len(rank.parts) for rank in remote] == [2, 2]
    analysis = split.analyse_on_workers(list(remote), cast(DaskEngine, engine))
    assert json_of(analysis) == json_of(analyse_ranks(whole.traces))


def _times(rank: int, step: int) -> list[tuple[str, int]]:
    return [("F", 100 * step + 10 * rank), ("B", 100 * step + 50 - 10 * rank)]
