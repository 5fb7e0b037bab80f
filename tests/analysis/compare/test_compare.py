"""Comparisons of tables of ops of which it is known what differs, read as a user's files are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from msgspec import structs

from pptrace.analysis.compare.compare import shows
from pptrace.analysis.compare.figures import Place, figures_of
from pptrace.analysis.compare.recording import RecordedBoth, Recording
from pptrace.analysis.compare.result import Comparison, PartChange, Work
from pptrace.analysis.compare.side import ComparedRun
from pptrace.cli.main import cli
from pptrace.model.report_table import Amount
from pptrace.report.tables.comparison import comparison_tables
from pptrace.schedule.registry import build
from pptrace.workflow.compare import compared_run, read_compared
from pptrace.workflow.load import load
from tests.support.analysed import analyse
from tests.support.comparison import compare_runs
from tests.support.extent import ALL
from tests.support.noisy_runs import LATENCY_NS, Noise, NoisyRun
from tests.support.programs import SAMPLES
from tests.support.synthetic import record, renamed
from tools.compare_table import NOISES, alarms_of

RUN = NoisyRun()
RUN_PLAN = build("1f1b", 2, 4)
KERNEL_GAP_NS = 3
"""Time between the two kernels of an op of :mod:`tests.support.synthetic`."""


def _other_name(name: str) -> str:
    """Another name for kernels that compute."""
    return {"gemm_f16": "nvjet_hsh_128x256", "layer_norm": "triton_red_fused_3"}.get(name, name)


def compared(folder: Path, a: NoisyRun, b: NoisyRun) -> Comparison:
    """A and B of seeds 0 and 1, whose tables are in the folder."""
    return compare_runs(*(_read(folder / f"{seed}.csv", run, seed) for seed, run in enumerate((a, b))))


READ: dict[tuple[NoisyRun, int], ComparedRun] = {}


def _read(path: Path, run: NoisyRun, seed: int) -> ComparedRun:
    """Most tests have the same A: it is read once."""
    run.write(path, seed)
    if (run, seed) not in READ:
        READ[run, seed] = read_compared(path)
    return structs.replace(READ[run, seed], name=str(path))


def part(comparison: Comparison, name: str, **where: int | str) -> PartChange:
    return next(part for part in comparison.parts if part.name == name and part.where == where)


def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    run = read_compared(RUN.write(tmp_path / "a.csv", 0))
    same = compare_runs(run, run)
    assert same.verdict == "no difference"
    assert same.span.change == 0
    assert same.span.low < 0 < same.span.high
    assert not any(part.significant for part in same.parts)
    assert same.facts == ()
    assert same.work == Work(True, "the same steps, to the nanosecond")
    assert same.warnings[0].startswith(
        "A and B have the same steps, to the nanosecond: they are one recording, or copies"
    )


def test_steps_of_two_schedules_that_last_as_long_are_no_copies(tmp_path: Path) -> None:
    runs = []
    for name in ("gpipe", "1f1b"):
        path = tmp_path / f"{name}.json"
        args = ["simulate", name, "--pp", "4", "--microbatches", "8", "--ops", "--json", str(path)]
        assert CliRunner().invoke(cli, args).exit_code == 0
        runs.append(read_compared(path))
    found = compare_runs(*runs)
    assert (found.span.change, found.work.is_same) == (0, None)
    assert not any("copies" in line for line in found.warnings)


@pytest.mark.parametrize("name", list(NOISES) if ALL else list(NOISES)[3:4])
def test_two_percent_are_found_and_nothing_where_nothing_changed(name: str, tmp_path: Path) -> None:
    """A fast part of tools/compare_table.py, which counts a hundred pairs of each kind of noise."""
    counts = alarms_of(NoisyRun(NOISES[name]), 2, tmp_path)
    assert counts.alarms == 0
    assert counts.found == counts.pairs == 2


def test_the_typical_steps_are_those_of_the_reports_and_the_other_way_round_is_the_opposite(tmp_path: Path) -> None:
    slower = replace(RUN, slower=0.03)
    there = compared(tmp_path, RUN, slower)
    for seed, ns in ((0, there.span.a_ns), (1, there.span.b_ns)):
        steps = load([tmp_path / f"{seed}.csv"]).report.steps
        lengths = sorted(step.period_ns for step in steps if step.period_ns is not None)
        assert len(lengths) == len(steps) - 1, "nothing marks when the last one ends"
        assert lengths[(len(lengths) - 1) // 2] == ns
    back = compare_runs(*(read_compared(tmp_path / f"{seed}.csv") for seed in (1, 0)))
    assert (there.verdict, back.verdict) == ("slower", "faster")
    assert (1 + there.span.change) * (1 + back.span.change) == pytest.approx(1)
    assert there.span.change == pytest.approx(0.03, abs=0.006)


def test_a_slower_stage_is_the_part_that_changed_most(tmp_path: Path) -> None:
    """Only the ops of stage 2 are longer: no other stage's compute changes, and what waits for it does."""
    found = compared(tmp_path, RUN, replace(RUN, slower_stage=(2, 0.1)))
    assert found.verdict == "slower"
    assert "compute B, stage 2" in found.detail
    significant = {
        (part.where["kind"], part.where["stage"]) for part in found.parts if part.name == "compute" and part.significant
    }
    assert significant == {("F", 2), ("B", 2)}
    backward = part(found, "compute", kind="B", stage=2)
    assert backward.change_ns == backward.b_ns - backward.a_ns
    assert backward.change_ns == pytest.approx(0.1 * backward.a_ns, rel=0.05)
    assert part(found, "cause", cause="imbalance").significant


