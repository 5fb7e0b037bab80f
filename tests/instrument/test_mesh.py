"""Ranks, axes and groups."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from instrument.mesh import MeshShape, fit_shape, read_order
from pptrace.axes import MESH_ORDER
from pptrace.errors import UsageError
from pptrace.marks import Axis
from pptrace.model.mesh import MeshInfo
from tests.instrument.pipeline.cases.training import mesh_facts
from tests.support.pool import Pool


def test_ranks_count_tp_fastest_then_cp_dp_and_pp() -> None:
    shape = MeshShape(pp=2, dp=3, cp=2, tp=2)
    indices = list(product(range(2), range(3), range(2), range(2)))
    assert [shape.rank_of(*index) for index in indices] == list(range(24))
    assert [shape.coordinates_of(rank) for rank in range(24)] == indices


def test_an_analysis_knows_the_groups_of_every_order() -> None:
    """Those of a shape are compared with the definition of a group in :mod:`tests.test_axes`."""
    for order in permutations(MESH_ORDER):
        shape = MeshShape(pp=2, dp=3, cp=2, tp=2, order=order)
        assert [shape.rank_of(*shape.coordinates_of(rank)) for rank in range(24)] == list(range(24))
        pipelines = tuple(shape.groups_of(Axis.PP))
        mesh = MeshInfo(24, 2, 1, 2, 2, 3, 1, pipelines=pipelines, order=tuple(map(str, order)))
        for axes in ((Axis.TP,), (Axis.CP,), (Axis.DP,), (Axis.PP,), (Axis.DP, Axis.CP), (Axis.TP, Axis.PP)):
            of_ranks = [mesh.group_of(rank, "-".join(axes)) for rank in range(24)]
            assert sorted(set(of_ranks)) == shape.groups_of(*axes)
            assert all(rank in group for rank, group in enumerate(of_ranks) if group is not None)


def test_an_analysis_knows_the_groups_of_experts() -> None:
    shape = MeshShape(pp=2, dp=2, cp=2, tp=2, ep=4)
    assert (shape.of_stage, shape.edp) == (8, 2)
    mesh = MeshInfo(16, 2, 1, 2, 2, 2, 4, pipelines=tuple(shape.groups_of(Axis.PP)), etp=1)
    for axis in (Axis.EP, Axis.EDP):
        assert [mesh.group_of(rank, axis) for rank in range(16)] == [shape.expert_group_of(r, axis) for r in range(16)]
        assert sorted({shape.expert_group_of(rank, axis) for rank in range(16)}) == shape.groups_of(axis)
    unknown = MeshInfo(16, 2, 1, 2, 2, 2, 4, pipelines=tuple(shape.groups_of(Axis.PP)))
    assert unknown.group_of(0, "ep") is None


@pytest.mark.parametrize("text", ["", "tp-tp", "tp-qq", "pp dp"])
def test_an_order_that_names_no_axes_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=f"expected tp, .* and pp, fastest first, such as {'-'.join(MESH_ORDER)}"):
        read_order(text)


def test_axes_left_out_of_an_order_vary_slowest() -> None:
    left_out = tuple(axis for axis in MESH_ORDER if axis not in (Axis.PP, Axis.TP))
    assert {Axis.CP, Axis.DP} <= set(left_out)
    assert read_order("pp-tp") == (Axis.PP, Axis.TP, *left_out)
    assert read_order("-".join(MESH_ORDER)) == MeshShape(1).order == MESH_ORDER


def test_what_is_left_out_takes_what_the_others_leave() -> None:
    assert fit_shape(8) == MeshShape(pp=8)
    assert fit_shape(8, dp=2) == MeshShape(pp=4, dp=2)
    assert fit_shape(8, pp=2) == MeshShape(pp=2, dp=4)
    assert fit_shape(8, pp=2, dp=2, tp=2) == MeshShape(pp=2, dp=2, tp=2)


def test_groups_name_their_axis_and_hold_the_right_ranks(pool: Pool) -> None:
    facts = pool.run(mesh_facts)
    assert [fact["coordinates"] for fact in facts] == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]
    assert [fact["pp_ranks"] for fact in facts] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert facts[1]["groups"] == {
        "pp": ("mesh_pp", [1, 3]),
        "dp": ("mesh_dp", [0, 1]),
        **{str(axis): (f"mesh_{axis}", [1]) for axis in MESH_ORDER if axis not in (Axis.PP, Axis.DP)},
        "embd": ("mesh_embd", [1, 3]),
        "mirror": ("mesh_mirror", [1, 3]),
    }


def test_groups_are_those_of_megatrons_own_example() -> None:
    # Megatron-LM's parallel_state.initialize_model_parallel: 16 GPUs, tp 2, pp 4.
    shape = MeshShape(pp=4, dp=2, tp=2)
    assert shape.groups_of(Axis.DP) == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert shape.groups_of(Axis.TP) == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert shape.groups_of(Axis.PP) == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
