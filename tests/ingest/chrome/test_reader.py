"""Chrome traces with begin/end events: pairs, salvage, ranks, and the ops in their arguments."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pptrace.errors import TraceError
from pptrace.ingest.chrome.ranges import ChromeRanges, read_ranges
from pptrace.ingest.chrome.reader import read_chrome
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.formats import detect, read_file
from pptrace.model.traces import Category, InputFormat
from pptrace.schedule import registry
from pptrace.simulator import simulate, uniform
from pptrace.workflow.load import load
from tests.ingest import test_fuzz

MEGASCAN = "megatronapp_megascan/data-1-pipeline-4-tensor-1-pp-aggregated-iter10.json"


def event(ph: str, name: str | None, ts: object, pid: object = 0, tid: object = 0, **args: Any) -> dict[str, Any]:
    made = {"ph": ph, "name": name, "ts": ts, "pid": pid, "tid": tid, "args": args}
    return {key: value for key, value in made.items() if value is not None}


def written(folder: Path, events: Sequence[Mapping[str, Any]], name: str = "trace.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(events))
    return path


def ranges_of(content: bytes | Sequence[Mapping[str, Any]]) -> ChromeRanges:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(text)
        return read_ranges(Path(file.name))


def times(ranges: ChromeRanges) -> list[tuple[str, int, int]]:
    columns = (ranges.table[name].tolist() for name in ("name", "start_ns", "end_ns"))
    return list(zip(*columns, strict=True))


def paired(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    ranges = ranges_of(events)
    assert not ranges.warnings
    return times(ranges)


def test_begins_and_ends_nest_within_their_thread() -> None:
    events = [
        event("B", "outer", 1),
        event("B", "inner", 2.5),
        event("B", "elsewhere", 2, tid=7),
        event("E", "inner", 3),
        event("E", None, 4),
        event("E", "elsewhere", 9, tid=7),
    ]
    assert paired(events) == [("outer", 1000, 4000), ("elsewhere", 2000, 9000), ("inner", 2500, 3000)]


def test_the_order_in_the_file_does_not_matter() -> None:
    events = [event(ph, f"r{index}", 10 * index + shift) for index in range(20) for ph, shift in (("B", 0), ("E", 7))]
    wanted = paired(events)
    random.Random(3).shuffle(events)
    assert paired(events) == wanted
    assert len(wanted) == 20


def test_times_are_exact_to_the_nanosecond() -> None:
    text = b'[{"ph":"B","name":"a","ts":1719395514123456.789},{"ph":"E","name":"a","ts":"1719395514123457.001"}]'
    assert times(ranges_of(text)) == [("a", 1719395514123456789, 1719395514123457001)]


def test_arguments_of_both_ends_are_joined_and_those_of_the_end_win() -> None:
    ends = [event("B", "f", 1, step=1, mb=1, chunk="7"), event("E", "f", 2, mb=2, stage=3, chunk=None)]
    ranges = ranges_of(ends)
    names = ("step", "mb", "stage", "chunk", "seq_id")
    assert [ranges.numbers(name).tolist() for name in names] == [[1], [2], [3], [7], [-1]]


def test_numbers_in_arguments_are_whole_and_of_64_bits() -> None:
    given: list[Any] = [3, "4", 5.0, 6.5, True, "x", 2**63, [1], None]
    events = [event("X", "f", k, microbatch=value) | {"dur": 1} for k, value in enumerate(given)]
    ranges = ranges_of(events)
    assert ranges.numbers("micro_batch_index", "microbatch").tolist() == [3, 4, 5, -1, -1, -1, -1, -1, -1]


def test_what_never_ends_lasts_until_its_thread_does_and_is_told() -> None:
    events = [event("B", "run", 1), event("B", "lost", 2), event("E", "run", 5), event("B", "open", 6)]
    result = ranges_of(events)
    assert times(result) == [("run", 1000, 5000), ("lost", 2000, 5000), ("open", 6000, 6000)]
    assert result.warnings == (
        "2 ranges without an end (B without E): read as ending with the enclosing range or the thread, "
        "so that an op may be too long",
    )


def test_ends_without_a_begin_and_events_without_times_are_counted() -> None:
    named = [event("E", "x", 1), event("B", "f", 2), event("E", "f", 3), event("E", "g", 4), event("B", "h", "soon")]
    result = ranges_of(named)
    assert times(result) == [("f", 2000, 3000)]
    assert result.warnings == (
        'left out 1 event whose "ts" or "dur" is no time in µs',
        "left out 2 ends of ranges without a begin (E without B)",
    )


def test_complete_events_stand_beside_pairs() -> None:
    events = [event("B", "f", 1), event("X", "kernel", 2, pid=0) | {"dur": 0.5}, event("E", "f", 3)]
    assert paired(events) == [("f", 1000, 3000), ("kernel", 2000, 2500)]


@pytest.mark.parametrize("cut", [0.3, 0.62, 0.99])
def test_a_file_that_was_cut_gives_what_is_whole(tmp_path: Path, cut: float) -> None:
    text = json.dumps({"traceEvents": [event(ph, "f", 2 * k + (ph == "E")) for k in range(50) for ph in "BE"]})
    path = tmp_path / "cut.json"
    path.write_text(text[: int(len(text) * cut)])
    (trace,) = read_chrome(path)
    assert 0.9 * cut * 50 <= len(trace.events) <= 50
    assert "trace ends early" in trace.warnings[0]
    assert set(trace.events.dur_ns[:-1].tolist()) == {1000}


def test_damage_inside_costs_the_damaged_events_alone(tmp_path: Path) -> None:
    text = json.dumps([event(ph, "f", 2 * k + (ph == "E")) for k in range(10) for ph in "BE"])
    path = tmp_path / "bad.json"
    path.write_text(text.replace('"ts": 8', '"ts" 8', 1))
    (trace,) = read_chrome(path)
    assert len(trace.events) == 9
    assert any("left out 1 event that could not be read" in line for line in trace.warnings)
    assert any("of ranges without a begin" in line for line in trace.warnings)


@pytest.mark.parametrize(
    "text",
    [b'{"traceEvents": [{"ph": "B"', b'[{"ph": "E", "ts": 4}]', b'[{"ph":"B","ts":{}}]', b'[{"ph": "B", "ts": 1e999}'],
)
def test_a_file_without_a_range_is_told_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "none.json"
    path.write_bytes(text)
    with pytest.raises(TraceError, match="expected begin/end or complete events") as err:
        read_file(path, detect(first_bytes(path)))
    assert "\n" not in str(err.value)


def test_pairs_that_come_late_in_a_file_are_found_as_well(tmp_path: Path) -> None:
    early = [event("X", "x", k) | {"dur": 1, "padding": "." * 200} for k in range(400)]
    path = written(tmp_path, [*early, event("B", "f", 500), event("E", "f", 501)])
    assert detect(first_bytes(path)) is InputFormat.KINETO
    (trace,) = read_file(path, InputFormat.KINETO)
    assert (trace.format, len(trace.events)) == (InputFormat.CHROME, 401)


def test_kineto_with_its_own_members_stays_kineto() -> None:
    text = b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "args": {"x": "\\"ph\\": \\"B\\""}}'
    assert detect(text) is InputFormat.KINETO


@pytest.mark.parametrize(
    ("pids", "names", "ranks"),
    [
        ([0, 1, 2], {}, [0, 1, 2]),
        (["0", "1"], {}, [0, 1]),
        (["rank 4", "rank 9"], {}, [4, 9]),
        ([4711, 4712], {4711: "rank 1", 4712: "rank 0"}, [0, 1]),
        ([90001, 90002], {}, [0, 1]),
    ],
)
def test_each_process_is_a_rank(tmp_path: Path, pids: list[Any], names: dict[int, str], ranks: list[int]) -> None:
    events = [event("M", "process_name", 0, pid=pid) | {"args": {"name": name}} for pid, name in names.items()]
    events += [event(ph, "work", ts, pid=pid) for pid in pids for ph, ts in (("B", 1), ("E", 2))]
    traces = read_chrome(written(tmp_path, events))
    assert [trace.rank for trace in traces] == ranks
    assert all(trace.events.category.tolist() == [Category.ANNOTATION] for trace in traces)


def test_labels_of_frameworks_are_recognised_in_begin_end_events(tmp_path: Path) -> None:
    """The ranges of torch's pipelining as another tool would export them."""
    plan = registry.build("1f1b", 2, 4, 1)
    events = []
    for rank in simulate(plan.compute_only(), uniform(1000, 2000)).ranks:
        for timed in rank.timeline:
            events += [
                event("B", f"PP:{timed.action}", timed.start / 1000, pid=rank.rank),
                event("E", None, timed.end / 1000, pid=rank.rank),
            ]
    report = load([written(tmp_path, events)]).report
    assert (report.framework, report.schedule.name, report.mesh.pp) == ("torch.distributed.pipelining", "1f1b", 2)
    assert report.inputs[0].format == "chrome"
    assert report.steps[0].span_ns == (4 + 2 - 1) * 3000


