"""Partition of layers over stages. The first stage has the embedding and the last the head; these two may have no layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pptrace.errors import UsageError
from pptrace.schedule.layout import fits


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of layers over stages, by Megatron-LM's options.

    ``split`` says it all: the layers of each stage. Or ``first`` and ``last`` fix those of the first and the last rank, in all
    of its stages together (``--decoder-first-pipeline-num-layers``), or ``counts_embedding`` and ``counts_loss`` count the
    embedding and the loss as a layer of theirs (``--account-for-embedding-in-pipeline-split``); the remaining layers are
    distributed evenly.
    """

    split: tuple[int, ...] | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        has_ends = self.first is not None or self.last is not None
        if self.split is not None and (self.counts_embedding or self.counts_loss or has_ends):
            raise UsageError("an explicit split determines all stages; give the split alone")
        if (self.counts_embedding and self.first is not None) or (self.counts_loss and self.last is not None):
            raise UsageError("a stage whose layers are given has nothing to count; give one of the two")

    def layers(self, num_layers: int, num_stages: int, placement: Sequence[int] | None = None) -> tuple[int, ...]:
        """Layers of every stage; the first stages take one more where they do not divide.

        Args:
            num_layers: of the model.
            num_stages: of the model.
            placement: the rank of each stage; None: a stage on each rank.

        Raises:
            UsageError: a stage would have nothing, or the layers of the first or last rank do not divide among its stages.
        """
        if self.split is not None:
            return self.split
        ranks = range(num_stages) if placement is None else placement
        fixed = _layers_of(0, self.first, ranks) | _layers_of(max(ranks), self.last, ranks)
        free = [stage for stage in range(num_stages) if stage not in fixed]
        left = num_layers - sum(fixed.values()) + self.counts_embedding + self.counts_loss
        if (left < len(free)) if free else left:
            raise UsageError(
                f"{num_layers} layers on {num_stages} stages with {self} leave {left} for {len(free)} stages; "
                "expected at least 1 for each, and none for none"
            )
        share, rest = divmod(left, len(free)) if free else (0, 0)
        counts = fixed | {stage: share + (index < rest) for index, stage in enumerate(free)}
        counts[0] -= self.counts_embedding
        counts[num_stages - 1] -= self.counts_loss
        return tuple(counts[stage] for stage in range(num_stages))

    def __str__(self) -> str:
        words = [
            f"{self.first} in the first rank" if self.first is not None else "",
            f"{self.last} in the last rank" if self.last is not None else "",
            "the embedding counted" if self.counts_embedding else "",
            "the loss counted" if self.counts_loss else "",
        ]
        return ", ".join(word for word in words if word) or "even shares"


def _layers_of(rank: int, count: int | None, ranks: Sequence[int]) -> dict[int, int]:
    """Layers of the stages of a rank that has ``count`` in all; {} where that is not given."""
    stages = [stage for stage, of_stage in enumerate(ranks) if of_stage == rank]
    if count is None:
        return {}
    if count % len(stages):
        raise UsageError(
            f"rank {rank} has {count} layers, which do not divide among its {len(stages)} stages; choose a multiple of "
            f"{len(stages)}"
        )
    return dict.fromkeys(stages, count // len(stages))


def partition(num_layers: int, num_stages: int, split: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layer indices of every stage, in order.

    Args:
        num_layers: transformer blocks of the whole model.
        num_stages: stages of the whole pipeline, all chunks of all ranks counted.
        split: layers of each stage, which the first and the last may have none of; None distributes them evenly, the first
            stages taking one more where they do not divide (the last stage has the head to compute).

    Raises:
        UsageError: more stages than layers, or a split that does not fit.
    """
    if split is None:
        if num_stages > num_layers:
            raise UsageError(f"{num_stages} stages need at least {num_stages} layers and the model has {num_layers}")
        share, rest = divmod(num_layers, num_stages)
        split = [share + (stage < rest) for stage in range(num_stages)]
    if len(split) != num_stages:
        raise UsageError(f"split {_text(split)} names {len(split)} stages; the pipeline has {num_stages}")
    if sum(split) != num_layers or not fits(split):
        raise UsageError(
            f"split {_text(split)} has {sum(split)} layers; expected {num_layers} in all, and at least 1 in each stage but the "
            "first and the last, which may have the embedding or the loss alone"
        )
    starts = [sum(split[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, split, strict=True))


def _text(split: Sequence[int]) -> str:
    return ",".join(map(str, split))
