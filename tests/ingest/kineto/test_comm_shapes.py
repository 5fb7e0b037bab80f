"""Sizes of communication from recorded shapes: exact, or not told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from pptrace.ingest.kineto.comm_args import Sizes, sizes_of
from pptrace.ingest.kineto.event_types import Args


def sizes(name: str, types: Any, dims: Any, values: Any = None) -> Sizes:
    raws = [Raw(json.dumps(value).encode()) for value in (types, dims, values)]
    return sizes_of(name, Args(types=raws[0], dims=raws[1], inputs=raws[2]))


@pytest.mark.parametrize(
    ("name", "types", "dims", "values", "wanted"),
    [
        ("gloo:all_reduce", ["float"], [[4, 6]], [""], (96, 96, 24)),
        ("gloo:all_reduce", ["c10::BFloat16", "double"], [[4], []], ["", ""], (16, 16, 5)),
        ("gloo:send", ["long int"], [[3]], [""], (24, 24, 3)),
        ("gloo:all_reduce", ["float"], [[0]], [""], (0, 0, 0)),
        ("nccl:all_reduce", ["float"], [[4, 6]], [""], (96, 96, 24)),  # of torch before 2.2, whose records tell nothing
        ("nccl:broadcast", ["c10::Half"], [[5]], [""], (10, 10, 5)),
        ("c10d::allreduce_", ["TensorList", "", "Scalar"], [[[4, 6], [3]], [], []], ["", "", "-1"], (-1, -1, 27)),
        ("c10d::_allgather_base_", ["float", "float", ""], [[12, 6], [4, 6], []], ["", "", ""], (96, 288, 24)),
        ("c10d::alltoall_base_", ["float", "float"], [[1, 6], [4, 6]], ["", ""], (96, 24, 24)),
        (
            "_c10d_functional::all_gather_into_tensor",
            ["float", "Scalar", ""],
            [[4], [], []],
            ["", "3", ""],
            (16, 48, 4),
        ),
        (
            "_c10d_functional::reduce_scatter_tensor",
            ["float", "", "Scalar", ""],
            [[9], [], [], []],
            [""] * 4,
            (36, -1, 9),
        ),
    ],
)
def test_the_sides_of_a_message_are_told_where_shapes_and_types_are(
    name: str, types: list[str], dims: list[Any], values: list[str], wanted: Sizes
) -> None:
    assert sizes(name, types, dims, values) == wanted


@pytest.mark.parametrize(
    ("name", "types", "dims", "values"),
    [
        ("gloo:all_reduce", ["some::type"], [[4]], [""]),  # an element of unknown size
        ("gloo:all_reduce", ["float"], [[4, -6]], [""]),
        ("gloo:all_reduce", ["float"], [["4"]], [""]),
        ("gloo:all_reduce", ["float"], [[2**40, 2**40]], [""]),
        ("gloo:all_reduce", ["float"], [], []),
        ("gloo:all_reduce", "float", [[4]], [""]),
        ("gloo:all_gather", ["float"], [[4]], [""]),  # the output is larger
        ("nccl:all_reduce", ["float", "float"], [[4], [4]], ["", ""]),  # one for each device of the process
        ("nccl:all_to_all", ["float"], [[4]], [""]),  # what comes may be more
        ("gloo:scatter", ["float", "float"], [[4], [4]], ["", ""]),
        ("c10d::allreduce_", ["TensorList"], [[]], [""]),  # more tensors than torch writes
        ("c10d::allgather_", ["", "TensorList"], [[], [[4]]], ["", ""]),
    ],
)
def test_sizes_that_are_not_certain_are_not_told(name: str, types: Any, dims: Any, values: Any) -> None:
    assert sizes(name, types, dims, values) == (-1, -1, -1)


def test_a_gather_to_an_unknown_number_of_ranks_tells_its_input_alone() -> None:
    name = "_c10d_functional::all_gather_into_tensor"
    assert sizes(name, ["float", "Scalar"], [[4], []], ["", ""]) == (-1, -1, 4)
