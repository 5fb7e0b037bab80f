"""Op-level formats: anybody's tables, ByteDance's, Primus' dumps and pptrace's own outputs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import polars
import pytest
from msgspec.structs import replace

from pptrace.analysis.report import Report
from pptrace.analysis.result import RankStep
from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.common.json_texts import to_ns
from pptrace.ingest.formats import detect, read_file
from pptrace.ingest.inputs.resolve import open_inputs
from pptrace.ingest.op_tables.files import read_frame
from pptrace.model.traces import InputFormat
from pptrace.report import to_files
from pptrace.report.to_json import dump, report_object, simulation_object
from pptrace.schedule import registry
from pptrace.simulator import Simulation, simulate, uniform
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from tests.ingest import test_fuzz
from tests.support.extent import ALL
from tests.support.programs import SAMPLES
from tests.support.read import read_traces
from tests.support.tables import named

Columns = dict[str, list[Any]]


def simulated(name: str, pp: int, m: int, v: int = 1) -> Simulation:
    return simulate(registry.build(name, pp, m, v).compute_only(), uniform(1_000_001, 2_000_003))


def columns_of(simulation: Simulation) -> Columns:
    rows = [(rank.rank, timed) for rank in simulation.ranks for timed in rank.timeline]
    return {
        "rank": [rank for rank, _ in rows],
        "step": [3] * len(rows),
        "kind": [timed.action.kind.value for _, timed in rows],
        "stage": [timed.action.stage for _, timed in rows],
        "chunk": [timed.action.chunk for _, timed in rows],
        "microbatch": [timed.action.microbatch for _, timed in rows],
        "start_ns": [timed.start for _, timed in rows],
        "end_ns": [timed.end for _, timed in rows],
    }


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]] | pd.DataFrame) -> Path:
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def numbers(report: Report) -> object:
    """Figures of a report, without where it came from: steps with everything in them that tables of ops can tell."""
    return [replace(step, ranks=tuple(map(_rank_of_table, step.ranks))) for step in report.steps]


def _rank_of_table(rank: RankStep) -> RankStep:
    """The rank without its device, its memory and predictions from the model's sizes."""
    comms = tuple(replace(comm, predicted_bytes=None) for comm in rank.comms)
    memory: dict[str, None] = dict.fromkeys(("peak_memory_bytes", "peak_memory_kind", "start_memory_bytes"))
    return replace(rank, device=None, comms=comms, **memory)


# Our own columns


@pytest.mark.parametrize(("name", "pp", "m", "v"), [("1f1b", 4, 8, 1), ("interleaved-1f1b", 3, 6, 2), ("zbv", 2, 4, 2)])
def test_a_table_of_a_simulation_is_the_simulation(tmp_path: Path, name: str, pp: int, m: int, v: int) -> None:
    simulation = simulated(name, pp, m, v)
    report = load([write_csv(tmp_path / "table.csv", columns_of(simulation))]).report
    assert (report.schedule.name, report.schedule.mismatches, report.mesh.pp, report.mesh.vpp) == (name, (), pp, v)
    assert (report.inputs[0].format, report.clock.method) == ("oplog", "one-file")
    (step,) = report.steps
    assert (step.step, step.span_ns) == (3, simulation.makespan_ns)
    assert step.bubble.ratio == pytest.approx(simulation.bubble_ratio)
    assert [rank.compute_ns for rank in step.ranks] == [rank.compute_ns for rank in simulation.ranks]


LEFT_OUT = [["stage", "step"], ["chunk"], ["microbatch"]]
PLACED = [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)]
FEW_LEFT_OUT = [
    (LEFT_OUT[0], *PLACED[2]),
    (LEFT_OUT[1], *PLACED[1]),
    (LEFT_OUT[2], *PLACED[0]),
    (LEFT_OUT[2], *PLACED[1]),
]


@pytest.mark.parametrize(
    ("left_out", "name", "v"), [(out, *each) for out in LEFT_OUT for each in PLACED] if ALL else FEW_LEFT_OUT
)
def test_what_the_table_leaves_out_follows_from_the_rest(
    tmp_path: Path, left_out: list[str], name: str, v: int
) -> None:
    columns = columns_of(simulated(name, 4, 8, v))
    kept = {key: values for key, values in columns.items() if key not in left_out}
    whole = load([write_csv(tmp_path / "whole.csv", columns)])
    part = load([write_csv(tmp_path / "part.csv", kept)])
    assert (part.report.schedule.name, part.report.schedule.mismatches) == (name, ())
    names = ["rank", "kind", "stage", "chunk", "microbatch", "phase", "start_ns", "end_ns"]
    pd.testing.assert_frame_equal(part.data.ops[names], whole.data.ops[names])


def test_an_op_that_comes_again_begins_the_next_step_where_none_is_numbered(tmp_path: Path) -> None:
    report = load([write_csv(tmp_path / "two.csv", steps_of(0, 1).drop(columns="step"))]).report
    assert [step.step for step in report.steps] == [0, 1]
    assert report.steps[1].start_ns - report.steps[0].start_ns == 10**9
    assert report.schedule.name == "1f1b"


