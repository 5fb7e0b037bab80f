"""Mean steps beside typical ones: how certain they are, and whether they change otherwise."""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.bootstrap import FEWEST_STEPS
from pptrace.analysis.compare.run_to_run import changes_otherwise, mean_step_of
from pptrace.analysis.compare.side import ComparedRun
from pptrace.model.report_table import Amount
from pptrace.report.tables.comparison import comparison_tables
from pptrace.workflow.compare import read_compared
from tests.support.comparison import compare_runs
from tests.support.noisy_runs import NoisyRun

Series = npt.NDArray[np.int64]
STEP = 100_000_000


def steps(
    number: int, seed: int, every: int = 0, longer: float = 0.0, factor: float = 1.0, deviation: float = 0.02
) -> Series:
    """Steps that vary, of which one ``every`` so many is ``longer`` by so many steps."""
    length = 1 + deviation * np.random.default_rng(seed).standard_normal(number)
    if every:
        length[every - 1 :: every] += longer
    return np.rint(STEP * factor * length).astype(np.int64)


def test_the_mean_and_its_excess_over_the_median_are_those_of_the_steps() -> None:
    series = steps(30, 0, every=3, longer=1.0)
    found = mean_step_of(series)
    assert found.mean.ns == round(series.mean())
    assert found.beyond == pytest.approx(log(series.mean() / np.sort(series)[14]))


@pytest.mark.parametrize("number", [15, 20, 50])
def test_a_long_step_in_three_changes_the_mean_otherwise(number: int) -> None:
    plain, long_steps = mean_step_of(steps(number, 1)), mean_step_of(steps(number, 2, every=3, longer=1.5))
    assert changes_otherwise([plain], [long_steps])
    assert changes_otherwise([long_steps], [plain])


def test_steps_that_do_not_vary_but_for_a_long_one_in_three_change_otherwise() -> None:
    long_steps = np.full(21, STEP)
    long_steps[2::3] *= 3
    assert changes_otherwise([mean_step_of(np.full(21, STEP))], [mean_step_of(long_steps)])


def test_few_steps_have_an_uncertain_mean_and_show_no_other_change() -> None:
    few, one = mean_step_of(steps(FEWEST_STEPS - 1, 0, every=3, longer=2.0)), mean_step_of(steps(1, 0))
    assert few.mean.deviation > 0.5 * STEP
    assert one.mean.deviation is None
    assert not changes_otherwise([few], [mean_step_of(steps(50, 1))])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ComparedRun:
    """A run of which it is known what it was started with: those of its command do the same work."""
    folder: Path = tmp_path_factory.mktemp("run")
    return replace(read_compared(NoisyRun(steps=30).write(folder / "run.csv", 0)), facts={"script": "train.py"})


def of_periods(run: ComparedRun, period: Series, seed: int = 0) -> ComparedRun:
    return replace(run, figures=replace(run.figures, period=period, window=run.figures.window + seed))


def test_a_checkpoint_in_every_third_step_is_in_the_sentence_and_the_table(run: ComparedRun) -> None:
    a = of_periods(run, steps(30, 0, every=3, longer=1.7))
    found = compare_runs(a, of_periods(run, steps(30, 1, factor=1.1)))
    assert (found.verdict, found.mean is not None and found.mean.is_otherwise) == ("slower", True)
    assert found.mean.a_ns == round(a.figures.lengths.mean())
    assert found.mean.change == found.mean.b_ns / found.mean.a_ns - 1
    assert found.mean.high < 0
    assert found.detail.startswith("B is slower by typical steps and faster on average: a typical step takes ")
    assert f", but the mean one, which counts for throughput, {found.mean.a_ns / 1e6:.2f} ms in A and " in found.detail
    rows = comparison_tables(found, Amount.BRIEF)[0].rows
    assert [row[5] for row in rows] == [f"{ns / 1e6:.2f}" for ns in (found.mean.a_ns, found.mean.b_ns)]


@pytest.mark.parametrize(
    ("every", "factor", "opening"),
    [
        (3, 1.5, "B is slower: "),
        (3, 1.0, "No difference of typical steps found: "),
        (0, 1.5, "B is slower: "),
        (0, 1.0, "No difference found: "),
    ],
)
def test_a_mean_that_changes_otherwise_is_named_in_all_sentences(
    run: ComparedRun, every: int, factor: float, opening: str
) -> None:
    b = of_periods(run, steps(30, 1, every=every, longer=1.0, factor=factor))
    found = compare_runs(of_periods(run, steps(30, 0)), b)
    assert found.detail.startswith(opening)
    assert ("but the mean one" in found.detail) == bool(every)


@pytest.mark.parametrize(
    ("of_a", "of_b", "opening"),
    [
        ({}, {"factor": 1.5}, "Steps of B are longer: "),
        ({"factor": 1.5}, {}, "Steps of B are shorter: "),
        ({"every": 3, "longer": 1.7}, {"factor": 1.1}, "Steps of B are longer, on average shorter: "),
        ({}, {}, "No difference of their lengths found: "),
        ({}, {"every": 3, "longer": 1.0}, "No difference of typical steps found: "),
    ],
)
def test_of_other_work_the_sentence_is_on_lengths_alone(
    run: ComparedRun, of_a: dict[str, float], of_b: dict[str, float], opening: str
) -> None:
    """Its first sentence says that no length tells which is faster, and the second one says no such thing."""
    a, b = (
        replace(of_periods(run, steps(30, seed, **{"every": 0} | given)), facts={"model layers": layers})
        for seed, (given, layers) in enumerate(((of_a, "4"), (of_b, "8")))
    )
    detail = compare_runs(a, b).detail
    different = "A and B do different work (layers 4 and 8), so that no length of a step says which is faster. "
    assert detail.startswith(different + opening)
    assert not {"faster", "slower"} & set(detail.removeprefix(different).split())


def test_spans_of_pipelines_have_no_mean_for_throughput(tmp_path: Path) -> None:
    """A table of ops does not tell when the step after its last one begins, and of few steps all count."""
    run = read_compared(NoisyRun(steps=7).write(tmp_path / "run.csv", 0))
    assert run.figures.period is None
    found = compare_runs(run, run)
    assert found.mean is None
    assert len(comparison_tables(found, Amount.BRIEF)[0].columns) == 5
