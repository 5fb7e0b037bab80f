"""The many ops inside a few steps show how steady a run is, so that smaller changes are found, and none where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from pptrace.analysis.compare.bootstrap import LASTING, NOTHING_KNOWN, USUAL_DEVIATION
from pptrace.analysis.compare.result import ChangeVerdict
from pptrace.analysis.compare.side import ComparedRun
from pptrace.analysis.compare.undisturbed import Steadiness
from pptrace.workflow.compare import read_compared
from tests.support.comparison import compare_runs
from tests.support.noisy_runs import Noise, NoisyRun

QUIET = NoisyRun(Noise(ops=0.01), steps=2)


def read(folder: Path, run: NoisyRun, seed: int = 0) -> ComparedRun:
    return read_compared(run.write(folder / "run.csv", seed), cache=False)


@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.03, 0.15])
def test_the_deviation_is_that_of_ops_of_one_kind_and_stage(deviation: float, tmp_path: Path) -> None:
    run = replace(QUIET, noise=Noise(ops=deviation, steps=0.2), slower_stage=(2, 1.5))
    steadiness = read(tmp_path, run).steadiness
    assert steadiness.deviation == pytest.approx(deviation, rel=0.15, abs=1e-4)
    assert steadiness.num_ops == 16
    assert 0.8 < steadiness.share <= 1, "what is left are messages and the gap between two steps"


def test_few_ops_of_a_kind_on_a_stage_tell_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, replace(QUIET, microbatches=3)).steadiness is None


def test_what_is_known_lies_between_that_of_ops_and_of_nothing() -> None:
    for deviation in (0.0, 0.03, 0.5):
        of_ops, of_steps = (
            [getattr(Steadiness(deviation, 16, share), name) for share in (0.0, 0.5, 1.0)]
            for name in ("of_ops", "of_steps")
        )
        assert of_steps[0] == NOTHING_KNOWN
        assert of_steps[2] == of_ops[2]
        assert of_ops[0].lasting <= of_steps[1].lasting + 1e-12 <= LASTING + 1e-12
    assert Steadiness(0.5, 16, 1).of_steps.deviation > USUAL_DEVIATION, "ops may show that less is known"


def test_two_quiet_steps_find_a_change_that_two_steps_alone_do_not(tmp_path: Path) -> None:
    a, same = read(tmp_path, QUIET, 1), read(tmp_path, QUIET, 2)
    slower = read(tmp_path, replace(QUIET, slower=0.15), 3)
    assert compare_runs(a, same).verdict is ChangeVerdict.NO_DIFFERENCE
    assert not any(part.significant for part in compare_runs(a, same).parts)
    assert compare_runs(a, slower).verdict is ChangeVerdict.SLOWER
    untold = [structs.replace(run, steadiness=None) for run in (a, slower)]
    assert compare_runs(*untold).verdict is ChangeVerdict.NO_DIFFERENCE
    assert not any(part.significant for part in compare_runs(*untold).parts)


def test_the_part_that_changed_is_named_after_two_steps(tmp_path: Path) -> None:
    compared = compare_runs(read(tmp_path, QUIET), read(tmp_path, replace(QUIET, slower_stage=(2, 1.3)), 1))
    significant = [part for part in compared.parts if part.significant]
    assert {part.where["stage"] for part in significant} == {2}
    assert {part.name for part in significant} == {"compute"}
    assert "of its parts compute B, stage 2 changed most" in compared.detail
    assert any("(as far as ops tell)" in line for line in compared.warnings)