@pytest.mark.parametrize(
    ("name", "pp", "m", "v"), [("interleaved-1f1b", 4, 8, 2), ("zbv", 4, 8, 2), ("gpipe", 3, 5, 1)]
)
def test_ops_in_arguments_become_the_plan_they_came_from(tmp_path: Path, name: str, pp: int, m: int, v: int) -> None:
    plan = registry.build(name, pp, m, v)
    simulation = simulate(plan.compute_only(), uniform(1000, 2000))
    words = {"F": "forward", "B": "backward", "I": "backward", "W": "wgrad"}
    events = []
    for rank in simulation.ranks:
        for timed in rank.timeline:
            word = words[timed.action.kind.value]
            ids = {"microbatch": timed.action.microbatch, "model_chunk": timed.action.chunk, "pp_rank": rank.rank}
            events += [
                event("B", word, timed.start / 1000, pid=rank.rank, iteration=7),
                event("E", word, timed.end / 1000, pid=rank.rank, iteration=7, **ids),
            ]
    report = load([written(tmp_path, events)]).report
    assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("megascan", name, ())
    assert (report.schedule.num_microbatches, report.schedule.num_chunks) == (m, v)
    assert [step.step for step in report.steps] == [7]
    assert report.steps[0].span_ns == simulation.makespan_ns
    assert [rank.bubble_ns for rank in report.steps[0].ranks] == [rank.bubble_ns for rank in simulation.ranks]


