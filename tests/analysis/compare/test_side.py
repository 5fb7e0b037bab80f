"""Several runs of each side: read, joined, distinguished from other programs, and compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.compare import compare_sides
from pptrace.analysis.compare.facts import differing
from pptrace.analysis.compare.figures import CAUSE, EXPOSED, Place, StepFigures
from pptrace.analysis.compare.matching import joined
from pptrace.analysis.compare.result import Comparison
from pptrace.analysis.compare.side import ComparedRun
from pptrace.errors import TraceError
from pptrace.model.report_table import Amount
from pptrace.report.tables.comparison import comparison_tables
from pptrace.workflow.compare import read_compared
from tests.support.comparison import compare_runs
from tests.support.noisy_runs import Noise, NoisyRun

STEPS = 20
SHORT = NoisyRun(Noise(runs=0.01), steps=STEPS)
AXIS: Place = (("axis", "pp"), ("kind", "send"))
STRAGGLER: Place = (("cause", "straggler"),)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[ComparedRun]:
    """Ten runs of one program, which differ from start to start by 1 %."""
    folder = tmp_path_factory.mktemp("runs")
    return [read_compared(SHORT.write(folder / f"{seed}.csv", seed)) for seed in range(10)]


def several(runs: list[ComparedRun]) -> Comparison:
    return compare_sides(runs[:5], runs[5:])


def test_runs_that_differ_from_start_to_start_are_not_called_different(runs: list[ComparedRun]) -> None:
    """Of single pairs of the same runs some are: how much runs differ is in none of them."""
    alone = [compare_runs(a, b).verdict for a, b in zip(runs[:5], runs[5:], strict=True)]
    assert any(verdict != "no difference" for verdict in alone)
    found = several(runs)
    assert found.verdict == "no difference"
    assert not any(part.significant for part in found.parts)
    assert (found.num_runs.a, found.num_runs.b) == (5, 5)
    assert (found.num_steps.a, found.num_steps.b) == (5 * (STEPS - 1), 5 * (STEPS - 1)), (
        "nothing marks when the last one ends"
    )


def test_the_text_says_how_many_runs_there_are_and_what_they_differ_by(runs: list[ComparedRun]) -> None:
    found = several(runs)
    assert "5 runs of each" in found.detail
    assert "1 run of A, 3 runs of B" in compare_sides(runs[:1], runs[1:4]).detail
    (steps, *_) = comparison_tables(found, Amount.BRIEF)
    assert steps.columns[-2:] == ("runs", "run to run")
    assert steps.rows[0][-2:] == ("5", f"{found.run_to_run.a:.2%}")
    (alone, *_) = comparison_tables(compare_runs(*runs[:2]), Amount.BRIEF)
    assert "runs" not in alone.columns
    assert any("one run of each does not show how much runs differ" in note for note in alone.notes)
    against_one = comparison_tables(compare_sides(runs[:1], runs[1:4]), Amount.BRIEF)[0]
    assert against_one.rows[0][-2:] == ("1", "–")


def timed(runs: list[ComparedRun], places: tuple[int, ...]) -> list[ComparedRun]:
    """The runs as if they had been taken at these places in time."""
    return [replace(run, period=(10 * place, 10 * place + 9)) for run, place in zip(runs, places, strict=True)]


def test_runs_that_were_not_taken_in_turns_are_a_warning_and_in_turns_a_trend_is_taken_out(
    runs: list[ComparedRun],
) -> None:
    after = compare_sides(timed(runs[:4], (0, 1, 2, 3)), timed(runs[4:8], (4, 5, 6, 7)))
    assert any(line.startswith("the runs of A were taken before those of B") for line in after.warnings)
    before = compare_sides(timed(runs[:4], (4, 5, 6, 7)), timed(runs[4:8], (0, 1, 2, 3)))
    assert any(line.startswith("the runs of B were taken before those of A") for line in before.warnings)
    assert after.trend is None
    turns = compare_sides(timed(runs[:4], (0, 2, 4, 6)), timed(runs[4:8], (1, 3, 5, 7)))
    assert not any("taken before" in line for line in turns.warnings)
    notes = comparison_tables(turns, Amount.BRIEF)[0].notes
    assert f"taken out: a change of {turns.trend:+.2%} from each run to the next, whichever side it is of" in notes


def test_runs_of_different_programs_are_refused_in_one_line(runs: list[ComparedRun]) -> None:
    for other, what in (
        (replace(runs[1], schedule="gpipe"), "has schedule gpipe"),
        (replace(runs[1], num_ranks=2), "has ranks 2"),
        (replace(runs[1], facts={"microbatches": "16"}), "has microbatches 16"),
        (
            replace(runs[1], facts=runs[0].facts, figures=replace(runs[1].figures, parts={})),
            "has steps without known causes",
        ),
    ):
        with pytest.raises(TraceError, match=rf"B: .*1.csv {what} and .*0.csv"):
            compare_sides(runs[2:4], [runs[0], other])
    compare_sides([runs[0]], [replace(runs[1], schedule="gpipe")])


def test_copies_of_a_run_are_refused_in_one_line(runs: list[ComparedRun]) -> None:
    with pytest.raises(TraceError, match=r"A: copy has the steps of .*0.csv, to the nanosecond"):
        compare_sides([runs[0], runs[1], replace(runs[0], name="copy")], runs[2:3])
    assert compare_sides(runs[:3], runs[:3]).verdict == "no difference"  # a side as it is against itself


def test_lines_that_differ_in_numbers_alone_are_one_of_a_side(runs: list[ComparedRun]) -> None:
    of_a = [replace(run, warnings=(f"took {index}.5 s", "cut off")) for index, run in enumerate(runs[:3])]
    of_b = [
        replace(runs[3], warnings=("rank 1 lacks it", "rank 2 lacks it")),
        replace(runs[4], warnings=("cut off",)),
    ]
    assert compare_sides(of_a, of_b).warnings[-4:] == (
        "A (3 of 3 runs, numbers are of the first): took 0.5 s",
        "A and B (1 of 2 runs): cut off",
        "B (1 of 2 runs): rank 1 lacks it",
        "B (1 of 2 runs): rank 2 lacks it",
    )


def test_few_steps_of_a_run_are_a_warning(runs: list[ComparedRun], tmp_path: Path) -> None:
    short = read_compared(dataclasses.replace(SHORT, steps=1).write(tmp_path / "short.csv", 99))
    found = compare_sides([runs[0], short], runs[1:3])
    assert found.span.low is None
    assert any("A has a run of 1 whole step" in line for line in found.warnings)
    assert found.run_to_run.a is None


def test_waits_for_cores_are_those_of_the_run_that_waited_most(runs: list[ComparedRun]) -> None:
    waiting = [replace(run, core_wait=share) for run, share in zip(runs[:2], (0.01, 0.11), strict=True)]
    line = next(line for line in compare_sides(waiting, runs[2:4]).warnings if "waited for a core" in line)
    assert "(A for up to 11.0% of the time, the threads of each added up)" in line
    assert "as the runs themselves show" in line


def test_facts_that_differ_within_a_side_show_all_their_values() -> None:
    a = [{"host": "one", "seed": "1"}, {"host": "two", "seed": "1"}]
    found = {fact.name: (fact.a, fact.b) for fact in differing(a, [{"host": "one"}, {"host": "two", "seed": "1"}])}
    assert found == {"host": ("one, two", "one, two"), "seed": ("1", "1 (not in 1 of 2 runs)")}
    waits = [{"waited for a core": f"{share}% of the time"} for share in ("10.0", "2.0", "3.5")]
    (wait,) = differing(waits, waits[:1])
    assert (wait.a, wait.b) == ("2.0% to 10.0% of the time", "10.0% of the time")


def figures(parts: dict[str, dict[Place, np.ndarray[tuple[int], np.dtype[np.float64]]]], knows: bool) -> StepFigures:
    return StepFigures(np.array([5, 6]), np.array([4, 4]), parts, knows, 2)


def test_joined_figures_are_not_known_where_a_run_lacks_them() -> None:
    parts = {EXPOSED: {AXIS: np.array([1.0, 2.0])}, CAUSE: {STRAGGLER: np.array([3.0, 0.0])}, "range": {(): np.ones(2)}}
    both = joined([figures(parts, True), figures({CAUSE: {}}, True)])
    assert both.parts[EXPOSED][AXIS].tolist() == [1, 2, 0, 0]
    assert both.parts[CAUSE][STRAGGLER].tolist() == [3, 0, 0, 0]
    assert "range" not in both.parts
    assert both.span.tolist() == [5, 6, 5, 6]
    assert (both.num_steps, both.knows_communication, both.num_stages) == (4, True, 2)
    lacking = joined([figures(parts, True), replace(figures({}, False), span=None, num_stages=3)])
    assert np.isnan(lacking.parts[EXPOSED][AXIS][2:]).all()
    assert (lacking.span, lacking.knows_communication, lacking.num_stages) == (None, False, None)
