"""Comparisons of runs without a pipeline: parts in the words of their reports, which sum to the steps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.figures import WINDOW, StepFigures, figures_of
from pptrace.analysis.compare.matching import joined, lines_on_windows
from pptrace.analysis.compare.result import REMAINDER, Comparison
from pptrace.analysis.compare.side import ComparedRun
from pptrace.model.report_table import Amount
from pptrace.report.charts.changes import causes_of_both, changes_of_parts
from pptrace.report.tables.comparison import comparison_tables
from pptrace.workflow.compare import read_compared
from pptrace.workflow.load import load
from tests.analysis.test_idle_spans import LOADER, report_of
from tests.support.comparison import compare_runs
from tests.support.programs import SAMPLES

LOADS = ((LOADER, 100, 2_900),)
DDP = "rank,dp_rank,step,kind,axis,group_size,match,clock,start_ns,end_ns\n"


def run_of(folder: Path, *, device: bool = True, loads: bool = False, num_steps: int = 10) -> Path:
    """A trace of one rank with steps of 1 ms, or of 4 where it loads data."""
    folder.mkdir()
    report_of(folder, *[LOADS if loads else ()] * num_steps, steps=False, device=device)
    return folder / "rank0.json"


def ddp_of(path: Path, step_ns: int, num_steps: int = 10) -> Path:
    """A table of two ranks with an all-reduce in each step, of which the others are the rest: a table has no operators."""
    rows = []
    for step in range(num_steps):
        at, end = step * step_ns, (step + 1) * step_ns
        for rank in (0, 1):
            rows.append(f"{rank},{rank},{step},STEP,,,,host,{at},{end - 100}")
            rows.append(f"{rank},{rank},{step},all_reduce,dp,2,{step},device,{at + 500 + 10 * rank},{end - 200}")
    path.write_text(DDP + "\n".join(rows) + "\n")
    return path


def adding_up(found: Comparison) -> dict[str, tuple[int, int]]:
    """The parts that sum to the step, A's and B's; that they do."""
    parts = {part.name: (part.a_ns, part.b_ns) for part in found.parts if part.adds_up}
    assert sum(a for a, _ in parts.values()) == found.span.a_ns
    assert sum(b for _, b in parts.values()) == found.span.b_ns
    changes = [part.change_ns for part in found.parts if part.adds_up]
    assert sum(changes) == found.span.b_ns - found.span.a_ns
    return parts


def shares_of(verdict: str) -> dict[str, int]:
    """The shares of a report's sentence, percent, without the places in brackets."""
    return {name.strip(): int(share) for share, name in re.findall(r"(\d+)% ([^,;.(]+)", verdict)}


@pytest.mark.parametrize("device", [True, False])
def test_parts_are_those_of_the_reports_sentences_and_sum_to_the_steps(device: bool, tmp_path: Path) -> None:
    paths = [run_of(tmp_path / name, device=device, loads=name == "b") for name in "ab"]
    found = compare_runs(*map(read_compared, paths))
    parts = adding_up(found)
    for side, path in enumerate(paths):
        shares = shares_of(load([path]).report.verdict)
        assert {"compute"} < set(shares) <= set(parts)
        length = (found.span.a_ns, found.span.b_ns)[side]
        assert all(
            parts[name][side] / length == pytest.approx(share / 100, abs=0.006) for name, share in shares.items()
        )
    assert parts["loading of data"] == (0, 2_900_000)
    assert "bubble" not in {part.name for part in found.parts}
    assert found.detail.endswith("; of its parts loading of data changed most, +2.90 ms")


def test_ranks_that_wait_for_each_other_have_the_parts_of_their_sentence(tmp_path: Path) -> None:
    paths = [ddp_of(tmp_path / f"{step}.csv", step) for step in (2_000, 3_000)]
    found = compare_runs(*map(read_compared, paths))
    parts = adding_up(found)
    assert parts["exposed communication"] == (1_290, 2_290)
    assert parts["waiting for other ranks, input and Python"] == (610, 610)
    assert parts["outside the ranks' windows"] == (100, 100)
    assert "68% exposed communication, 32% waiting for other ranks, input and Python" in load([paths[0]]).report.verdict


def test_a_run_with_a_pipeline_has_in_common_what_any_step_has(tmp_path: Path) -> None:
    piped, plain = read_compared(SAMPLES / "1f1b_p2"), read_compared(run_of(tmp_path / "plain", device=False))
    found = compare_runs(piped, plain)
    assert set(adding_up(found)) - {REMAINDER} == {
        *("compute", "exposed communication", "rest", "outside the ranks' windows")
    }
    assert not {"bubble", "cause"} & {part.name for part in found.parts}
    assert "B has no pipeline: compute of stages, bubbles and causes of A are not compared" in " ".join(found.warnings)
    (line,) = (line for line in found.warnings if line.startswith("rest is one part"))
    assert "in A bubble; in B between operators" in line
    assert not any("it is not known in B" in line for line in found.warnings)
    back = compare_runs(plain, piped)
    assert adding_up(back) == {name: (b, a) for name, (a, b) in adding_up(found).items()}


