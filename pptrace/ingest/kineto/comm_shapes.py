"""Sizes of communication from the shapes of its tensors, as ``record_shapes`` writes them, where their meaning is certain.

    "Input type": ["TensorList", "", "Scalar"]       the type of each argument: an element's, of a tensor; "" of anything else
    "Input Dims": [[[4, 6], [3]], [], []]            its shape; of a list those of its tensors, [] of more than 30
    "Concrete Inputs": ["", "", "-1"]                its value, of numbers

An operator tells its sizes where its tensors are arguments of their own; of a list no type is written. gloo's ranges list all
tensors that a work reads, with types: these are the message where input and output are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pptrace.ingest.kineto.event_types import Args, value_of

_GATHER, _ALONE = "gather", "alone"
_IN_PLACE = (0, 0)
_OPERATORS: dict[str, tuple[int, int | str]] = {
    "c10d::allreduce_": _IN_PLACE,
    "c10d::allreduce_coalesced_": _IN_PLACE,
    "c10d::broadcast_": _IN_PLACE,
    "c10d::reduce_": _IN_PLACE,
    "c10d::_allgather_base_": (1, 0),
    "c10d::_reduce_scatter_base_": (1, 0),
    "c10d::alltoall_base_": (1, 0),
    "_c10d_functional::all_reduce": _IN_PLACE,
    "_c10d_functional::all_reduce_": _IN_PLACE,
    "_c10d_functional::all_reduce_coalesced": _IN_PLACE,
    "_c10d_functional::all_reduce_coalesced_": _IN_PLACE,
    "_c10d_functional::broadcast": _IN_PLACE,
    "_c10d_functional::broadcast_": _IN_PLACE,
    "_c10d_functional::all_gather_into_tensor": (0, _GATHER),
    "_c10d_functional::all_gather_into_tensor_out": (0, _GATHER),
    "_c10d_functional::reduce_scatter_tensor": (0, _ALONE),
    "_c10d_functional::reduce_scatter_tensor_out": (0, _ALONE),
}
"""By operator which argument is its input, and which its output: that many times the input, or smaller than it."""
_EQUAL = ("gloo:all_reduce", "gloo:broadcast", "gloo:reduce", "gloo:send", "gloo:recv")
"""Works whose output is as large as their input."""
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
"""By C++ type, as compilers write it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a message's two sides, and elements of its input; -1 where they are not certain."""

    in_bytes: int = -1
    out_bytes: int = -1
    in_elements: int = -1


def sizes_of(name: str, args: Args) -> Sizes:
    """What the shapes of an event say."""
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
    if target == _ALONE:
        return Sizes(size, -1, elements)
    out = tensors[int(target)][1] if int(target) < len(tensors) else -1
    return Sizes(size, out, elements) if min(size, out) >= 0 else Sizes(in_elements=elements)


def _tensor(dims: object, kind: object) -> tuple[int, int]:
    """(elements, bytes) of an argument; a list's bytes are not told."""
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
    """The number that an argument is; -1 where it is not written."""
    values = value_of(args.inputs)
    text = str(values[index]) if isinstance(values, list) and index < len(values) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
