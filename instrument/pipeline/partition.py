"""Which layers each stage holds. The embedding goes with the first stage and the head with the last."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.errors import UsageError


def partition(num_layers: int, num_stages: int, split: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layer indices of every stage, in order.

    Args:
        num_layers: transformer blocks of the whole model.
        num_stages: stages of the whole pipeline, all chunks of all ranks counted.
        split: layers of each stage; None shares them out evenly, the first stages taking one more where they do not
            divide (the last stage has the head to compute).

    Raises:
        UsageError: more stages than layers, or a split that does not fit.
    """
    if num_stages > num_layers:
        raise UsageError(f"{num_stages} stages need at least {num_stages} layers and the model has {num_layers}")
    if split is None:
        share, rest = divmod(num_layers, num_stages)
        split = [share + (stage < rest) for stage in range(num_stages)]
    if len(split) != num_stages:
        raise UsageError(f"split {_text(split)} names {len(split)} stages; the pipeline has {num_stages}")
    if sum(split) != num_layers or min(split) < 1:
        raise UsageError(
            f"split {_text(split)} has {sum(split)} layers; expected at least 1 per stage and {num_layers} in all"
        )
    starts = [sum(split[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, split, strict=True))


def _text(split: Sequence[int]) -> str:
    return ",".join(map(str, split))