def test_megascan_is_interleaved_with_the_numbers_of_its_own_file(data: Path) -> None:
    path = data / MEGASCAN
    report = load([path]).report
    assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("megascan", "interleaved-1f1b", ())
    assert (report.mesh.pp, report.mesh.vpp, report.schedule.num_microbatches) == (4, 4, 8)
    assert (report.schedule.num_stages, report.clock.method) == (16, "one-file")
    own = [entry for entry in json.loads(path.read_text()) if entry["ph"] in "BE"]
    first = min(entry["ts"] for entry in own) * 1000
    last = max(entry["ts"] for entry in own) * 1000
    (step,) = report.steps
    assert (step.step, step.start_ns, step.end_ns) == (10, first, last)
    for rank in step.ranks:
        ends = sum(entry["ts"] for entry in own if entry["pid"] == rank.rank and entry["ph"] == "E")
        begins = sum(entry["ts"] for entry in own if entry["pid"] == rank.rank and entry["ph"] == "B")
        assert rank.compute_ns == (ends - begins) * 1000
        assert rank.bubble_ns == last - first - rank.compute_ns
        assert len(rank.ops) == 2 * 4 * 8


def test_megascans_files_of_single_ranks_are_one_run(tmp_path: Path) -> None:
    """As Tracer writes them: ns since the iteration began, ids beside the name."""
    simulation = simulate(registry.build("interleaved-1f1b", 2, 4, 2).compute_only(), uniform(1001, 2003))
    for rank in simulation.ranks:
        events: list[dict[str, Any]] = []
        for _ in range(2):
            events.append({"name": "iteration", "ph": "B", "pad_before": 5000})
            shared = {"dp_rk": 0, "pp_rk": rank.rank, "tp_rk": 0, "g_rk": rank.rank}
            for timed in rank.timeline:
                word = "forward" if timed.action.kind.value == "F" else "backward"
                ids = {"microbatch": timed.action.microbatch, "model_chunk": timed.action.chunk}
                events.append({"name": word, "ph": "B", "rel_ts": timed.start, **shared})
                events.append({"name": word, "ph": "E", "rel_ts": timed.end, **ids, **shared})
            events.append({"name": "iteration", "ph": "E", "rel_ts": 90_000, "duration_wall": 100_000, **shared})
        name = f"benchmark-data-0-pipeline-{rank.rank}-tensor-0.json"
        (tmp_path / name).write_text(json.dumps(events, indent=2))
    report = load([tmp_path]).report
    assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("megascan", "interleaved-1f1b", ())
    assert [info.rank for info in report.inputs] == [0, 1]
    assert [(step.step, step.start_ns) for step in report.steps] == [(0, 5000), (1, 110_000)]
    assert {step.span_ns for step in report.steps} == {simulation.makespan_ns}