def test_other_schedules_are_compared_by_what_both_have(tmp_path: Path) -> None:
    found = compared(tmp_path, RUN, replace(RUN, schedule="zb-h1"))
    assert found.verdict == "faster"
    assert part(found, "compute", kind="B", stage=3).b_ns == pytest.approx(16_000_000, rel=0.02)  # I and W together
    assert part(found, "bubble", phase="cooldown").significant
    assert ("schedule", "1f1b", "zb-h1") in [(fact.name, fact.a, fact.b) for fact in found.facts]


def test_of_tables_without_sizes_nothing_says_which_is_faster(tmp_path: Path) -> None:
    found = compared(tmp_path, RUN, replace(RUN, slower=0.03))
    assert found.work == Work(None, "batch and model are not known of A and B")
    about_work = "Nothing says whether A and B do the same work in a step (batch and model are not known of A and B), "
    assert found.detail.startswith(f"{about_work}and so which is faster. Steps of B are longer: a typical step takes ")
    assert not {"faster", "slower"} & set(found.detail.partition("faster. ")[2].split())
    known = [
        structs.replace(READ[run, seed], facts={"script": "a.py"})
        for seed, run in enumerate((RUN, replace(RUN, slower=0.03)))
    ]
    assert compare_runs(*known).detail.startswith("B is slower: a typical step takes ")


def test_other_numbers_of_ranks_are_compared_by_kind(tmp_path: Path) -> None:
    found = compared(tmp_path, RUN, replace(RUN, pp=2))
    places = [part.where for part in found.parts if part.name == "compute"]
    assert sorted(places, key=str) == [{"kind": "B"}, {"kind": "F"}]
    assert any(line.startswith("A has 4 ranks and B 2") for line in found.warnings)


def test_what_a_table_does_not_have_is_not_0(tmp_path: Path) -> None:
    """A table without messages knows nothing of communication, neither exposed nor as a cause."""
    traced, table = read_compared(SAMPLES / "1f1b_p4"), read_compared(RUN.write(tmp_path / "a.csv", 0))
    found = compare_runs(traced, table)
    assert not [part for part in found.parts if "communication" in (part.name, part.where.get("cause"))]
    assert not [part for part in found.parts if part.name == "exposed communication"]
    assert any(line.startswith("exposed communication is not compared where one run alone") for line in found.warnings)
    both = compare_runs(traced, traced)
    assert {"exposed communication", "cause"} <= {part.name for part in both.parts}


def test_compute_of_a_rank_whose_trace_ends_early_is_not_0_in_the_steps_that_it_lacks(tmp_path: Path) -> None:
    ops = RUN.ops(0)
    first = (ops["step"] == 0) & (ops["microbatch"] == 0) & (ops["kind"] == "F")
    ops[(ops["rank"] < 3) | first].to_csv(tmp_path / "cut.csv", index=False)
    found = compare_runs(
        read_compared(tmp_path / "cut.csv"), read_compared(RUN.write(tmp_path / "whole.csv", 1), cache=False)
    )
    of_stages = {part.where["stage"]: part for part in found.parts if part.name == "compute"}
    assert 2 in of_stages
    assert all(part.a_ns > 0 for part in of_stages.values())
    assert not any(part.significant for part in of_stages.values())