@pytest.mark.parametrize(("name", "pp"), [("zb-h1", 3), ("interleaved-1f1b", 2), *[("gpipe", 3), ("zbv", 2)] * ALL])
def test_without_steps_and_microbatches_a_step_ends_where_the_pipeline_has_drained(
    tmp_path: Path, name: str, pp: int
) -> None:
    whole = steps_of(0, 1, 2, name=name, pp=pp, v=2 if name in ("zbv", "interleaved-1f1b") else 1)
    unnumbered = whole.drop(columns=["step", "microbatch"])
    bare = load([write_csv(tmp_path / "bare.csv", unnumbered)]).report
    assert numbers(bare) == numbers(load([write_csv(tmp_path / "whole.csv", whole)]).report)
    assert "no columns step and microbatch: split into 3 steps where the pipeline has drained" in bare.warnings
    one = load([write_csv(tmp_path / "one.csv", unnumbered[: len(unnumbered) // 3])]).report
    assert len(one.steps) == 1
    assert not [line for line in one.warnings if "no columns step" in line]


def test_on_one_stage_nothing_tells_where_steps_begin(tmp_path: Path) -> None:
    columns = {"rank": [0] * 4, "kind": ["F", "B"] * 2, "start_ns": [0, 10, 20, 30], "end_ns": [10, 20, 30, 40]}
    report = load([write_csv(tmp_path / "table.csv", columns)]).report
    assert (len(report.steps), report.schedule.num_microbatches) == (1, 2)
    assert [line for line in report.warnings if "all ops are read as one step" in line]


def test_an_op_without_a_step_has_that_of_the_ops_around_it_if_that_lacks_it(tmp_path: Path) -> None:
    table = steps_of(5, 7).reset_index(drop=True)
    whole = load([write_csv(tmp_path / "whole.csv", table)]).report
    for gaps in ([0], [3, 20], [5]):
        lacking = table.assign(step=table["step"].astype(object).mask(table.index.isin(gaps), ""))
        report = load([write_csv(tmp_path / "gaps.csv", lacking)]).report
        assert numbers(report) == numbers(whole)
        line = f"{len(gaps)} of 32 ops have no step: {len(gaps)} got that of the ops before and after them"
        assert line in report.warnings
    outside = table.assign(step=table["step"].where(table["step"] == 5, -1))
    assert [step.step for step in load([write_csv(tmp_path / "outside.csv", outside)]).report.steps] == [5]


@pytest.mark.parametrize(
    ("unit", "text", "wanted"),
    [
        ("ns", "1719395514123456789", 1719395514123456789),
        ("us", "1719395514123456.789", 1719395514123456789),
        ("ms", "0.0000015", 2),
        ("ms", "0.0000025", 2),
        ("s", "1719395514.123456789", 1719395514123456789),
        ("s", "1e-9", 1),
    ],
)
def test_times_are_exact_in_every_unit(unit: str, text: str, wanted: int) -> None:
    values, good = to_ns(pd.Series([text], dtype="object"), unit)
    assert (values.tolist(), good.tolist()) == ([wanted], [True])


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "1e30", "-1e30", "9" * 40])
def test_what_is_no_time_is_told_apart(text: str) -> None:
    assert not to_ns(pd.Series([text], dtype="object"), "s")[1].any()


def test_floats_become_the_nearest_nanosecond() -> None:
    values, good = to_ns(pd.Series([0.112404, 2.5, float("nan"), 1e300]), "s")
    assert (values[:2].tolist(), good.tolist()) == ([112404000, 2500000000], [True, True, False, False])


@pytest.mark.parametrize(("unit", "scale"), [("us", 1e3), ("ms", 1e6), ("s", 1e9)])
def test_units_are_told_by_the_names_of_the_columns(tmp_path: Path, unit: str, scale: float) -> None:
    columns = columns_of(simulated("1f1b", 2, 4))
    starts, ends = columns.pop("start_ns"), columns.pop("end_ns")
    digits = {"us": 3, "ms": 6, "s": 9}[unit]
    columns[f"start_{unit}"] = [f"{start / scale:.{digits}f}" for start in starts]
    columns[f"dur_{unit}"] = [f"{(end - start) / scale:.{digits}f}" for start, end in zip(starts, ends, strict=True)]
    ops = load([write_csv(tmp_path / "table.csv", columns)]).data.ops
    assert sorted(zip(ops["start_ns"], ops["end_ns"], strict=True)) == sorted(zip(starts, ends, strict=True))


def test_parquet_and_csv_of_the_same_ops_give_the_same_report(tmp_path: Path) -> None:
    columns = columns_of(simulated("interleaved-1f1b", 2, 4, 2))
    csv = load([write_csv(tmp_path / "table.csv", columns)]).report
    polars.DataFrame(columns).write_parquet(tmp_path / "table.parquet")
    parquet = load([tmp_path / "table.parquet"]).report
    assert numbers(csv) == numbers(parquet)
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress((tmp_path / "table.csv").read_bytes()))
    assert numbers(load([tmp_path / "table.csv.gz"]).report) == numbers(csv)


@pytest.mark.parametrize("lines", [False, True])
def test_rows_in_json_are_the_table_that_they_are_in_csv(tmp_path: Path, lines: bool) -> None:
    table = replicated(1, 2, "dp", "2").reset_index(drop=True)
    table.to_csv(tmp_path / "table.csv", index=False)
    rows = [{name: cell for name, cell in row.items() if cell == cell} for row in table.to_dict("records")]
    path = tmp_path / ("table.jsonl" if lines else "table.json")
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1))
    assert numbers(load([path]).report) == numbers(load([tmp_path / "table.csv"]).report)
    path.write_text(path.read_text()[:-30])
    if lines:
        warnings = [line for trace in read_file(path, InputFormat.OPLOG) for line in trace.warnings]
        assert any("cut off in its last row" in line for line in warnings)
    else:
        with pytest.raises(TraceError, match="a table in damaged JSON"):
            load([path])


