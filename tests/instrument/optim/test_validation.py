"""Clipping by the global norm is exact with and without a barrier, and post-validation takes back what was wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from instrument.optim.clipping import OptimizerSync, clip_factor, require_norm
from instrument.pipeline.transport import Mode
from pptrace.errors import UsageError
from tests.instrument.optim.cases.clipping import (
    Reference,
    Trained,
    Training,
    names_of,
    partial_squares,
    reference,
    train_all,
    wait_for_the_next_forward,
)
from tests.instrument.pipeline.cases.training import Case
from tests.support.extent import ALL
from tests.support.pool import Pool

TOLERANCE = 1e-9
NEVER = 1e3  # a norm that no gradient here comes near
CASES = [
    Case("1f1b", 2, 4),
    Case("zb-h2", 4, 8),
    Case("zbv", 4, 8, chunks=2),
    Case("interleaved-1f1b", 2, 4, chunks=2),
    Case("1f1b", 4, 8, tied=True, mode=Mode.BLOCKING),
    Case("1f1b", 2, 4, dp=2, tied=True),
    Case("zb-h2", 4, 8, ahead=2),
    Case("1f1b", 1, 3),
    Case("dualpipe", 4, 8, chunks=2),
]


def name_of(case: Case) -> str:
    return "-".join(
        [case.schedule, str(case.pp), *(["tied"] if case.tied else []), *([f"dp{case.dp}"] if case.dp > 1 else [])]
        + ([f"ahead{case.ahead}"] if case.ahead else [])
        + ([case.mode.value] if case.mode is not Mode.BATCHED else [])
    )


def is_fine(squares: float, max_norm: float) -> bool:
    return math.isfinite(squares) and math.sqrt(squares) + 1e-6 <= max_norm


def expected_rollbacks(training: Training, expected: Reference) -> list[int]:
    """By pipeline rank: updates made with a partial norm that was fine where the whole one was not."""
    pp = training.case.pp
    counts = [0] * pp
    for squares in expected.squares:
        partial = partial_squares(training.case, squares)
        if not is_fine(partial[-1], training.max_norm):
            for rank in range(pp - 1):
                counts[rank] += is_fine(partial[rank], training.max_norm)
    return counts


def check(pool: Pool, trainings: list[Training]) -> list[list[Trained]]:
    """Train each and compare with one process.

    Returns:
        By training, what the pipeline ranks of the first replica have.
    """
    case = trainings[0].case
    by_rank = pool.run(train_all, trainings, world=case.pp * case.dp)
    kept = []
    for index, training in enumerate(trainings):
        expected = reference(training)
        ranks = [row[index] for row in by_rank]
        rollbacks = expected_rollbacks(training, expected)
        for rank, trained in enumerate(ranks):
            assert trained.parameters
            for name, weight in trained.parameters.items():
                error = float((weight - expected.parameters[name]).abs().max())
                assert error < TOLERANCE, (training, rank, name, error)
            if trained.losses:
                assert trained.losses == pytest.approx(expected.losses, abs=TOLERANCE)
            if training.sync is OptimizerSync.POST_VALIDATION:
                assert trained.num_rollbacks == rollbacks[rank // case.dp], (training, rank)
        assert any(trained.losses for trained in ranks)
        kept.append(ranks[:: case.dp])
    return kept


def norm_between(case: Case, rank: int) -> float:
    """A norm that in step 0 the gradients up to ``rank`` keep to, and those of one rank more do not."""
    partial = partial_squares(case, reference(Training(case, NEVER, steps=1)).squares[0])
    assert partial[rank + 1] > partial[rank] * (1 + 1e-6)
    return math.sqrt((partial[rank] + partial[rank + 1]) / 2)


SPLIT = [case for case in CASES if case.pp > 1 and case.schedule != "dualpipe"]
"""Pipelines of several ranks, each of which holds a part of the model."""


def holder(case: Case, rank: int) -> str:
    """A parameter that is counted on a rank."""
    return min(name for name in names_of(case)[rank] if name.startswith("blocks"))


@pytest.mark.parametrize("case", CASES if ALL else [CASES[0], CASES[2], CASES[7], CASES[8]], ids=name_of)
def test_norms_that_need_no_clip_are_exact_and_nothing_runs_twice(pool: Pool, case: Case) -> None:
    (ranks,) = check(pool, [Training(case, NEVER, steps=3)])
    assert all(trained.num_rollbacks == 0 for trained in ranks)
    assert all(len(set(trained.forwards)) == 1 for trained in ranks)


@pytest.mark.parametrize("case", SPLIT if ALL else [CASES[1], CASES[5]], ids=name_of)
def test_a_forced_clip_is_rolled_back_and_done_again(pool: Pool, case: Case) -> None:
    late = Training(case, norm_between(case, case.pp - 2))
    at_once = Training(case, 1e-3)  # above it from rank 0 on: each rank waits
    ranks, waiting = check(pool, [late, at_once])
    assert all(trained.num_rollbacks > 0 for trained in ranks[:-1])
    assert ranks[-1].num_rollbacks == 0
    assert all(trained.num_rollbacks == 0 for trained in waiting)
    assert ranks[0].forwards[1] > ranks[0].forwards[0]


def test_a_clip_that_only_the_first_rank_did_not_see_is_rolled_back_there_alone(pool: Pool) -> None:
    case = Case("1f1b", 4, 8)
    ((first, *others),) = check(pool, [Training(case, norm_between(case, 0), steps=1)])
    assert first.num_rollbacks == 1
    assert [trained.num_rollbacks for trained in others] == [0, 0, 0]


@pytest.mark.parametrize("case", SPLIT if ALL else [CASES[3], CASES[4]], ids=name_of)
def test_a_forced_overflow_is_left_out(pool: Pool, case: Case) -> None:
    last, first = holder(case, case.pp - 1), holder(case, 0)
    trainings = [
        Training(case, NEVER, overflows={1: last}),
        Training(case, NEVER, overflows={0: last, 3: last}),  # before there are moments, and with no step after it
        Training(case, NEVER, overflows={1: first}),
    ]
    once, twice, nowhere = check(pool, trainings)
    assert [trained.num_rollbacks for trained in once] == [1] * (case.pp - 1) + [0]
    assert [trained.num_rollbacks for trained in twice] == [2] * (case.pp - 1) + [0]
    assert all(trained.num_rollbacks == 0 for trained in nowhere)


@pytest.mark.parametrize("case", CASES[1:8:2] if ALL else CASES[5:6], ids=name_of)
def test_the_barrier_clips_and_leaves_out_as_exactly(pool: Pool, case: Case) -> None:
    waiting = Training(case, 0.5, OptimizerSync.SYNCHRONOUS)
    (ranks, _) = check(pool, [waiting, replace(waiting, overflows={1: holder(case, case.pp - 1), 2: holder(case, 0)})])
    assert all(trained.num_rollbacks == 0 for trained in ranks)


def test_copies_of_stages_count_once(pool: Pool) -> None:
    case = Case("dualpipe", 4, 8, chunks=2)
    assert names_of(case)[2:] == [set(), set()]
    clipped, left_out = check(
        pool, [Training(case, norm_between(case, 0)), Training(case, NEVER, overflows={1: holder(case, 1)})]
    )
    assert clipped[0].num_rollbacks > 0
    assert [trained.num_rollbacks for trained in left_out] == [1, 0, 0, 0]


def test_without_a_barrier_the_next_step_begins_before_the_last_rank_has_updated(pool: Pool) -> None:
    assert pool.run(wait_for_the_next_forward, OptimizerSync.POST_VALIDATION, 30.0)[-1] is True
    assert pool.run(wait_for_the_next_forward, OptimizerSync.SYNCHRONOUS, 0.2)[-1] is False


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan])
def test_a_norm_that_nothing_can_be_clipped_to_is_refused(norm: float) -> None:
    with pytest.raises(UsageError, match="expected a positive number"):
        require_norm(norm)


def test_the_factor_is_torchs() -> None:
    assert clip_factor(4.0, 1.0) == pytest.approx(1.0 / (2.0 + 1e-6), rel=1e-15)
    assert clip_factor(0.25, 1.0) == 1.0
    assert clip_factor(math.inf, 1.0) is None
    assert clip_factor(math.nan, 1.0) is None