def test_few_steps_are_little_evidence_and_say_so() -> None:
    found = compare_runs(*(read_compared(SAMPLES / name) for name in ("1f1b_p2", "1f1b_p4")))
    assert found.verdict == "slower"
    assert found.span.low == pytest.approx(1.22, abs=0.01)
    assert found.span.change == pytest.approx(78156585 / 24712227 - 1)
    assert "which is faster. Steps of B are longer: a typical step takes 24.71 ms in A and 78.16 ms" in found.detail
    assert found.warnings[0].startswith("little evidence: A has 2 whole steps, B has 2 whole steps, and from 8 on")
    assert {part.significant for part in found.parts if part.name != "compute"} == {None}


def test_the_sentence_has_the_numbers_of_the_tables(tmp_path: Path) -> None:
    """Steps of more than a second, of which tables and pictures have whole milliseconds."""
    files = [replace(RUN, slower=slower).write(tmp_path / f"{slower}.csv", 0) for slower in (0, 0.5)]
    for file in files:
        rows = pd.read_csv(file)
        rows[["start_ns", "end_ns"]] *= 200
        rows.to_csv(file, index=False)
    found = compare_runs(*map(read_compared, files))
    steps, parts = comparison_tables(found, Amount.WHOLE)[:2]
    spans = [row[2] for row in steps.rows]
    assert "." not in "".join(spans)
    assert f"takes {spans[0]} ms in A and {spans[1]} ms in B" in found.detail
    changes = [row[4] for row in parts.rows if row[0] != "cause"]
    assert found.detail.endswith(f"changed most, {changes[0]} ms")


def test_renamed_kernels_still_match() -> None:
    """On devices: every kernel that computes has another name in B, whose ops take twice as long."""
    usual, longer = (
        record(RUN_PLAN, lambda action, ns=ns: ns, 100, steps=10, device=True).traces() for ns in (1000, 2000)
    )
    others = [renamed(trace, _other_name) for trace in longer]
    assert not {"gemm_f16", "layer_norm"} & {name for trace in others for name in trace.events.names}
    found = compare_runs(compared_run(analyse(usual), "A"), compared_run(analyse(others), "B"))
    for kind in ("F", "B"):
        for stage in range(2):
            of_stage = part(found, "compute", kind=kind, stage=stage)
            assert (of_stage.a_ns, of_stage.b_ns) == (4 * (1000 - KERNEL_GAP_NS), 4 * (2000 - KERNEL_GAP_NS))
            assert of_stage.significant
    assert any(part.name == "device idle" for part in found.parts)


def test_ranks_whose_times_do_not_compare_have_their_own_windows() -> None:
    analysis = load([SAMPLES / "1f1b_p4"])
    steps = tuple(structs.replace(step, causes=None, span_ns=None) for step in analysis.report.steps)
    figures = figures_of(structs.replace(analysis.report, steps=steps), analysis.data)
    assert figures.span is None
    run = ComparedRun(figures, "1f1b", 4)
    found = compare_runs(run, run)
    means = [sum(rank.window_ns for rank in step.ranks) / 4 for step in steps]
    assert found.span.a_ns == pytest.approx(min(means), abs=1)
    assert any("do not compare: steps are as long as the mean" in line for line in found.warnings)


def test_waiting_for_a_core_is_said() -> None:
    run = read_compared(SAMPLES / "1f1b_p4")
    found = compare_runs(structs.replace(run, core_wait=0.02), structs.replace(run, core_wait=0.11))
    waited = "ranks waited for a core (B for 11.0% of the time, the threads of each added up)"
    assert any(line.startswith(waited) for line in found.warnings)


def test_lines_about_one_run_name_it_and_those_about_both_come_once() -> None:
    run = read_compared(SAMPLES / "1f1b_p4")
    of_a, of_b = (
        structs.replace(run, warnings=lines) for lines in (("cut off", "no clock"), ("no clock", "no device"))
    )
    assert compare_runs(of_a, of_b).warnings[-3:] == ("A: cut off", "A and B: no clock", "B: no device")


@pytest.mark.parametrize(
    ("a", "b", "is_shown"),
    [([0, 0], [0, 3], True), ([2, np.nan], [0, 0], True), ([0, 0.4], [0, 0], False), ([np.nan], [0], False)],
)
def test_a_part_shows_where_it_is_not_0_in_any_step(a: list[float], b: list[float], is_shown: bool) -> None:
    assert shows(np.array(a, dtype=np.float64), np.array(b, dtype=np.float64)) is is_shown


