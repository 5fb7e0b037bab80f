"""Probes delay ops of the runtime and change nothing that they compute."""

from __future__ import annotations

import pytest

from tests.instrument.pipeline.cases.probed import STEPS, train_probed
from tests.instrument.pipeline.cases.training import Case
from tests.support.pool import Pool


@pytest.mark.parametrize(
    ("case", "probes"),
    [
        (Case("1f1b", 2, 4), ["F:1"]),
        (Case("zb-h1", 2, 4, ahead=2), ["I:1", "stage=0:0.5"]),
        (Case("dualpipe-v", 2, 4, chunks=2), ["W:1"]),
    ],
)
def test_losses_and_parameters_are_the_same_to_the_last_bit(pool: Pool, case: Case, probes: list[str]) -> None:
    probed = pool.run(train_probed, case, probes, world=2)
    plain = pool.run(train_probed, case, [], world=2)
    assert [outcome[:2] for outcome in probed] == [outcome[:2] for outcome in plain]
    assert sum(len(losses) for losses, _, _ in plain) >= STEPS
    assert all(numbers for _, numbers, _ in plain)
    delays = [delays for _, _, delays in probed]
    assert all(set(of_rank) <= {"1", "3"} for of_rank in delays)
    assert {step for of_rank in delays for step in of_rank} == {"1", "3"}
    assert all(of_rank == {} for _, _, of_rank in plain)