@pytest.mark.parametrize("coordinates", [{}, {"dp_rank": 0}])
def test_one_file_per_rank_is_one_run(tmp_path: Path, coordinates: dict[str, int]) -> None:
    """Coordinates of one rank tell nothing of how many there are: with them each file had a mesh of its own."""
    simulation = simulated("1f1b", 3, 6)
    table = pd.DataFrame(columns_of(simulation)).assign(**coordinates)
    for rank, rows in table.groupby("rank"):
        rows.drop(columns="rank").to_csv(tmp_path / f"rank{rank}.csv", index=False)
    report = load([tmp_path]).report
    assert (report.schedule.name, report.mesh.pp, report.steps[0].span_ns) == ("1f1b", 3, simulation.makespan_ns)
    assert not report.schedule.mismatches


def steps_of(*steps: int, name: str = "1f1b", pp: int = 2, v: int = 1) -> pd.DataFrame:
    """Steps of one run, a second apart."""
    table = pd.DataFrame(columns_of(simulated(name, pp, 4, v)))
    starts, ends = table["start_ns"], table["end_ns"]
    return pd.concat(table.assign(step=s, start_ns=starts + s * 10**9, end_ns=ends + s * 10**9) for s in steps)


@pytest.mark.parametrize("per_rank", [False, True])
def test_tables_of_different_steps_are_more_steps_of_their_ranks(tmp_path: Path, per_rank: bool) -> None:
    (tmp_path / "parts").mkdir()
    whole = steps_of(5, 7)
    for key, rows in whole.groupby(["step", "rank"] if per_rank else ["step"]):
        rows.to_csv(tmp_path / "parts" / f"part_{'_'.join(map(str, key))}.csv", index=False)
    parts = load([tmp_path / "parts"]).report
    assert numbers(parts) == numbers(load([write_csv(tmp_path / "whole.csv", whole)]).report)
    assert (parts.mesh.num_ranks, [step.step for step in parts.steps]) == (2, [5, 7])
    assert read_traces(open_inputs([tmp_path / "parts"])).traces[1].info.num_events == 16


def test_tables_of_other_runs_and_other_clocks_are_refused(tmp_path: Path) -> None:
    steps_of(5).to_csv(tmp_path / "a.csv", index=False)
    steps_of(5, name="gpipe").to_csv(tmp_path / "b.csv", index=False)
    steps_of(5).assign(step=6).to_csv(tmp_path / "c.csv", index=False)
    for other, message in (
        ("b", r"another run than .*a\.csv \(both hold step 5 of rank 0\)"),
        ("c", "on another clock"),
    ):
        with pytest.raises(TraceError, match=message):
            load([tmp_path / "a.csv", tmp_path / f"{other}.csv"])


def test_messages_in_the_table_tell_waiting_from_transfer(tmp_path: Path) -> None:
    """Rank 0 sends from 10 to 30, rank 1 is ready at 25: 15 ns of waiting, 5 ns of transfer; then the other way."""
    rows = [
        (0, "F", 0, 10, "", ""),
        (0, "SEND_F", 10, 30, "1", "F"),
        (1, "recv", 25, 30, "0", "F"),
        (1, "F", 30, 40, "", ""),
        (1, "B", 40, 60, "", ""),
        (1, "send", 60, 64, "0", "B"),
        (0, "RECV_B", 30, 64, "1", "B"),
        (0, "B", 64, 84, "", ""),
    ]
    table = pd.DataFrame(named("rank kind start_ns end_ns peer direction", rows))
    table = table.assign(step=0, microbatch=0, stage=table["rank"])
    report = load([write_csv(tmp_path / "table.csv", table)]).report
    by_key = {(rank.rank, comm.kind): comm for rank in report.steps[0].ranks for comm in rank.comms}
    assert {key: (comm.wait_ns, comm.exposed_ns) for key, comm in by_key.items()} == {
        (0, "send"): (15, 5),
        (0, "recv"): (30, 4),
        (1, "recv"): (0, 5),
        (1, "send"): (0, 4),
    }
    assert [rank.bubble_ns for rank in report.steps[0].ranks] == [84 - 30 - 9, 84 - 30 - 9]


def test_ranks_of_several_replicas_are_told_by_their_coordinates(tmp_path: Path) -> None:
    """Rank = dp + 2 · pp, and the same with pp fastest."""
    table = pd.DataFrame(columns_of(simulated("1f1b", 2, 4)))
    for along_dp, along_pp, wanted in ((1, 2, ((0, 2), (1, 3))), (2, 1, ((0, 1), (2, 3)))):
        pp_rank = table["rank"]
        parts = [table.assign(rank=along_dp * dp + along_pp * pp_rank, dp_rank=dp, pp_rank=pp_rank) for dp in (0, 1)]
        analysis = load([write_csv(tmp_path / "table.csv", pd.concat(parts))])
        assert analysis.mesh.pipelines == wanted
        assert (analysis.report.mesh.pp, analysis.report.mesh.dp, analysis.report.schedule.name) == (2, 2, "1f1b")


def replicated(along_dp: int, along_pp: int, axis: str, size: str) -> pd.DataFrame:
    """Two pipelines of two ranks, each of which ends with a collective of 500,000 ns behind its last backward."""
    table = pd.DataFrame(columns_of(simulated("1f1b", 2, 4))).astype({"stage": object, "microbatch": object})
    ends = table.groupby("rank")["end_ns"].max() - 500_000
    last = {"step": 3, "kind": "all_reduce", "axis": axis, "group_size": size, "bytes": 8}
    joins = [{**last, "rank": rank, "start_ns": end, "end_ns": end + 500_000} for rank, end in ends.items()]
    one = pd.concat([table, pd.DataFrame(joins)])
    parts = [one.assign(rank=along_dp * replica + along_pp * one["rank"]) for replica in (0, 1)]
    return pd.concat(parts)


