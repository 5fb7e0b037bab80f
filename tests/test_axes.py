"""Positions of global ranks, against Megatron-LM's formula and the definition of a group."""

from __future__ import annotations

from itertools import combinations, permutations, product

import pytest

from instrument.mesh import MeshShape
from pptrace.axes import MESH_ORDER, Axis, complete_order, coordinates_of, expert_group_of, group_of, groups_of, rank_of
from pptrace.errors import UsageError

SIZES = {**dict.fromkeys(MESH_ORDER, 1), Axis.TP: 2, Axis.DP: 3, Axis.PP: 4}
WORLD = 24


def test_ranks_are_numbered_by_the_formula_of_megatron() -> None:
    for pp, dp, cp, tp in product(range(4), range(3), range(1), range(2)):
        indices = {**dict.fromkeys(MESH_ORDER, 0), Axis.PP: pp, Axis.DP: dp, Axis.CP: cp, Axis.TP: tp}
        rank = tp + 2 * (cp + 1 * (dp + 3 * pp))
        assert rank_of(indices, SIZES) == rank
        assert coordinates_of(rank, SIZES) == indices


@pytest.mark.parametrize("order", list(permutations(MESH_ORDER))[::5])
def test_every_rank_has_one_place_whatever_the_order(order: tuple[Axis, ...]) -> None:
    indices = [coordinates_of(rank, SIZES, order) for rank in range(WORLD)]
    assert len({tuple(sorted(index.items())) for index in indices}) == WORLD
    assert [rank_of(index, SIZES, order) for index in indices] == list(range(WORLD))
    assert indices[1][next(axis for axis in order if SIZES[axis] > 1)] == 1


@pytest.mark.parametrize("order", list(permutations(MESH_ORDER))[::5])
@pytest.mark.parametrize("along", [axes for size in (1, 2) for axes in combinations(MESH_ORDER, size)])
def test_a_group_holds_the_ranks_that_differ_along_its_axes_alone(
    along: tuple[Axis, ...], order: tuple[Axis, ...]
) -> None:
    def fixed(rank: int) -> list[int]:
        return [index for axis, index in coordinates_of(rank, SIZES, order).items() if axis not in along]

    alike = [tuple(other for other in range(WORLD) if fixed(other) == fixed(rank)) for rank in range(WORLD)]
    assert [group_of(rank, along, SIZES, order) for rank in range(WORLD)] == alike
    assert groups_of(along, SIZES, order) == sorted(set(alike))


def groups_of_experts(
    axis: Axis, world: int, order: tuple[Axis, ...] = MESH_ORDER, **sizes: int
) -> list[tuple[int, ...]]:
    ep, etp = sizes.pop("ep"), sizes.pop("etp", 1)
    of_mesh = {axis: sizes.get(axis, 1) for axis in MESH_ORDER}
    return sorted({expert_group_of(rank, axis, of_mesh, order, ep, etp) for rank in range(world)})


def test_groups_of_experts_are_those_of_megatron_cores_rank_generator() -> None:
    """As its ``RankGenerator`` (0.16.1, order tp-cp-ep-dp-pp) makes them, and ``get_expert_data_parallel_group``."""
    assert groups_of_experts(Axis.EP, 8, tp=2, dp=4, ep=4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups_of_experts(Axis.EDP, 8, tp=2, dp=4, ep=4) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups_of_experts(Axis.EP, 8, tp=2, dp=2, pp=2, ep=4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups_of_experts(Axis.EDP, 8, tp=2, dp=2, pp=2, ep=4) == [(rank,) for rank in range(8)]
    sixteen = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
    assert groups_of_experts(Axis.EDP, 16, **sixteen, ep=4)[:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups_of_experts(Axis.EP, 16, **sixteen, ep=2, etp=2)[:3] == [(0, 2), (1, 3), (4, 6)]
    assert groups_of_experts(Axis.EDP, 16, **sixteen, ep=2, etp=2)[:3] == [(0, 4), (1, 5), (2, 6)]
    assert groups_of_experts(Axis.ETP, 16, **sixteen, ep=2, etp=2) == [(rank, rank + 1) for rank in range(0, 16, 2)]


def ranks_in_megatron(sizes: dict[str, int], order: str, along: str) -> list[tuple[int, ...]]:
    """Groups by Megatron-LM's ``RankGenerator(order).get_ranks(along)``: rank = Σ coordinate · product of faster sizes."""
    names = order.split("-")
    world = {}
    for coordinates in product(*(range(sizes[name]) for name in reversed(names))):
        world[len(world)] = dict(zip(reversed(names), coordinates, strict=True))
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, place in world.items():
        groups.setdefault(tuple(sorted(item for item in place.items() if item[0] != along)), []).append(rank)
    return sorted(map(tuple, groups.values()))


@pytest.mark.parametrize("order", ["-".join(words) for words in permutations(("tp", "cp", "ep", "dp", "pp"))])
def test_an_order_with_ep_has_the_groups_of_megatrons_two_rank_generators(order: str) -> None:
    """One of attention, with ep = 1, and one of experts, with etp as tp, edp as dp and cp = 1, whose pipelines must be equal."""
    for ep, etp in ((2, 1), (4, 1), (2, 2), (1, 2), (3, 1), (6, 2)):
        attention = {"tp": 2, "cp": 2, "dp": 3, "pp": 2, "ep": 1}
        experts = {"tp": etp, "cp": 1, "dp": 12 // (ep * etp), "pp": 2, "ep": ep}
        written = complete_order(order.split("-"))
        sizes = {axis: attention.get(axis, 1) for axis in (*MESH_ORDER, Axis.EP)}
        assert written is not None
        for name in ("tp", "cp", "dp", "pp"):
            assert groups_of((Axis(name),), sizes, written) == ranks_in_megatron(attention, order, name)
        is_refused = ranks_in_megatron(attention, order, "pp") != ranks_in_megatron(experts, order, "pp")
        if is_refused:
            with pytest.raises(UsageError, match="so that these would have other pipelines; put pp last"):
                MeshShape(2, 3, 2, 2, order=written, ep=ep, etp=etp)
            continue
        shape = MeshShape(2, 3, 2, 2, order=written, ep=ep, etp=etp)
        for name, axis in (("tp", Axis.ETP), ("ep", Axis.EP), ("dp", Axis.EDP)):
            assert shape.groups_of(axis) == ranks_in_megatron(experts, order, name)


@pytest.mark.parametrize("order", list(permutations(MESH_ORDER))[::5])
def test_experts_stay_within_a_stage_whatever_the_order(order: tuple[Axis, ...]) -> None:
    for rank in range(WORLD):
        stage = group_of(rank, (Axis.TP, Axis.CP, Axis.DP), SIZES, order)
        along = [expert_group_of(rank, axis, SIZES, order, ep=3, etp=2) for axis in (Axis.ETP, Axis.EP, Axis.EDP)]
        assert [len(group) for group in along] == [2, 3, 1]
        assert all(rank in group and set(group) <= set(stage) for group in along)