def test_iterations_of_megascan_follow_each_other(tmp_path: Path) -> None:
    begin, end = {"name": "iteration", "ph": "B", "pad_before": 5}, {"name": "iteration", "ph": "E", "rel_ts": 90}
    path = written(tmp_path, [begin, end | {"duration_wall": 100}, begin, end | {"duration_wall": 200}])
    assert times(read_ranges(path)) == [("iteration", 5, 95), ("iteration", 110, 200)]


def test_a_range_without_a_rank_is_of_the_rank_of_its_thread(tmp_path: Path) -> None:
    events = [event("X", "f", 10 * k, tid=k % 2, rank=4 + k % 2) | {"dur": 1} for k in range(4)]
    traces = read_chrome(written(tmp_path, [*events, event("X", "g", 3, tid=1) | {"dur": 1}]))
    assert [(trace.rank, len(trace.events)) for trace in traces] == [(4, 2), (5, 3)]


def test_steps_in_arguments_are_ranges_unless_they_overlap(tmp_path: Path) -> None:
    def steps(begin_of_second: int) -> list[tuple[str, int, int]]:
        spans = ((0, 0, 40), (1, begin_of_second, 50))
        path = tmp_path / "steps.json"
        path.write_text(json.dumps([event("X", "work", ts, step=step) | {"dur": dur} for step, ts, dur in spans]))
        (trace,) = read_chrome(path)
        events = trace.events
        named = [events.names[code] for code in events.name_id]
        rows = zip(named, events.start_ns.tolist(), events.dur_ns.tolist(), strict=True)
        return [row for row in rows if row[0].startswith("ProfilerStep")]

    assert steps(40) == [("ProfilerStep#0", 0, 40_000), ("ProfilerStep#1", 40_000, 50_000)]
    assert steps(39) == []