DP, TP = ("dp", (1, 1, 2)), ("tp", (2, 1, 1))
EVERY_TWO = [("2", *DP, 1, 2), ("2", *TP, 2, 1), ("", *DP, 2, 1), ("", *TP, 1, 2)]
OTHERS = [("2", *DP, 2, 1), ("2", *TP, 1, 2), ("", *DP, 1, 2), ("", *TP, 2, 1)]


@pytest.mark.parametrize(("size", "axis", "mesh", "along_dp", "along_pp"), EVERY_TWO + OTHERS * ALL)
def test_replicas_that_one_axis_names_are_its_groups(
    tmp_path: Path, size: str, axis: str, mesh: tuple[int, int, int], along_dp: int, along_pp: int
) -> None:
    table = replicated(along_dp, along_pp, axis, size)
    table.to_csv(tmp_path / "table.csv", index=False)
    (tmp_path / "ranks").mkdir()
    for rank, rows in table.groupby("rank"):
        rows.drop(columns="rank").to_csv(tmp_path / "ranks" / f"rank{rank}.csv", index=False)
    for given in ("table.csv", "ranks"):
        report = load([tmp_path / given]).report
        assert (report.mesh.tp, report.mesh.cp, report.mesh.dp, report.mesh.pp) == (*mesh, 2)
        assert [rank.exposed_comm_ns for rank in report.steps[0].ranks] == [500_000] * 4


@pytest.mark.parametrize(("axis", "size"), [("dp", "4"), ("unknown", "2"), ("ep", "2")])
def test_replicas_that_no_axis_tells_are_left_open(tmp_path: Path, axis: str, size: str) -> None:
    report = load([write_csv(tmp_path / "table.csv", replicated(1, 2, axis, size))]).report
    assert report.mesh.dp is None
    assert [rank.bubble_ns for rank in report.steps[0].ranks] == [None] * 4
    assert any("add a column match, or dp_rank, tp_rank" in line for line in report.warnings)


@pytest.mark.parametrize(("ops", "comms"), [("device", "device"), ("host", "device"), ("device", ""), ("", "host")])
def test_communication_within_an_op_is_beside_it_where_both_are_on_the_device(
    tmp_path: Path, ops: str, comms: str
) -> None:
    """While rank 0's forward (0 to 100) runs it sends for 20 ns what rank 1 receives at once."""
    rows = [
        (0, "F", 0, 100, "", "", ops),
        (0, "send", 30, 50, "1", "F", comms),
        (1, "F", 20, 100, "", "", ops),
        (1, "recv", 30, 50, "0", "F", comms),
    ]
    table = pd.DataFrame(named("rank kind start_ns end_ns peer direction clock", rows))
    table = table.assign(step=0, microbatch=0, stage=table["rank"])
    report = load([write_csv(tmp_path / "table.csv", table)]).report
    first = report.steps[0].ranks[0]
    on_device = (ops, comms) == ("device", "device")
    assert (first.compute_ns, first.exposed_comm_ns) == ((100, 0) if on_device else (80, 20))
    assert [comm.hidden_ns for comm in first.comms] == [20 if on_device else 0]
    lines = [line for line in report.warnings if "taken out of compute (2 rows)" in line]
    assert len(lines) == (not on_device)