def test_what_a_step_was_spent_on_is_not_compared_where_one_run_does_not_tell_it(tmp_path: Path) -> None:
    path = run_of(tmp_path / "a")
    analysis = load([path])
    ranks = [replace(step.ranks[0], compute_ns=None, bubble_ns=None) for step in analysis.report.steps]
    steps = tuple(replace(step, ranks=(rank,)) for step, rank in zip(analysis.report.steps, ranks, strict=True))
    unknown = ComparedRun(figures_of(replace(analysis.report, steps=steps), analysis.data), "unknown", 1)
    found = compare_runs(unknown, read_compared(path))
    assert not any(part.adds_up for part in found.parts)
    assert "what a step was spent on is not known in A: no parts that sum to it are compared" in found.warnings
    nothing = replace(found, parts=())
    assert comparison_tables(nothing, Amount.BRIEF)[0].notes[0] == "no part is known of both"


def test_whether_parts_differ_is_not_known_of_devices_against_hosts(tmp_path: Path) -> None:
    on_device, on_host = (read_compared(run_of(tmp_path / name, device=name == "a")) for name in "ab")
    found = compare_runs(on_device, on_host)
    assert {part.significant for part in found.parts if part.adds_up} == {None}
    marks = {part.name: part.significant for part in compare_runs(on_device, on_device).parts if part.adds_up}
    assert marks["compute"] is False


def test_parts_are_those_of_the_steps_in_the_middle_by_length_of_which_they_are_known() -> None:
    """Of nine steps that count five are in the middle; in three of these the device waits, and in no step else."""
    lengths = np.array([10, 11, 12, 13, 14, 15, 16, 17, 18, 99], dtype=np.int64) * 1_000
    waits = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, np.nan]) * 5_000
    place = {name: (("part" if name != "gaps" else "rest", name),) for name in ("compute", "waiting", "gaps")}
    parts = {place["compute"]: lengths - 500 - waits, place["waiting"]: waits, place["gaps"]: 0 * waits + 500}
    figures = StepFigures(None, lengths, {WINDOW: parts}, period=lengths, has_pipeline=False)
    run = ComparedRun(figures, "unknown", 1)
    assert adding_up(compare_runs(run, run)) == {
        **{"compute": (10_500, 10_500), "waiting": (3_000, 3_000), "gaps": (500, 500)},
    }


@pytest.mark.parametrize("lacking", [(1,), (0, 1)])
def test_a_step_of_which_less_is_known_on_some_or_all_ranks_has_no_parts(
    lacking: tuple[int, ...], tmp_path: Path
) -> None:
    analysis = load([ddp_of(tmp_path / "a.csv", 2_000)])
    first, *others = analysis.report.steps
    ranks = tuple(
        replace(rank, exposed_comm_ns=None, bubble_ns=None) if rank.rank in lacking else rank for rank in first.ranks
    )
    steps = (replace(first, ranks=ranks), *others)
    figures = figures_of(replace(analysis.report, steps=steps), analysis.data)
    assert {name for ((_, name),) in figures.parts[WINDOW]} == {
        *("compute", "exposed communication", "waiting for other ranks, input and Python")
    }
    for series in figures.parts[WINDOW].values():
        assert np.isnan(series).tolist() == [True] + [False] * (len(series) - 1)
    run = ComparedRun(figures, "unknown", 2)
    assert "exposed communication" in adding_up(compare_runs(run, run))


def test_a_run_that_tells_no_part_more_says_so(tmp_path: Path) -> None:
    """Of one of A's two runs exposed communication is not known."""
    analyses = [load([ddp_of(tmp_path / f"{step}.csv", step)]) for step in (2_000, 3_000)]
    known = [figures_of(each.report, each.data) for each in analyses]
    steps = tuple(
        replace(step, ranks=tuple(replace(rank, exposed_comm_ns=None, bubble_ns=None) for rank in step.ranks))
        for step in analyses[1].report.steps
    )
    lacking = figures_of(replace(analyses[1].report, steps=steps), analyses[1].data)
    (line,) = lines_on_windows(joined([known[0], lacking]), known[1])
    assert "in A no more; in B exposed communication, waiting" in line


def test_the_first_table_ends_with_the_step_and_has_parts_of_parts_behind_it(tmp_path: Path) -> None:
    paths = [run_of(tmp_path / name, loads=name == "b") for name in "ab"]
    found = compare_runs(*map(read_compared, paths))
    steps, summed, within = comparison_tables(found, Amount.WHOLE)[:3]
    assert (summed.title, within.title) == ("Parts that sum to the step", "Within these parts")
    assert summed.rows[0][0] == "loading of data"
    assert summed.rows[-1][:3] == ("step", steps.rows[0][2], steps.rows[1][2])
    assert sum(float(row[3]) for row in summed.rows[:-1]) == pytest.approx(float(summed.rows[-1][3]), abs=0.02)
    assert ("device idle", "not launched") in [row[:2] for row in within.rows]
    assert not any("microbatch" in note for table in (summed, within) for note in table.notes)


def test_the_pictures_have_the_parts_that_sum_to_the_step_and_not_what_is_in_them(tmp_path: Path) -> None:
    found = compare_runs(*(read_compared(run_of(tmp_path / name, loads=name == "b")) for name in "ab"))
    both, changes = causes_of_both(found), changes_of_parts(found)
    assert both.layout.xaxis.title.text == "ms"
    assert {"compute", "loading of data"} <= set(both.layout.yaxis.ticktext)
    assert "loading of data" in changes.layout.yaxis.ticktext
    assert not any("device idle" in name for name in changes.layout.yaxis.ticktext)
