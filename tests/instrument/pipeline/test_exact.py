"""A pipeline computes what one process computes: the loss and every gradient, float64, 1e-9."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from instrument.models.gpt import GptStage
from instrument.models.gpt_config import GptConfig
from instrument.pipeline.transport import Mode
from tests.instrument.pipeline.cases.training import Case, compare_with_one_process
from tests.support.extent import ALL
from tests.support.pool import Pool

TOLERANCE = 1e-9


def check(pool: Pool, cases: list[Case]) -> None:
    """Run cases of one mesh shape together."""
    assert len({(case.pp, case.dp) for case in cases}) == 1, "they share a mesh"
    outcomes = pool.run(compare_with_one_process, cases, world=cases[0].pp * cases[0].dp)
    for index, case in enumerate(cases):
        ranks = [row[index] for row in outcomes]
        for rank, outcome in enumerate(ranks):
            assert outcome.loss_error < TOLERANCE, (case, rank)
            assert outcome.gradient_error < TOLERANCE, (case, rank)
            assert outcome.num_gradients == len(outcome.parameters), (case, rank)
        everywhere = frozenset[str]().union(*(outcome.parameters for outcome in ranks))
        assert everywhere | {"head.projection.weight"} == parameters_of(case.config)


@cache
def parameters_of(config: GptConfig) -> frozenset[str]:
    """Names of all parameters of the model."""
    return frozenset(name for name, _ in GptStage(config, range(config.layers)).named_parameters())


GRID = list(product(("gpipe", "1f1b"), (1, 2, 4), Mode))
FEW = [
    *(("gpipe", 1, Mode.BATCHED), ("gpipe", 2, Mode.BATCHED), ("1f1b", 4, Mode.BATCHED)),
    *(("gpipe", 2, Mode.EVEN_ODD), ("1f1b", 4, Mode.EVEN_ODD), ("1f1b", 2, Mode.BLOCKING), ("gpipe", 4, Mode.BLOCKING)),
]
"""Every two settings together; one rank has no messages."""


@pytest.mark.parametrize(("schedule", "pp", "mode"), GRID if ALL else FEW)
def test_any_number_of_microbatches_is_exact(pool: Pool, schedule: str, pp: int, mode: Mode) -> None:
    """One, fewer than ranks, and more; as messages are posted by default also as many, and twice as many and one."""
    microbatches = {1, max(pp - 1, 1), pp + 1} | ({pp, 2 * pp + 1} if mode is Mode.BATCHED else set())
    microbatches |= set(range(1, 2 * pp + 2)) if ALL and mode is Mode.BATCHED else set()
    check(pool, [Case(schedule, pp, m, mode=mode) for m in sorted(microbatches)])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_uneven_splits_are_exact(pool: Pool, schedule: str) -> None:
    check(pool, [Case(schedule, 2, 3, layers=4, split=split) for split in ((3, 1), (1, 3))])
    check(pool, [Case(schedule, 4, 5, layers=7, split=split) for split in ((1, 2, 3, 1), (4, 1, 1, 1), (2, 2, 2, 1))])


def test_stages_of_the_embedding_or_the_loss_alone_are_exact(pool: Pool) -> None:
    ends = [Case("1f1b", 4, 5, layers=4, split=(0, 2, 2, 0), tied=tied, vocabulary=300) for tied in (False, True)]
    check(
        pool,
        [*ends, Case("zb-h1", 4, 5, layers=5, split=(0, 3, 2, 0)), Case("1f1b", 4, 5, layers=3, split=(1, 1, 1, 0))],
    )
    chunks = Case("interleaved-1f1b", 2, 4, chunks=2, layers=3, split=(0, 2, 1, 0), tied=True, ahead=2, vocabulary=300)
    check(pool, [chunks, replace(chunks, schedule="zbv", tied=False), Case("1f1b", 2, 3, layers=2, split=(2, 0))])
    check(pool, [replace(chunks, schedule="dualpipe", split=(0, 2), layers=2, tied=False, ahead=0)])


@pytest.mark.parametrize(("schedule", "pp", "mode"), GRID if ALL else FEW[::2])
def test_tied_embeddings_are_exact(pool: Pool, schedule: str, pp: int, mode: Mode) -> None:
    check(pool, [Case(schedule, pp, 3, layers=5, tied=True, mode=mode)])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_data_parallel_pipelines_are_exact(pool: Pool, schedule: str) -> None:
    ties = (False, True)
    check(pool, [Case(schedule, 2, m, dp=2, layers=3, tied=tied) for m, tied in product((1, 2, 5), ties)])
    check(pool, [Case(schedule, 1, 2, dp=4, layers=2, tied=tied) for tied in ties])


@pytest.mark.parametrize("mode", Mode)
def test_interleaved_chunks_are_exact(pool: Pool, mode: Mode) -> None:
    sizes = product((2, 4, 6), (2, 3)) if ALL else ((2, 2), (6, 3))
    check(pool, [Case("interleaved-1f1b", 2, m, chunks=v, tied=v == 2, mode=mode) for m, v in sizes])
    microbatches = (4, 8) if mode is Mode.BATCHED else (4,)
    check(pool, [Case("interleaved-1f1b", 4, m, chunks=2, mode=mode) for m in microbatches])


@pytest.mark.parametrize("mode", Mode)
def test_negotiated_shapes_are_exact(pool: Pool, mode: Mode) -> None:
    cases = [Case(schedule, 4, 6, mode=mode, negotiated=True) for schedule in ("gpipe", "1f1b")]
    check(pool, [*cases, replace(cases[0], schedule="interleaved-1f1b", microbatches=4, chunks=2)])


@pytest.mark.parametrize("mode", Mode)
def test_messages_through_host_memory_are_exact(pool: Pool, mode: Mode) -> None:
    check(pool, [Case("1f1b", 4, 5, layers=5, tied=True, mode=mode, backend="host-staged")])
    check(pool, [Case("gpipe", 2, 3, dp=2, mode=mode, backend="host-staged", negotiated=True)])


def test_in_flight_forwards_are_those_of_the_schedule(pool: Pool) -> None:
    outcomes = pool.run(compare_with_one_process, [Case("gpipe", 4, 6), Case("1f1b", 4, 6)])
    assert [row[0].peak_in_flight for row in outcomes] == [6, 6, 6, 6]
    assert [row[1].peak_in_flight for row in outcomes] == [4, 3, 2, 1]