BAD = [
    ({"clock": ["gpu"]}, "row 1: clock 'gpu'; expected one of host, device"),
    ({"kind": ["X"]}, "row 1: kind 'X'; expected one of F, B"),
    ({"rank": ["first"]}, "row 1: rank 'first'; expected a whole number"),
    ({"rank": [-2]}, "row 1: rank '-2'; expected a whole number from 0"),
    ({"microbatch": [10**9]}, "row 1: microbatch '1000000000'; expected a whole number of at most 1000000"),
    ({"start_ns": ["soon"]}, "row 1: start_ns 'soon'; expected a time in ns"),
    ({"end_ns": [5]}, "row 1: ends at 5 ns, before its start at 10 ns"),
    ({"start_us": [1]}, "columns start_ns and start_us; expected one of them"),
    ({"microbatch": ["one"]}, "row 1: microbatch 'one'; expected a whole number"),
    ({"kind": ["OVERLAP_F_B"]}, "row 1: pair: '' is not an action"),
    (
        {"kind": ["F", "F"], "rank": [0, 0], "microbatch": [1, 1]},
        "row 2 is the same op as row 1 (rank 0, step 0, kind F",
    ),
    (
        {"kind": ["OPTIMIZER", "F", "OPTIMIZER"], "microbatch": ["", 0, ""]},
        "row 3 is the same as row 1 (rank 0, OPTIMIZER from 10 to 20 ns); expected each once",
    ),
    ({"step": [-2]}, "row 1: step '-2'; expected a whole number from 0, or nothing"),
    ({"start_ns": None}, "no column for the start (it has rank, step, kind"),
    ({"end_ns": None}, "no column for the end (it has rank, step, kind"),
    ({"rank": None}, "no column 'rank' (it has step, kind"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_table_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    num = max((len(values) for values in changes.values() if values), default=1)
    row = {"rank": 0, "step": 0, "kind": "F", "stage": 0, "microbatch": 0, "start_ns": 10, "end_ns": 20}
    columns = {name: [value] * num for name, value in row.items()} | changes
    path = write_csv(tmp_path / "table.csv", {name: values for name, values in columns.items() if values is not None})
    with pytest.raises(TraceError) as err:
        read_file(path, InputFormat.OPLOG)
    assert message in str(err.value)
    assert str(err.value).startswith(str(path))
    assert "\n" not in str(err.value)


@pytest.mark.parametrize(
    "content",
    [
        b"rank,kind,start_ns,end_ns\n",
        b"rank,kind,start_ns,end_ns\n0,F,1,2,3,4,5\n",
        b"PAR1 and no more",
        b"x" * 200_000,
        b"rank;kind;start_ns\n0;F;1\n",
        b'rank,kind,start_ns,end_ns\n0,"F,1,2\n',
        b"rank,kind,kind,start_ns,end_ns\n0,F,B,1,2\n",
        b'{"rank": 0, "kind": "F", "start_ns": 1, "end_ns": 2}\n{"rank": [0], "kind": "F", "start_ns": 1, "end_ns": 2}\n',
    ],
)
def test_damaged_tables_are_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError) as err:
        read_file(path, detect(first_bytes(path)))
    assert "\n" not in str(err.value)


@pytest.mark.parametrize("left", [1, 5, 12])
def test_of_a_table_that_was_cut_off_the_whole_rows_are_read(tmp_path: Path, left: int) -> None:
    """Cut within the last time, which then is before its start, and within a cell before."""
    whole = pd.DataFrame(columns_of(simulated("1f1b", 2, 2))).assign(start_ns=lambda rows: rows["start_ns"] + 10**15)
    text = whole.assign(end_ns=lambda rows: rows["end_ns"] + 10**15).to_csv(index=False)
    path = tmp_path / "table.csv"
    path.write_text(text.rstrip("\n"))
    assert sum(trace.info.num_events for trace in read_file(path, InputFormat.OPLOG)) == 8
    path.write_text(text.rstrip("\n")[:-left])
    traces = read_file(path, InputFormat.OPLOG)
    assert sum(trace.info.num_events for trace in traces) == 7
    assert [line for trace in traces for line in trace.warnings if "cut off in its last row" in line]
    path.write_text(text.rstrip("\n")[:-left] + "\n")
    with pytest.raises(TraceError, match="row 8: "):
        read_file(path, InputFormat.OPLOG)


def test_any_bytes_of_a_table_give_a_line_or_a_report(tmp_path: Path) -> None:
    good = pd.DataFrame(columns_of(simulated("1f1b", 2, 2))).to_csv(index=False).encode()
    test_fuzz.run([("fuzzed.csv", good)], test_fuzz.SEEDS, tmp_path)


# pptrace's own outputs


@pytest.mark.parametrize("name", ["1f1b_p4", *["1f1b_p2"] * ALL])
def test_the_tables_of_a_report_give_the_same_numbers_again(tmp_path: Path, name: str) -> None:
    first = load([SAMPLES / name], step=3)
    to_files.write_csv(first, tmp_path / "tables")
    again = load([tmp_path / "tables"], step=3)
    assert numbers(again.report) == numbers(first.report)
    assert (again.report.mesh.pp, again.report.schedule.name) == (first.report.mesh.pp, first.report.schedule.name)
    assert [info.format for info in again.report.inputs] == ["oplog"] * len(first.report.inputs)


def test_comms_are_read_with_their_ops_and_not_twice(tmp_path: Path) -> None:
    to_files.write_csv(load([SAMPLES / "1f1b_p4"], step=3), tmp_path)
    (tmp_path / "memory.csv").write_text("rank,t_ns,allocated_bytes,reserved_bytes\n0,5,6,7\n")
    wanted = [tmp_path / "ops.csv"]
    for paths in ([tmp_path], wanted, [tmp_path / "comms.csv", *wanted]):
        inputs = open_inputs(paths)
        assert ([file.path for file in inputs.files], inputs.warnings) == (wanted, ())
    traces = read_file(*wanted, InputFormat.OPLOG)
    assert [len(trace.comms) > 0 for trace in traces if trace.comms is not None] == [True] * 4
    assert [trace.memory.to_numpy().tolist() for trace in traces] == [[[0, 5, 6, 7]], [], [], []]


@pytest.mark.parametrize("kind", ["all_reduce", "F"])
def test_rows_in_any_order_may_be_of_ranks_that_have_only_communication_or_only_ops(tmp_path: Path, kind: str) -> None:
    call = {"rank": 0, "step": 3, "kind": "all_gather", "axis": "dp", "start_ns": 0, "end_ns": 9}
    rows = pd.concat([pd.DataFrame(columns_of(simulated("1f1b", 2, 4))), pd.DataFrame([call])], ignore_index=True)
    rows.loc[len(rows)] = {**call, "rank": 2, "kind": kind}
    path = write_csv(tmp_path / "ops.csv", rows.iloc[::-1])
    traces = read_file(path, InputFormat.OPLOG)
    rows_of = [[len(table) for table in (trace.ops, trace.comms) if table is not None] for trace in traces]
    assert rows_of == [[8, 1], [8, 0], [1, 0] if kind == "F" else [0, 1]]
    assert load([path]).report.steps


def test_the_json_of_a_report_is_read_again(tmp_path: Path) -> None:
    first: Analysis = load([SAMPLES / "1f1b_p4"])
    path = tmp_path / "report.json"
    path.write_text(dump(report_object(first.report, with_ops=True)))
    again = load([path]).report
    assert [step.span_ns for step in again.steps] == [step.span_ns for step in first.report.steps]
    assert [r.ops for s in again.steps for r in s.ranks] == [r.ops for s in first.report.steps for r in s.ranks]


def test_a_report_without_ops_says_how_to_get_them(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(dump(simulation_object(simulated("gpipe", 2, 2))))
    with pytest.raises(TraceError, match="without ops; expected them in it; write it with --ops as well"):
        load([path])


# ByteDance's straggler traces


def bytedance(seconds: list[tuple[int, str, int, float, float]], steps: Sequence[int] = (5,)) -> pd.DataFrame:
    """Rows of (pipeline rank, optype, k, start, duration) for two replicas, times in float32 seconds."""
    rows = [
        {
            **{"dp_rank": dp, "stage": stage, "rank": 2 * stage + dp, "step": step},
            **{"optype": optype, "start_ts": start, "duration": duration, "seq_id": k, "gmc": 0},
            **({"mc": 0, "mb_id": k} if optype.endswith("compute") else {"mc": -1, "mb_id": -1}),
        }
        for step in steps
        for dp in (0, 1)
        for stage, optype, k, start, duration in seconds
    ]
    return pd.DataFrame(rows).astype({"start_ts": "float32", "duration": "float32", "optype": "category"})


def write_parquet(path: Path, table: pd.DataFrame) -> None:
    """Write it as the study did: numbers of their own width, and a dictionary of the texts of a category."""
    categories = {name for name in table if table[name].dtype == "category"}
    columns = {str(name): table[name].tolist() if name in categories else table[name].to_numpy() for name in table}
    texts = {str(name): polars.Categorical for name in categories}
    polars.DataFrame(columns, schema_overrides=texts).write_parquet(path)


TWO_STAGES = [
    (0, "forward-compute", 0, 0.0, 1.0),
    (0, "forward-send", 0, 1.0, 0.25),
    (1, "forward-recv", 0, 0.0, 1.25),
    (1, "forward-compute", 0, 1.25, 1.0),
    (1, "backward-compute", 0, 2.25, 2.0),
    (1, "backward-send", 0, 4.25, 0.25),
    (0, "backward-recv", 0, 1.25, 3.25),
    (0, "backward-compute", 0, 4.5, 2.0),
    (0, "grads-reduce-scatter", 0, 6.5, 0.5),
    (1, "grads-reduce-scatter", 0, 4.5, 0.5),
    (0, "optimizer", 0, 7.0, 0.5),
]


def test_a_straggler_trace_has_messages_with_microbatches_and_steps_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_parquet(path, bytedance(TWO_STAGES, steps=(5, 9)))
    analysis = load([path])
    report = analysis.report
    assert (report.framework, report.mesh.pp, report.mesh.dp, report.mesh.num_ranks) == ("bytedance", 2, 2, 4)
    assert analysis.mesh.pipelines == ((0, 2), (1, 3))
    assert [step.step for step in report.steps] == [5, 9]
    assert report.steps[0].end_ns < report.steps[1].start_ns
    assert report.steps[0].span_ns == 6_500_000_000
    comms = analysis.data.comms
    messages = comms[comms["axis"] == "pp"]
    assert (messages["match"] >= 0).all()
    assert (messages["microbatch"] == 0).all()
    assert set(zip(messages["rank"], messages["peer"], strict=True)) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    first = report.steps[0].ranks[0]
    assert (first.compute_ns, first.exposed_comm_ns) == (3_000_000_000, 500_000_000)
    assert first.bubble_ns == 3_000_000_000
    assert (comms.loc[comms["kind"] == "reduce_scatter", "match"] >= 0).all()


def test_sums_of_128_bits_are_read_as_the_numbers_that_they_are(tmp_path: Path) -> None:
    columns = polars.DataFrame(columns_of(simulated("1f1b", 2, 2)))
    reports = []
    for name, dtype in (("narrow", polars.Int64), ("wide", polars.Int128)):
        (tmp_path / name).mkdir()
        columns.cast({"step": dtype, "start_ns": dtype, "end_ns": dtype}).write_parquet(tmp_path / name / "ops.parquet")
        reports.append(report_object(load([tmp_path / name / "ops.parquet"], cache=False).report, True)["steps"])
    assert reports[0] == reports[1]


def test_steps_that_took_no_time_have_no_parts(tmp_path: Path) -> None:
    columns = columns_of(simulated("1f1b", 2, 2)) | {"start_ns": [7] * 8, "end_ns": [7] * 8}
    (step,) = load([write_csv(tmp_path / "ops.csv", columns)], cache=False).report.steps
    assert (step.span_ns, step.causes, step.bubble.waterfall_ns) == (0, None, None)


def test_whole_numbers_of_a_parquet_file_with_gaps_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    times = [2**60 + 1, None]
    columns = {"kind": ["F", "send"], "posted_ns": times, "start_ns": [2**60 + 1, 2**60 + 3]}
    polars.DataFrame(columns).write_parquet(path)
    table = read_frame(path).rows
    assert table["posted_ns"].tolist() == times
    assert to_ns(table["start_ns"], "ns")[0].tolist() == [2**60 + 1, 2**60 + 3]


@pytest.mark.parametrize("part", [slice(100), slice(None, -9)])
def test_a_damaged_parquet_file_is_refused_in_one_line(tmp_path: Path, part: slice) -> None:
    path = tmp_path / "table.parquet"
    polars.DataFrame(columns_of(simulated("1f1b", 2, 4))).write_parquet(path)
    path.write_bytes(path.read_bytes()[part])
    with pytest.raises(TraceError, match="damaged Parquet") as refused:
        load([path])
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("column", "value"), [("duration", -0.5), ("start_ts", float("nan"))])
def test_a_straggler_trace_with_a_bad_time_is_refused_in_one_line(tmp_path: Path, column: str, value: float) -> None:
    table = bytedance(TWO_STAGES)
    table.loc[3, column] = value
    write_parquet(tmp_path / "trace.parquet", table)
    with pytest.raises(TraceError, match=r"row 4 has start_ts .*; expected seconds"):
        load([tmp_path / "trace.parquet"])


def test_bytedances_production_job_is_1f1b_with_a_long_last_stage(data: Path) -> None:
    path = data / "bytedance_straggler" / "trace-ST.parquet"
    analysis = load([path], step=264)
    report = analysis.report
    assert (report.schedule.name, report.schedule.num_microbatches, report.schedule.mismatches) == ("1f1b", 4, ())
    assert (report.mesh.pp, report.mesh.dp, report.mesh.num_ranks) == (4, 2, 8)
    assert analysis.data.ops["step"].nunique() == 32
    assert (analysis.data.comms["match"] >= 0).all()
    raw = read_frame(path).rows
    raw = raw[raw["optype"].isin(["forward-compute", "backward-compute"])].astype({"start_ts": "float64"})
    raw["end"] = raw["start_ts"] + raw["duration"].astype("float64")
    for step in report.steps:
        own = raw[raw["step"] == step.step]
        of_replicas = own.groupby("dp_rank")
        spans = of_replicas["end"].max() - of_replicas["start_ts"].min()
        assert step.span_ns == pytest.approx(spans.max() * 1e9, abs=2)
        for rank in step.ranks:
            seconds = own.loc[own["rank"] == rank.rank, "duration"].astype("float64").sum()
            assert rank.compute_ns == pytest.approx(seconds * 1e9, rel=1e-5)  # float32
            assert rank.bubble_ns is not None
        last = [rank.compute_ns for rank in step.ranks if rank.stage == 3]
        assert min(last) > 1.5 * max(rank.compute_ns for rank in step.ranks if rank.stage != 3)


# Primus' dumps


def primus(directory: Path, simulation: Simulation, ids: bool, iterations: int = 2, jitter_ms: float = 0.0) -> Path:
    """Write a run as Primus does: ms from each rank's own beginning of an iteration."""
    directory.mkdir()
    names = {"F": "fwd", "B": "bwd", "I": "bwd", "W": "wgrad"}
    for rank in simulation.ranks:
        iteration: dict[str, Any] = {"total": simulation.makespan_ns / 1e6, "memory": 2.0}
        for mode in ("fwd", "bwd", "wgrad"):
            own = [timed for timed in rank.timeline if names[timed.action.kind.value] == mode]
            iteration[f"{mode}_start"] = [timed.start / 1e6 + jitter_ms for timed in own]
            iteration[f"{mode}_end"] = [timed.end / 1e6 + jitter_ms for timed in own]
            if ids:
                iteration[f"{mode}_minibatch"] = [timed.action.microbatch for timed in own]
                iteration[f"{mode}_chunk"] = [timed.action.chunk for timed in own]
        document = {str(number + 1): iteration for number in range(iterations)}
        (directory / f"pp_rank_{rank.rank}.json").write_text(json.dumps(document))
    config = {"world_size": 2 * len(simulation.ranks), "dp_size": 2, "tp_size": 1, "pp_size": len(simulation.ranks)}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("name", "v", "ids"), [("1f1b", 1, False), ("interleaved-1f1b", 2, True), ("zbv", 2, True)])
