"""Operations along one axis give what they say, through either route, and each is in exactly one range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from instrument.route import Route
from pptrace.marks import AwaitMark, Axis, Collective, CollectiveMark, ExchangeMark, Link, Mark
from tests.instrument.cases.collectives import alone, every_operation, own_value, scatter_undivided, wait_twice
from tests.support.pool import Pool
from tests.support.profiled import Event

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def expected(size: int, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    values = [own_value(peer, (2, 2 * size, 3), dtype) for peer in range(size)]
    total = torch.stack(values).sum(0)
    return {
        "sum": total,
        "max": torch.stack(values).amax(0),
        "gather": torch.cat(values),
        "gather 1": torch.cat(values, dim=1),
        "scatter 1": total.chunk(size, 1)[rank],
        "scatter -2": total.chunk(size, 1)[rank],
        "rotation": values[rank - 1],
        "rotation 2": values[rank - 2].transpose(0, 1),
        "to all": torch.cat([value.transpose(0, 1).chunk(size)[rank] for value in values]),
        "broadcast": values[-1],
    }


def marks_without_handles(size: int, num_bytes: int) -> list[Mark]:
    """In the order of the blocking calls."""

    def collective(kind: Collective, times: int = 1) -> Mark:
        return CollectiveMark(kind, Axis.TP, size, times * num_bytes, 7)

    return [
        *[collective(Collective.ALL_REDUCE)] * 2,
        *[collective(Collective.ALL_GATHER, size)] * 2,
        *[collective(Collective.REDUCE_SCATTER)] * 2,
        collective(Collective.ALL_TO_ALL),
        collective(Collective.BROADCAST),
    ]


def rotations(size: int, rank: int, num_bytes: int) -> list[Mark]:
    """To the next rank, and to the one after it."""
    return [
        ExchangeMark(
            (Link(True, (rank + by) % size, num_bytes), Link(False, (rank - by) % size, num_bytes)), Axis.TP, 7
        )
        for by in (1, 2)
    ]


def check_values(answers: dict[str, Tensor], size: int, rank: int, dtype: torch.dtype) -> None:
    wanted = expected(size, rank, dtype)
    for name, answer in answers.items():
        torch.testing.assert_close(answer, wanted[name], rtol=0, atol=0, msg=f"{name} of rank {rank}")


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("size", [2, 4])
def test_blocking_operations_are_right_and_marked_in_order(pool: Pool, size: int, route: Route) -> None:
    for rank, by_dtype in enumerate(pool.run(every_operation, route, DTYPES, False, world=size)):
        for dtype, (answers, marks, events) in zip(DTYPES, by_dtype, strict=True):
            check_values(answers, size, rank, dtype)
            assert len(answers) == 8
            assert marks == marks_without_handles(size, answers["sum"].nbytes)
            assert_inside_one_range(events)


def assert_inside_one_range(events: list[Event]) -> None:
    ranges = [event for event in events if event.name.startswith("pp1:")]
    operations = [event for event in events if event.name.startswith("gloo:")]
    assert operations
    for operation in operations:
        assert sum(one.holds(operation) for one in ranges) == 1


@pytest.mark.parametrize("route", Route)
def test_started_operations_are_right_and_each_is_awaited_under_its_own_handle(pool: Pool, route: Route) -> None:
    for rank, ((answers, marks, _),) in enumerate(pool.run(every_operation, route, DTYPES[:1], True, world=4)):
        check_values(answers, 4, rank, torch.float64)
        posted = [mark for mark in marks if isinstance(mark, CollectiveMark | ExchangeMark)]
        awaited = [mark for mark in marks if isinstance(mark, AwaitMark)]
        num_bytes = answers["sum"].nbytes
        wanted = rotations(4, rank, num_bytes) + marks_without_handles(4, num_bytes)[:-2]
        assert [replace(mark, handle=None) for mark in posted] == wanted
        assert [mark.handle for mark in posted] == list(range(8))
        assert awaited == [AwaitMark(Axis.TP, 7, handle) for handle in range(8)]


def test_an_axis_of_one_rank_communicates_nothing(pool: Pool) -> None:
    assert pool.run(alone, world=2) == [([True] * 7, 0)] * 2


def test_a_second_wait_is_refused(pool: Pool) -> None:
    pool.run(wait_twice, world=2)


def test_a_tensor_that_does_not_divide_is_refused_before_anybody_waits(pool: Pool) -> None:
    pool.run(scatter_undivided, world=2)
