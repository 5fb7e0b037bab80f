"""Floating-point operations of torch's operators from the shapes of their inputs (``record_shapes``, ``with_flops``).

Matrix products, convolutions and attention are counted, as :mod:`torch.utils.flop_counter` does: 2 · m · n · k of a product, the
full square of an attention, whatever its mask. Kineto's files do not have the counts of ``with_flops`` themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod

from msgspec import Raw, Struct, field

from pptrace.ingest.kineto.event_types import ABSENT, value_of

Shape = Sequence[int]
UNKNOWN = -1
"""FLOPs of an operator whose shapes were not recorded, or are not those that it takes."""


class ShapeArgs(Struct, frozen=True, gc=False):
    """The ``args`` used of operators whose FLOPs are counted."""

    dims: Raw = field(default=ABSENT, name="Input Dims")
    inputs: Raw = field(default=ABSENT, name="Concrete Inputs")


def flops_of(name: str, args: ShapeArgs) -> int:
    """The FLOPs of an operator of :data:`COUNTED`; :data:`UNKNOWN` where its shapes do not tell."""
    dims, inputs = value_of(args.dims), value_of(args.inputs)
    try:
        counted = COUNTED[name](dims, inputs)
    except (TypeError, ValueError, IndexError, KeyError):
        return UNKNOWN
    return counted if isinstance(counted, int) and 0 <= counted < 2**62 else UNKNOWN


def _product(first: Shape, second: Shape) -> int:
    """FLOPs of a product of matrices, or of as many of them as both have."""
    if not first or not second or first[-1] != second[max(len(second) - 2, 0)]:
        raise ValueError
    return 2 * prod(first) * (second[-1] if len(second) > 1 else 1)


def _attention(dims: Sequence[Shape], products_by_key: int, products_by_value: int) -> int:
    query, key, value = dims
    batch, heads, length, width = query
    _, _, key_length, value_width = value
    if key[2] != key_length:
        raise ValueError
    return 2 * batch * heads * length * key_length * (products_by_key * width + products_by_value * value_width)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in json.loads(text)]


def _convolution(dims: Sequence[Shape], inputs: Sequence[str]) -> int:
    """A product for each place of the output, of a transposed one of the input."""
    (batch, _, *sizes), (_, _, *kernel) = dims[:2]
    if inputs[6] != "True":
        strides, paddings, dilations = map(_numbers, inputs[3:6])
        steps = zip(sizes, kernel, strides, paddings, dilations, strict=True)
        sizes = [
            (size + 2 * pad - dilation * (width - 1) - 1) // step + 1 for size, width, step, pad, dilation in steps
        ]
    return 2 * batch * prod(sizes) * prod(dims[1])


def _convolution_backward(dims: Sequence[Shape], inputs: Sequence[str]) -> int:
    """FLOPs of a backward: as many as the forward's for the gradient of the input, and for that of the weights."""
    output, source, weight = dims[:3]
    places = source if inputs[7] == "True" else output
    num_gradients = sum(bool(flag) for flag in json.loads(inputs[10].lower())[:2])
    num_places = places[0] * prod(places[2:])
    return 2 * num_gradients * num_places * prod(weight)


def _names(text: str) -> list[str]:
    return [f"aten::{name}" for name in text.split()]


Count = Callable[[Sequence[Shape], Sequence[str]], int]
_FORWARDS = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
COUNTED: Mapping[str, Count] = {
    **dict.fromkeys(_names("mm bmm mv _int_mm _scaled_mm"), lambda dims, _: _product(*dims[:2])),
    **dict.fromkeys(
        _names("addmm addmm_ baddbmm baddbmm_ addmv addmv_ _addmm_activation"), lambda dims, _: _product(*dims[1:3])
    ),
    **{f"aten::_scaled_dot_product_{kind}": lambda dims, _: _attention(dims[:3], 1, 1) for kind in _FORWARDS},
    **{f"aten::_scaled_dot_product_{kind}_backward": lambda dims, _: _attention(dims[1:4], 3, 2) for kind in _FORWARDS},
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
"""Counters of the FLOPs of each operator, from the shapes of its inputs and their values."""