def test_a_primus_dump_is_the_plan_it_came_from(tmp_path: Path, name: str, v: int, ids: bool) -> None:
    simulation = simulated(name, 4, 8, v)
    report = load([primus(tmp_path / "dump", simulation, ids)]).report
    assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("primus", name, ())
    assert (report.mesh.pp, report.mesh.vpp, report.mesh.dp) == (4, v, 2)
    assert [step.step for step in report.steps] == [1, 2]
    for step in report.steps:
        assert step.span_ns == pytest.approx(simulation.makespan_ns, abs=2)
        bubbles = [rank.bubble_ns for rank in simulation.ranks]
        assert [rank.bubble_ns for rank in step.ranks] == pytest.approx(bubbles, abs=100)
    assert report.steps[1].start_ns >= report.steps[0].end_ns


def test_memory_of_a_primus_dump_is_that_of_its_iterations(tmp_path: Path) -> None:
    """The first op of an iteration begins a little after the iteration itself."""
    report = load([primus(tmp_path / "dump", simulated("1f1b", 2, 4), ids=True, jitter_ms=0.05)]).report
    peaks = [(rank.peak_memory_bytes, rank.peak_memory_kind) for step in report.steps for rank in step.ranks]
    assert peaks == [(2 << 30, "device_reserved")] * 4


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1" + "0" * 30, "1" + "0" * 400, '"x"'])
def test_numbers_of_a_primus_dump_that_cannot_be_are_left_out_or_named(tmp_path: Path, number: str) -> None:
    directory = primus(tmp_path / "dump", simulated("1f1b", 2, 4), ids=True)
    path = directory / "pp_rank_0.json"
    whole = json.loads(path.read_text())
    (expected,) = read_file(path, InputFormat.OPLOG)
    for name in ("memory", "total", "fwd_minibatch", "fwd_start"):
        odd = ["@", *whole["1"][name][1:]] if isinstance(whole["1"][name], list) else "@"
        path.write_text(json.dumps({**whole, "1": {**whole["1"], name: odd}}).replace('"@"', number))
        if name == "fwd_start":
            with pytest.raises(TraceError, match="iteration 1: 'fwd_start' is no list of times"):
                read_file(path, InputFormat.OPLOG)
        else:
            (trace,) = read_file(path, InputFormat.OPLOG)
            assert len(trace.ops) == len(expected.ops)


