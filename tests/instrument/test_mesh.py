"""Ranks, axes and groups."""

from __future__ import annotations

from itertools import product

import pytest

from instrument.mesh import MeshShape, fit_shape
from pptrace.errors import UsageError
from tests.instrument.cases import mesh_facts
from tests.instrument.pool import Pool


def test_ranks_count_tp_fastest_then_cp_dp_and_pp() -> None:
    shape = MeshShape(pp=2, dp=3, cp=2, tp=2)
    places = list(product(range(2), range(3), range(2), range(2)))
    assert [shape.rank_of(*place) for place in places] == list(range(24))
    assert [shape.coordinates_of(rank) for rank in range(24)] == places


def test_what_is_left_out_takes_what_the_others_leave() -> None:
    assert fit_shape(8) == MeshShape(pp=8)
    assert fit_shape(8, dp=2) == MeshShape(pp=4, dp=2)
    assert fit_shape(8, pp=2) == MeshShape(pp=2, dp=4)
    assert fit_shape(8, pp=2, dp=2, tp=2) == MeshShape(pp=2, dp=2, tp=2)


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (4, {"pp": 3}, "pp=3 does not divide the world of 4 ranks; choose sizes whose product is 4"),
        (4, {"pp": 2, "dp": 1}, "pp=2 fills 2 of 4 ranks"),
        (4, {"pp": 4, "dp": 2}, "pp=4 · dp=2 does not divide the world of 4 ranks"),
        (4, {"pp": 0}, "pp is 0"),
        (2, {"dp": -1}, "dp is -1"),
    ],
)
def test_sizes_that_do_not_fill_the_world_are_one_line(world: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as error:
        fit_shape(world, **sizes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_groups_name_their_axis_and_hold_the_right_ranks(pool: Pool) -> None:
    facts = pool.run(mesh_facts)
    assert [fact["coordinates"] for fact in facts] == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]
    assert [fact["pp_ranks"] for fact in facts] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert facts[1]["groups"] == {
        "pp": ("mesh_pp", [1, 3]),
        "dp": ("mesh_dp", [0, 1]),
        "cp": ("mesh_cp", [1]),
        "tp": ("mesh_tp", [1]),
        "embd": ("mesh_embd", [1, 3]),
    }