def test_correlations_of_no_call_are_none(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    numbers = (7, 2**32 - 1, 0)
    path.write_text(json.dumps([event("X", "k", at, correlation=n) | {"dur": 1} for at, n in enumerate(numbers)]))
    (trace,) = read_chrome(path)
    assert trace.events.correlation.tolist() == [7, -1, -1]


def test_damaged_bytes_never_raise_anything_but_a_line(tmp_path: Path) -> None:
    events = [event(ph, "forward", k, pid=k % 2, microbatch=k // 4, model_chunk=0) for k in range(8) for ph in "BE"]
    test_fuzz.run([("fuzzed.json", json.dumps(events).encode())], test_fuzz.SEEDS, tmp_path)


def sequence_timeline(name: str, pp: int, m: int, v: int, loops: bool = False) -> list[dict[str, Any]]:
    """Two replicas and two steps, numbered in order on each rank: a process per replica, a thread per pipeline rank."""
    simulation = simulate(registry.build(name, pp, m, v).compute_only(), uniform(1000, 2000))
    words = {"F": "forward-compute", "B": "backward-compute"}
    events = []
    for dp in (0, 1):
        events.append(event("M", "process_name", 0, pid=dp) | {"args": {"name": f"DP rank [{dp}]"}})
        for rank in simulation.ranks:
            tid = dp * pp + rank.rank
            label = {"args": {"name": f"PP rank {rank.rank}, TP rank 0, compute"}}
            events.append(event("M", "thread_name", 0, pid=dp, tid=tid) | label)
            for index, step in enumerate((23, 25)):
                seen = dict.fromkeys(words, 0)
                for timed in rank.timeline:
                    kind = timed.action.kind.value
                    ids = {"step": step, "model_chunk": None, "mb_id": None, "seq_id": seen[kind]}
                    seen[kind] += 1
                    ts, dur = timed.start / 1000 + 100 * index, (timed.end - timed.start) / 1000
                    events.append(event("X", words[kind], ts, pid=dp, tid=tid, **ids) | {"dur": dur})
                    if loops and kind == "F":
                        events.append(event("X", "forward-recv", ts, pid=dp, tid=tid, **ids) | {"dur": 0})
    return events


def test_ranges_numbered_in_order_are_ops_of_their_steps_in_a_mesh_of_replicas(tmp_path: Path) -> None:
    report = load([written(tmp_path, sequence_timeline("1f1b", 3, 5, 1))]).report
    assert (report.mesh.pp, report.mesh.dp, report.mesh.tp) == (3, 2, 1)
    assert (report.schedule.name, report.schedule.num_microbatches, report.schedule.num_stages) == ("1f1b", 5, 3)
    assert [step.step for step in report.steps] == [23, 25]
    assert all(len(step.ranks) == 6 for step in report.steps)
    assert "the trace has no global ranks: they are numbered replica by replica" in " ".join(report.warnings)


def test_chunks_that_nothing_tells_apart_are_not_guessed(tmp_path: Path) -> None:
    path = written(tmp_path, sequence_timeline("interleaved-1f1b", 2, 4, 2, loops=True))
    assert all(trace.ops is None for trace in read_chrome(path))


def test_messages_numbered_in_order_belong_to_the_ops_of_their_direction(tmp_path: Path) -> None:
    events = sequence_timeline("1f1b", 2, 3, 1)
    recv = [item | {"name": "forward-recv"} for item in events if item["name"] == "forward-compute" and item["tid"] % 2]
    traces = read_chrome(written(tmp_path, events + recv))
    comms = [trace.comms for trace in traces if trace.comms is not None and len(trace.comms)]
    assert len(comms) == 2
    for result in comms:
        assert set(result["kind"]) == {"recv"}
        assert result.groupby("step")["microbatch"].apply(list).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_peer_of_a_message_is_the_only_rank_of_its_group(tmp_path: Path) -> None:
    events = [
        event("X", name, 10 * k, pid=pid, microbatch=0, rank=pid, group=group) | {"dur": 1}
        for pid in (0, 1)
        for k, (name, group) in enumerate(
            [("forward", None), ("send-forward", [1 - pid]), ("send-forward", [0, 1]), ("backward", 3)]
        )
    ]
    traces = read_chrome(written(tmp_path, events))
    assert [trace.comms["peer"].tolist() for trace in traces] == [[1, -1], [0, -1]]


def test_coordinates_that_leave_a_hole_tell_no_mesh(tmp_path: Path) -> None:
    events = [item for item in sequence_timeline("1f1b", 2, 3, 1) if (item["pid"], item["tid"]) != (1, 3)]
    traces = read_chrome(written(tmp_path, events))
    assert len(traces) == 3
    assert all("mesh" not in trace.metadata for trace in traces)


def vescale(name: str, pp: int, m: int, v: int, replicas: int = 1) -> list[dict[str, Any]]:
    """As veScale's ndtimeline writes it: a process for each replica, tid = 10·rank + k, no ids but rank, step, tp and pp."""
    plan = registry.build(name, pp, m, v)
    done = simulate(plan, uniform(500_000, 1_000_000)).ops()
    words = {"F": "forward-compute", "B": "backward-compute"}
    events: list[dict[str, Any]] = []
    for step in (5, 6):
        begin = (step - 5) * (int(done["end_ns"].max()) // 1000 + 900)
        for op in done.itertuples():
            for replica in range(replicas):
                rank = int(op.rank) * replicas + replica
                at = {"ts": 1.7e9 + begin + op.start_ns / 1e3, "dur": (op.end_ns - op.start_ns) / 1e3}
                args = {"rank": rank, "step": step, "tp": 0, "pp": int(op.rank)}
                kind = words[str(op.kind)]
                where = {"pid": replica, "tid": 10 * rank, "args": args}
                events.append({"name": kind, "cat": kind, "ph": "X"} | where | at)
    names = [(pid, {"name": f"dp rank[{pid}]"}) for pid in range(replicas)]
    return events + [{"ph": "M", "name": "process_name", "pid": pid, "args": args} for pid, args in names]


@pytest.mark.parametrize(
    ("name", "pp", "m", "v", "dp"), [("1f1b", 3, 5, 1, 1), ("1f1b", 2, 6, 1, 2), ("interleaved-1f1b", 4, 8, 2, 1)]
)
def test_ranges_that_name_their_rank_and_step_are_a_run_of_several_ranks(
    tmp_path: Path, name: str, pp: int, m: int, v: int, dp: int
) -> None:
    path = written(tmp_path, vescale(name, pp, m, v, dp), "trace_step5_7")
    for given in (path, tmp_path):
        report = load([given]).report
        assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("vescale", name, ())
        assert (report.mesh.pp, report.mesh.dp or 1, report.mesh.num_ranks) == (pp, dp, pp * dp)
        assert [step.step for step in report.steps] == [5, 6]
        planned = registry.build(name, pp, m, v)
        for rank in report.steps[1].ranks:
            ops = [(op.stage, op.kind, op.microbatch) for op in rank.ops]
            assert ops == [(a.stage, str(a.kind), a.microbatch) for a in planned.compute_actions(rank.rank // dp)]
        assert not any("of ranks assumed" in line for line in report.warnings)
