"""Memory of layers from that of ranks, and what a limit of memory does to the table of changes."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.analysis.whatif.answer import answer
from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.memory import RankUse, layer_memory, peak_of_layers
from pptrace.analysis.whatif.predict import Baseline
from pptrace.analysis.whatif.stage_costs import stage_costs
from pptrace.analysis.whatif.study import Study
from pptrace.report.whatif import headline
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.simulator import peak_inflight
from tests.support.measured import measured_costs

LAYERS = (2, 4, 4, 2)
STATE, ACTIVATIONS = 50, 10
EMBEDDING, HEAD = (30, 5), (70, 20)
"""(state, activations) beyond those of their layers."""
BASE = 1000


def uses(base: float | None = BASE) -> dict[int, RankUse]:
    ends = [EMBEDDING, (0, 0), (0, 0), HEAD]
    return {
        rank: RankUse(round(BASE + count * STATE + of_end[0]), count * ACTIVATIONS + of_end[1], base)
        for rank, (count, of_end) in enumerate(zip(LAYERS, ends, strict=True))
    }


def test_layers_of_the_ranks_between_tell_what_the_ends_have_besides_theirs() -> None:
    memory = layer_memory(uses(), LAYERS)
    assert memory.state == pytest.approx([EMBEDDING[0], *[STATE] * 12, HEAD[0]])
    assert memory.activations == pytest.approx([EMBEDDING[1], *[ACTIVATIONS] * 12, HEAD[1]])


def test_the_peak_of_a_split_is_that_of_its_layers_and_the_microbatches_in_flight() -> None:
    memory, plan = layer_memory(uses(), LAYERS), build("1f1b", 4, 8)
    assert memory is not None
    for split in ((4, 3, 3, 2), (0, 2, 2, 8), (6, 5, 1, 0)):
        expected = [
            BASE + count * STATE + of_end[0] + held * (count * ACTIVATIONS + of_end[1])
            for count, of_end, held in zip(split, [EMBEDDING, (0, 0), (0, 0), HEAD], peak_inflight(plan), strict=True)
        ]
        assert memory.peaks_of(plan, split, peak_inflight(plan)).tolist() == pytest.approx(expected)
        assert peak_of_layers(memory, plan, split, 1.0) == max(expected)
        assert peak_of_layers(memory, plan, split, 0.5) < max(expected)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("interleaved-1f1b", (2, 2, 2, 2, 1, 1, 1, 1)), ("zbv", (2, 2, 2, 2, 1, 1, 1, 1)), ("dualpipe", LAYERS)],
)
def test_layers_take_their_memory_along_to_the_ranks_of_another_schedule(name: str, layers: tuple[int, ...]) -> None:
    """Of interleaved chunks rank r has stages r and r + 4; on a V, stages r and 7 − r; of DualPipe, both r and 3 − r whole."""
    plan, expected = build(name, 4, 8), []
    second = {
        "interleaved-1f1b": lambda rank: rank + 4,
        "zbv": lambda rank: 7 - rank,
        "dualpipe": lambda rank: 3 - rank,
    }
    for rank, held in enumerate(peak_inflight(plan)):
        stages = (rank, second[name](rank))
        state = kept = 0
        for stage in stages:
            of_end = EMBEDDING if stage == 0 else HEAD if stage == len(layers) - 1 else (0, 0)
            state += layers[stage] * STATE + of_end[0]
            kept += layers[stage] * ACTIVATIONS + of_end[1]
        expected.append(BASE + state + held / 2 * kept)
    found = study(None).scenario(Change(schedule=name), "")
    assert found.peak_memory_bytes == round(max(expected))


@pytest.mark.parametrize(
    ("of_ranks", "layers"), [(uses(None), LAYERS), (uses(), None), ({0: RankUse(9, 1.0, 0.0)}, LAYERS), ({}, LAYERS)]
)
def test_without_layers_or_their_part_of_the_memory_nothing_is_said(
    of_ranks: dict[int, RankUse], layers: tuple[int, ...] | None
) -> None:
    assert layer_memory(of_ranks, layers) is None


def study(memory_limit: int | None) -> Study:
    """A run of 1F1B whose ops take as long as their stage has layers, the last one with a head of two layers' time."""
    plan = build("1f1b", 4, 8)
    of_stage = np.array([2, 4, 4, 4])[plan.table.stage] * (1 + (plan.table.kind == Kind.B.code)) * 1000
    durations = np.broadcast_to(of_stage, (6, 1, len(of_stage)))
    measured = measured_costs(plan.table, durations)
    costs = stage_costs(plan, measured, LAYERS)
    baseline = Baseline(costs, np.zeros(6, dtype=np.int64))
    return Study(Baseline(costs, baseline.replayed.spans), "1f1b", uses(), (), memory_limit)


CHANGES = [(name, Change(schedule=name)) for name in ("gpipe", "eager-1f1b", "zb-h1")]


def changes_of(run: Study) -> list[tuple[str, Change]]:
    smaller = Change(microbatches=16, microbatch_size=0.5)
    return [*CHANGES, ("smaller microbatches", smaller), ("split", Change(split=run.best_split))]


def test_a_limit_leaves_advice_only_to_what_fits() -> None:
    free = answer(study(None), changes_of(study(None)))
    assert all(one.over_limit_bytes is None for one in free.scenarios)
    split = next(
        one for one in free.scenarios if one.split != LAYERS and one.split is not None and one.schedule == "1f1b"
    )
    assert max(*split.split[:3], split.split[3] + 2) == 4  # with the head 14 layers' time on four ranks
    most_gained = free.scenarios[0]
    assert most_gained.name == "zb-h1"
    assert most_gained.peak_memory_bytes < split.peak_memory_bytes
    limited = study(most_gained.peak_memory_bytes - 1)
    result = answer(limited, changes_of(limited))
    assert limited.best_split not in (None, split.split)
    fits = [one for one in result.scenarios if not one.over_limit_bytes]
    assert result.scenarios[: len(fits)] == tuple(fits)
    assert all((one.peak_memory_bytes or 0) > limited.memory_limit for one in result.scenarios[len(fits) :])
    assert result.scenarios[len(fits) :]
    assert not any(one.on_pareto_front for one in result.scenarios[len(fits) :])
    assert headline(result).startswith("smaller microbatches would take")
    assert fits[0].name == "smaller microbatches"


def test_where_no_split_fits_or_its_memory_is_not_known_a_line_says_so() -> None:
    tight = study(100)
    assert tight.best_split is None
    assert "--memory-limit: no split of the layers over these stages fits" in answer(tight, CHANGES).warnings
    unknown = Study(tight.baseline, "1f1b", {}, (), 100)
    assert unknown.best_split is None
    (line,) = answer(unknown, CHANGES).warnings
    assert "not known whether" in line
    assert "the trace does not tell the memory of its ranks" in line
