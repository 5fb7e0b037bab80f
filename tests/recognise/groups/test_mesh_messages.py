"""Pipelines are the ranks that exchange messages, wherever the numbers of ranks put them."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from pptrace.model.mesh import MeshInfo
from pptrace.recognise.groups.mesh import mesh_from_stages, mesh_with_messages

PP, DP = 4, 3


def comms_between(pipelines: tuple[tuple[int, ...], ...], axis: str = "pp") -> pd.DataFrame:
    """Each rank sends to the next place of its pipeline, which receives from it."""
    ends = [
        end
        for pipeline in pipelines
        for source, target in itertools.pairwise(pipeline)
        for end in ((source, target, "send"), (target, source, "recv"), (source, target, "send"))
    ]
    return pd.DataFrame(ends, columns=["rank", "peer", "kind"]).assign(axis=axis)


def mesh_of(pipelines: tuple[tuple[int, ...], ...]) -> MeshInfo:
    stages = {rank: frozenset({place}) for pipeline in pipelines for place, rank in enumerate(pipeline)}
    return mesh_from_stages(stages, len(stages))


@pytest.mark.parametrize("seed", range(5))
def test_any_numbering_of_the_ranks_gives_the_pipelines_that_ran(seed: int) -> None:
    numbers = np.random.default_rng(seed).permutation(PP * DP).reshape(DP, PP).tolist()
    pipelines = tuple(sorted(map(tuple, numbers)))
    mesh = mesh_with_messages(mesh_of(pipelines), comms_between(pipelines))
    assert mesh.pipelines == pipelines


def test_without_messages_of_pipelines_the_order_of_ranks_stands() -> None:
    pipelines = ((0, 3, 4), (1, 2, 5))
    mesh = mesh_of(pipelines)
    assert mesh.pipelines == ((0, 2, 4), (1, 3, 5))
    assert mesh_with_messages(mesh, comms_between(pipelines, axis="cp")) == mesh
    assert mesh_with_messages(mesh, comms_between(pipelines).iloc[:0]) == mesh


def test_messages_that_do_not_part_the_ranks_into_pipelines_change_nothing() -> None:
    mesh = mesh_of(((0, 2, 4), (1, 3, 5)))
    crossing = comms_between(((0, 2, 4), (1, 3, 5), (0, 3)))
    assert mesh_with_messages(mesh, crossing) == mesh
    partial = comms_between(((0, 2), (1, 3)))
    assert mesh_with_messages(mesh, partial) == mesh