def test_files_of_a_primus_dump_given_by_name_lie_as_those_of_the_directory(tmp_path: Path) -> None:
    directory = primus(tmp_path / "dump", simulated("interleaved-1f1b", 3, 6, 2), ids=True)
    by_name = load(sorted(directory.glob("pp_rank_*.json")))
    assert numbers(by_name.report) == numbers(load([directory]).report)


def test_the_real_primus_dump_idles_as_its_authors_say(data: Path) -> None:
    directory = data / "primus_pp_vis" / "pp8"
    analysis = load([directory], step=5)
    report = analysis.report
    assert (report.schedule.name, report.schedule.num_microbatches, report.mesh.pp) == ("1f1b", 16, 8)
    assert sorted(analysis.data.ops["step"].unique()) == list(range(1, 21))
    (step,) = report.steps
    assert step.bubble.ideal_share == pytest.approx(7 / 23)
    raw = [json.loads((directory / f"pp_rank_{rank}.json").read_text())["5"] for rank in range(8)]
    total = max(iteration["total"] for iteration in raw)
    for rank, own in zip(step.ranks, raw, strict=True):
        busy = sum(own["fwd_end"]) - sum(own["fwd_start"]) + sum(own["bwd_end"]) - sum(own["bwd_start"])
        assert rank.compute_ns == pytest.approx(busy * 1e6, abs=40)
        assert rank.bubble_ns == step.span_ns - rank.compute_ns
        assert rank.bubble_ns / step.span_ns == pytest.approx(1 - busy / total, abs=0.005)
        assert 0.29 < 1 - busy / total < 0.39


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "damaged JSON"),
        (lambda text: text.replace('"fwd_end": [', '"fwd_end": [1.0, '), "fwd has 3 starts and 4 ends"),
        (lambda text: text.replace('"bwd_end": [', '"bwd_end": ["x", '), "'bwd_end' is no list of times"),
    ],
)
def test_a_damaged_primus_dump_is_told_in_one_line(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = primus(tmp_path / "dump", simulated("1f1b", 2, 3), ids=False) / "pp_rank_0.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(TraceError, match=message) as err:
        load([path])
    assert "\n" not in str(err.value)
    report = load([path.parent]).report
    assert any(message in line for line in report.warnings)
    assert [info.rank for info in report.inputs] == [1]


def test_formats_are_told_by_their_first_bytes() -> None:
    assert detect(b"PAR1\x15\x04") is InputFormat.OPLOG
    assert detect(b"rank,step,kind,stage,start_us,end_us\n0,") is InputFormat.OPLOG
    assert detect(b'{"1": {"total": 3.0, "memory": 1, "fwd_start": [0.1], "bwd_start": []') is InputFormat.OPLOG
    assert detect(b'{\n "schema": "pptrace.report/1",') is InputFormat.OPLOG
    assert detect(b"0F0,0F1,,0B0\n") is None
    assert detect(b"name,kind,colour\n") is None


def test_a_straggler_trace_reads_the_same_as_csv(tmp_path: Path) -> None:
    table = bytedance(TWO_STAGES)
    write_parquet(tmp_path / "trace.parquet", table)
    table.to_csv(tmp_path / "trace.csv", index=False)
    assert numbers(load([tmp_path / "trace.csv"]).report) == numbers(load([tmp_path / "trace.parquet"]).report)
    table.drop(columns="seq_id").to_csv(tmp_path / "trace.csv", index=False)
    with pytest.raises(TraceError, match="no column 'seq_id'"):
        load([tmp_path / "trace.csv"])


@pytest.mark.parametrize(("column", "value"), [("rank", "e"), ("dp_rank", 10**9), ("step", -1), ("mb_id", "1.5")])
def test_a_straggler_trace_with_a_bad_number_is_refused_in_one_line(
    tmp_path: Path, column: str, value: str | int
) -> None:
    table = bytedance(TWO_STAGES).astype("object")
    table.loc[2, column] = value
    with pytest.raises(TraceError, match=f"row 3: {column} '{value}'; expected a whole number"):
        load([write_csv(tmp_path / "trace.csv", table)])


def test_an_empty_column_of_microbatches_is_read_as_none(tmp_path: Path) -> None:
    ops = simulate(registry.build("1f1b", 2, 3), uniform(100, 200)).ops().sort_values(["rank", "start_ns"])
    rows = ops[["rank", "kind", "stage", "start_ns", "end_ns"]]
    read = []
    for name, table in (("without", rows), ("empty", rows.assign(microbatch=""))):
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        read.append(load([tmp_path / f"{name}.csv"], cache=False).data.ops["microbatch"].tolist())
    assert read[0] == read[1]
    assert set(read[0]) == {0, 1, 2}


@pytest.mark.parametrize("first", ['"Kind","Agent_Id","Queue_Id","Kernel_Name"', '"Domain","Function","Process_Id"'])
def test_a_table_of_rocprofv3_says_what_to_record_instead(tmp_path: Path, first: str) -> None:
    path = tmp_path / "7_kernel_trace.csv"
    path.write_text(f'{first},"Correlation_Id","Start_Timestamp"\n"KERNEL_DISPATCH","Agent 4",1,"f",1\n')
    with pytest.raises(TraceError, match="rocprofv3's own CSV, which is not read; expected its database"):
        load([path])
