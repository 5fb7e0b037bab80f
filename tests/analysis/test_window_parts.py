"""Parts of the ranks' windows of a step: what is known of them, by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.analysis.findings.window_parts import window_parts
from pptrace.model.device import HostIdle
from tests.analysis.test_verdict import rank_of, step_of

LOADS = {"idle_spans": {"DATA": 50}, "between_operators_ns": 80}
ON_DEVICE = replace(rank_of(600, 100, 300), host=HostIdle(120, 20, 60), **LOADS)
ON_HOST = replace(rank_of(600, 100, 300), **LOADS)


def parts_of(*ranks: object, num_ranks: int = 1) -> dict[str, int]:
    """The parts that are not 0; that they sum to the windows."""
    found = window_parts(step_of(1_000, None, *ranks), num_ranks)
    assert sum(found.parts.values()) == found.window_ns == 1_000 * len(ranks)
    return {name: ns for name, ns in found.parts.items() if ns}


@pytest.mark.parametrize(
    ("rank", "num_ranks", "of_rest"),
    [
        (ON_HOST, 2, {"loading of data": 50, "between operators": 30, "waiting for other ranks": 220}),
        (ON_DEVICE, 1, {"devices waiting for launches": 40, "copies and gaps between kernels": 180}),
        (
            ON_DEVICE,
            2,
            {
                **{"devices waiting for launches": 40, "devices idle though work was launched": 60},
                "waiting for other ranks, input and Python": 120,
            },
        ),
        (rank_of(600, 100, 300), 1, {"waiting for input and Python": 300}),
    ],
)
def test_the_rest_is_what_hosts_did_and_a_name_for_what_that_leaves(
    rank: object, num_ranks: int, of_rest: dict[str, int]
) -> None:
    of_hosts = {"loading of data": 50, "between operators": 30} if rank is ON_DEVICE else {}
    assert parts_of(rank, num_ranks=num_ranks) == {"compute": 600, "exposed communication": 100} | of_hosts | of_rest


def test_waiting_that_is_not_told_from_transfer_has_a_name_that_says_so() -> None:
    assert parts_of(replace(ON_HOST, exposed_comm_ns=None, bubble_ns=None), num_ranks=2) == {
        **{"compute": 600, "loading of data": 50, "between operators": 30},
        "waiting and exposed communication": 320,
    }


def test_what_hosts_did_is_never_more_than_there_is() -> None:
    starved = replace(ON_DEVICE, host=HostIdle(500, 0, 0))
    assert parts_of(starved)["devices waiting for launches"] == 220
    assert parts_of(replace(ON_DEVICE, host=HostIdle(10, 0, 0))).get("devices waiting for launches", 0) == 0


def test_it_is_said_whether_as_much_is_known_of_all_ranks() -> None:
    unknown = replace(ON_HOST, compute_ns=None)
    for others, is_of_all in (((ON_HOST,), True), ((unknown,), False), ((rank_of(600, 100, 300),), False)):
        found = window_parts(step_of(1_000, None, ON_HOST, *others), 2)
        assert found.is_of_all is is_of_all
    assert window_parts(step_of(1_000, None, unknown), 2) is None
