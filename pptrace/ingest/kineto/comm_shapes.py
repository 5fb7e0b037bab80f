"""Compute sizes of communication from tensor shapes, as ``record_shapes`` writes them, where they are unambiguous.

    "Input type": ["TensorList", "", "Scalar"]       element type of each tensor argument; "" for other arguments
    "Input Dims": [[[4, 6], [3]], [], []]            its shape; for a list those of its tensors, [] if more than 30
    "Concrete Inputs": ["", "", "-1"]                its value, if a number

An operator's sizes are known where its tensors are separate arguments; lists have no element type. gloo's ranges list all
tensors that a work reads, with types: these are the message where input and output have equal sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pptrace.ingest.kineto.event_types import Args, value_of

_GATHER, _INPUT_ONLY = "gather", "alone"
_SAME_TENSOR = (0, 0)
_OPERATORS: dict[str, tuple[int, int | str]] = {
    "c10d::allreduce_": _SAME_TENSOR,
    "c10d::allreduce_coalesced_": _SAME_TENSOR,
    "c10d::broadcast_": _SAME_TENSOR,
    "c10d::reduce_": _SAME_TENSOR,
    "c10d::_allgather_base_": (1, 0),
    "c10d::_reduce_scatter_base_": (1, 0),
    "c10d::alltoall_base_": (1, 0),
    "_c10d_functional::all_reduce": _SAME_TENSOR,
    "_c10d_functional::all_reduce_": _SAME_TENSOR,
    "_c10d_functional::all_reduce_coalesced": _SAME_TENSOR,
    "_c10d_functional::all_reduce_coalesced_": _SAME_TENSOR,
    "_c10d_functional::broadcast": _SAME_TENSOR,
    "_c10d_functional::broadcast_": _SAME_TENSOR,
    "_c10d_functional::all_gather_into_tensor": (0, _GATHER),
    "_c10d_functional::all_gather_into_tensor_out": (0, _GATHER),
    "_c10d_functional::reduce_scatter_tensor": (0, _INPUT_ONLY),
    "_c10d_functional::reduce_scatter_tensor_out": (0, _INPUT_ONLY),
}
"""(index of the input, index of the output) by operator; _GATHER: output = ranks · input; _ALONE: output unknown."""
_EQUAL = ("gloo:all_reduce", "gloo:broadcast", "gloo:reduce", "gloo:send", "gloo:recv")
"""Works whose output and input have equal sizes."""
SHAPED = frozenset({*_OPERATORS, *_EQUAL})
_SIZES_BY_BYTES = {
    1: (
        *("bool", "char", "signed char", "unsigned char", "c10::float8_e5m2", "c10::float8_e4m3fn"),
        *("c10::float8_e8m0fnu", "c10::float8_e5m2fnuz", "c10::float8_e4m3fnuz", "c10::float4_e2m1fn_x2"),
    ),
    2: ("short", "short int", "unsigned short", "short unsigned int", "c10::half", "c10::bfloat16"),
    4: ("int", "unsigned int", "float", "c10::complex<c10::half>"),
    8: ("long", "long int", "long long", "unsigned long", "long unsigned int", "double", "c10::complex<float>"),
    16: ("c10::complex<double>",),
}
_TYPE_BYTES = {name: size for size, names in _SIZES_BY_BYTES.items() for name in names}
"""Size by C++ type name, as compilers write it, bytes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of input and output, and elements of the input; -1 if unknown."""

    in_bytes: int = -1
    out_bytes: int = -1
    in_elements: int = -1


def sizes_of(name: str, args: Args) -> Sizes:
    """Compute the sizes of an event from its shapes."""
    if name not in SHAPED:
        return Sizes()
    dims, types = value_of(args.dims), value_of(args.types)
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types) or not dims:
        return Sizes()
    tensors = [_tensor(*pair) for pair in zip(dims, types, strict=True)]
    if name in _EQUAL:
        elements = _sum([elements for elements, _ in tensors])
        size = _sum([size for _, size in tensors])
        return Sizes(size, size, elements)
    source, target = _OPERATORS[name]
    if source >= len(tensors):
        return Sizes()
    elements, size = tensors[source]
    if target == _GATHER:
        number = _number(args, 1)
        return Sizes(size, size * number, elements) if size >= 0 and number > 0 else Sizes(in_elements=elements)
    if target == _INPUT_ONLY:
        return Sizes(size, -1, elements)
    out = tensors[int(target)][1] if int(target) < len(tensors) else -1
    return Sizes(size, out, elements) if min(size, out) >= 0 else Sizes(in_elements=elements)


_ALL_TO_ALL, _OUT_SPLITS, _IN_SPLITS = "c10d::alltoall_base_", 3, 4
"""The operator of an all-to-all of one tensor, and the arguments with the rows of each peer."""


def splits_of_operator(name: str, args: Args) -> str:
    """The splits of an all-to-all, from the values of its arguments; "" where it has none."""
    values = value_of(args.inputs) if name == _ALL_TO_ALL else None
    if not isinstance(values, list) or len(values) <= _IN_SPLITS:
        return ""
    return splits_text(values[_IN_SPLITS], values[_OUT_SPLITS])


def splits_text(sent: object, received: object) -> str:
    """The splits of an all-to-all as the tables have them ("3,7>3,1"), from two texts such as "[3, 7]".

    "" where there are none, or not all peers are listed.
    """
    sides = [_SPLITS.fullmatch(side) if isinstance(side, str) else None for side in (sent, received)]
    texts = [side[1].replace(" ", "") for side in sides if side is not None]
    if len(texts) < 2 or texts[0].count(",") != texts[1].count(","):
        return ""
    return ">".join(texts)


_SPLITS = re.compile(r"\[(\d{1,18}(?:, ?\d{1,18})*)\]", re.ASCII)


def _tensor(dims: object, kind: object) -> tuple[int, int]:
    """(elements, bytes) of an argument; the bytes of a list are unknown."""
    if kind == "TensorList":
        listed = dims if isinstance(dims, list) else []
        return (_sum([_elements(each) for each in listed]) if listed else -1), -1
    item = _TYPE_BYTES.get(str(kind).lower(), -1)
    elements = _elements(dims) if item > 0 else -1
    size = elements * item
    return (elements, size) if elements >= 0 and size < 2**63 else (-1, -1)


def _elements(dims: object) -> int:
    if not isinstance(dims, list) or not all(type(length) is int and length >= 0 for length in dims):
        return -1
    product = math.prod(dims)
    return product if product < 2**63 else -1


def _sum(values: Sequence[int]) -> int:
    return sum(values) if min(values) >= 0 and sum(values) < 2**63 else -1


def _number(args: Args, index: int) -> int:
    """The value of a numeric argument; -1 if it was not recorded."""
    values = value_of(args.inputs)
    text = str(values[index]) if isinstance(values, list) and index < len(values) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
