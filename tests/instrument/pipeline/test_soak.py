"""Random legal plans, in every way to post them, end and are exact. For a few seconds, a minute with PPTRACE_ALL set, or as many
as ``PPTRACE_SOAK_S`` says."""

from __future__ import annotations

import os
import random
import time

from instrument.models.gpt_config import Recompute
from instrument.pipeline.transport import Mode
from pptrace.errors import ShapeError
from pptrace.schedule.registry import SCHEDULES
from tests.instrument.pipeline.cases.training import Case
from tests.instrument.pipeline.test_exact import check
from tests.support.extent import ALL
from tests.support.pool import Pool

SECONDS = float(os.environ.get("PPTRACE_SOAK_S", "60" if ALL else "2.5"))


def draw(chance: random.Random) -> Case:
    """A legal case: drawn again until its schedule takes its shape."""
    while True:
        mode = chance.choice(list(Mode))
        pp = chance.choice((1, 2, 3, 4))
        case = Case(
            chance.choice(sorted(SCHEDULES)),
            pp,
            chance.randint(1, 12),
            dp=chance.choice((1, 2)) if pp <= 2 else 1,
            chunks=chance.choice((1, 2, 3)),
            tied=chance.random() < 0.5,
            mode=mode,
            negotiated=chance.random() < 0.2,
            ahead=0 if mode is Mode.BLOCKING else chance.randint(0, 4),
            recompute=chance.choice(list(Recompute)),
        )
        try:
            case.plan  # noqa: B018
        except ShapeError:
            continue
        if not (case.negotiated and case.ahead):
            return case


def test_random_plans_end_and_are_exact(pool: Pool) -> None:
    chance = random.Random(3)
    deadline = time.monotonic() + SECONDS
    num_cases = 0
    while time.monotonic() < deadline:
        case = draw(chance)
        print(case)  # shown where it fails
        check(pool, [case])
        num_cases += 1
    assert num_cases > 0