def test_where_ranks_waited_for_cores_steps_are_compared_without_what_disturbed_them(tmp_path: Path) -> None:
    """Ops of B are disturbed three times as often as those of A, whose median therefore is of other steps."""
    calm, busy = (NoisyRun(Noise(ops=0.002, long_ops=often)) for often in (0.05, 0.15))
    read = [
        structs.replace(read_compared(run.write(tmp_path / f"{seed}.csv", seed)), core_wait=0.5)
        for seed, run in enumerate((calm, busy, replace(busy, slower=0.02)))
    ]
    same, slower = compare_runs(read[0], read[1]), compare_runs(read[0], read[2])
    alone = (8 + 4 - 1) * 3 * 1_000_000  # (m + p − 1)(F + B), and messages
    assert (same.verdict, slower.verdict) == ("no difference", "slower")
    assert same.span.is_undisturbed
    assert same.span.a_ns == pytest.approx(alone, rel=0.03)
    assert slower.span.change == pytest.approx(0.02, abs=0.003)
    assert part(slower, "compute", kind="B", stage=2).significant
    assert not any(one.significant for one in same.parts if one.name == "compute")
    line = next(line for line in same.warnings if "waited for a core" in line)
    assert f"typical ones took {np.sort(read[0].figures.lengths)[24] / 1e6:,.2f} ms in A" in line
    assert "undisturbed step" in same.detail


def _with_messages(ops: pd.DataFrame) -> pd.DataFrame:
    """A table of 1F1B's ops with both ends of every message, sent at the end of the op that makes it."""
    is_forward = ops["kind"] == "F"
    sent = ops[np.where(is_forward, ops["stage"] < ops["stage"].max(), ops["stage"] > 0)]
    hop = np.where(sent["kind"] == "F", 1, -1)
    shared = {
        **{name: sent[name] for name in ("step", "microbatch")},
        "direction": sent["kind"],
        "start_ns": sent["end_ns"],
        "end_ns": sent["end_ns"] + LATENCY_NS,
        "match": np.arange(len(sent)),
    }
    here, there = sent["rank"], sent["rank"] + hop
    ends = [
        pd.DataFrame({"kind": "send", "rank": here, "stage": here, "peer": there, **shared}),
        pd.DataFrame({"kind": "recv", "rank": there, "stage": there, "peer": here, **shared}),
    ]
    return pd.concat([ops, *ends], ignore_index=True)


def test_what_differs_because_one_run_has_no_messages_is_not_marked(tmp_path: Path) -> None:
    ops = RUN.ops(0)
    ops.to_csv(tmp_path / "without.csv", index=False)
    _with_messages(ops).to_csv(tmp_path / "with.csv", index=False)
    found = compare_runs(*(read_compared(tmp_path / f"{name}.csv") for name in ("with", "without")))
    assert any(abs(part.change_ns) > 100_000 for part in found.parts)
    assert {part.significant for part in found.parts if part.name in ("compute", "bubble", "cause")} == {None}
    assert found.span.low is not None
    line = next(line for line in found.warnings if line.startswith("transfers are known of 100%"))
    assert "and of 0% in B" in line
    both = compare_runs(*(read_compared(tmp_path / "with.csv") for _ in range(2)))
    assert {part.significant for part in both.parts} == {False}
    assert not any("transfers are known" in line for line in both.warnings)


def recorded(known_transfers: float | None, *, has_devices: bool = False) -> Recording:
    return Recording(known_transfers=known_transfers, has_devices=has_devices)


_WITHOUT, _WITH, _ON_DEVICES = recorded(0.0), recorded(1.0), recorded(1.0, has_devices=True)


@pytest.mark.parametrize(
    ("a", "b", "hidden"),
    [
        (_WITH, _WITH, set()),
        (_WITH, recorded(0.995), set()),
        (_WITH, recorded(None), set()),
        (_WITH, _WITHOUT, {"compute", "bubble", "unexplained", "structural"}),
        (_ON_DEVICES, recorded(0.0, has_devices=True), {"bubble", "unexplained"}),
        (_ON_DEVICES, _WITH, {"compute", "bubble", "exposed communication", "unexplained", "structural"}),
    ],
)
def test_parts_that_the_recording_changes_are_those_of_waits_or_of_all_ops(
    a: Recording, b: Recording, hidden: set[str]
) -> None:
    causes = ("unexplained", "structural")
    places: dict[str, tuple[str, Place]] = {cause: ("cause", (("cause", cause),)) for cause in causes}
    places |= {name: (name, ()) for name in ("compute", "bubble", "exposed communication", "range", "device idle")}
    for pair in (RecordedBoth(a, b), RecordedBoth(b, a)):
        assert {name for name, place in places.items() if pair.hides(*place)} == hidden
        assert len(list(pair.lines())) == bool(hidden)
