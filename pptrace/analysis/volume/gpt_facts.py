"""Facts of the GPT runtime that determine its communication, and the parameters of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class GptFacts:
    """The ``model`` object of a trace's facts, by its keys (``instrument/examples/train_gpt.py``).

    ``clip_grad`` is the largest norm of the gradient, 0 for none; ``steps`` how many the run had.
    ``recompute_microbatches_beyond`` is None where all microbatches recompute as ``recompute`` says.
    """

    hidden: int
    heads: int
    kv_heads: int
    sequence: int
    microbatch_size: int
    vocabulary: int
    dtype: str
    tied: bool
    layers_per_stage: tuple[int, ...]
    sequence_parallel: bool
    overlap: bool
    ulysses: int
    recompute: str
    recompute_microbatches_beyond: int | None
    zero: int
    bucket_bytes: int
    clip_grad: float
    optimizer_sync: str
    steps: int

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        """Bytes of a gradient, a loss or a logit in the cross-entropy: 32 bits at least."""
        return max(4, self.item_bytes)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


_SIZES = (
    "hidden",
    "heads",
    "kv_heads",
    "sequence",
    "microbatch_size",
    "vocabulary",
    "ulysses",
    "bucket_bytes",
    "steps",
)
_SWITCHES = ("tied", "sequence_parallel", "overlap")


def read_gpt_facts(model: object) -> GptFacts | None:
    """The facts of a trace's ``model`` object; None where it is not the GPT's, lacks any of them, or has experts, whose
    communication and memory depend on the routes.
    """
    if not isinstance(model, Mapping) or model.get("name") != "gpt" or model.get("experts"):
        return None
    names = [field.name for field in fields(GptFacts)]
    if not all(name in model for name in names):
        return None
    values: dict[str, Any] = {name: model[name] for name in names}
    per_stage, keep = values["layers_per_stage"], values["recompute_microbatches_beyond"]
    legal = (
        all(_is_count(values[name]) and values[name] > 0 for name in _SIZES)
        and all(isinstance(values[name], bool) for name in _SWITCHES)
        and isinstance(per_stage, Sequence)
        and all(_is_count(count) for count in per_stage)
        and values["dtype"] in ITEM_BYTES
        and values["recompute"] in RECOMPUTES
        and (keep is None or _is_count(keep))
        and values["zero"] in range(4)
        and isinstance(values["clip_grad"], int | float)
    )
    return GptFacts(**values | {"layers_per_stage": tuple(per_stage)}) if legal else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as a rank of tp holds it.

    ``summed`` numbers of its gradient are summed over tp once per step, because each rank sees only a part of what the
    parameter acts on: all of them with SP, of copied KV heads the rows of all KV heads. ``is_embedding`` is the matrix
    that a tied model has at both ends.
    """

    shape: tuple[int, ...]
    summed: int = 0
    is_embedding: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def local_numel(self, rank: int, size: int) -> int:
        """Elements of one of ``size`` replicas where whole rows are shared out (``torch.chunk``)."""
        return len(range(self.shape[0])[self._share(size) * rank :][: self._share(size)]) * prod(self.shape[1:])

    def padded_numel(self, size: int) -> int:
        """Elements of the equal shares of ``size`` replicas together."""
        return self._share(size) * size * prod(self.shape[1:])

    def _share(self, size: int) -> int:
        return -(-self.shape[0] // size)


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of one stage of the model, in the order of its modules; ``layers`` one by one, and what is before and after
    them.
    """

    before: tuple[Parameter, ...]
    layers: tuple[tuple[Parameter, ...], ...]
    after: tuple[Parameter, ...]

    def __iter__(self) -> Iterator[Parameter]:
        yield from self.before
        for layer in self.layers:
            yield from layer
        yield from self.after


def stage_parameters(facts: GptFacts, stage: int, tp: int) -> StageParameters:
    """Parameters of a stage of the model on one rank of tp. A tied embedding stands at both ends here."""
    hidden, shards = facts.hidden, facts.sequence_parallel and tp > 1
    rows = facts.vocabulary // tp
    layer = _layer_parameters(facts, tp, shards)
    positions = _whole((facts.sequence, hidden), shards)
    norm = (_whole((hidden,), shards), _whole((hidden,), shards))
    is_first, is_last = stage == 0, stage == len(facts.layers_per_stage) - 1
    return StageParameters(
        (Parameter((rows, hidden), is_embedding=True), positions) if is_first else (),
        (layer,) * facts.layers_per_stage[stage],
        (*norm, Parameter((rows, hidden), is_embedding=True)) if is_last else (),
    )


def _whole(shape: tuple[int, ...], shards_sequence: bool) -> Parameter:
    """A parameter that every rank of tp holds."""
    return Parameter(shape, summed=prod(shape) if shards_sequence else 0)


def _layer_parameters(facts: GptFacts, tp: int, shards: bool) -> tuple[Parameter, ...]:
    hidden, width = facts.hidden, facts.head_dim
    is_copied = facts.kv_heads % tp != 0
    kv_heads = 1 if is_copied else facts.kv_heads // tp
    qkv = (facts.heads // tp + 2 * kv_heads) * width
    copied = 2 * facts.kv_heads * width if is_copied else 0  # rows of all key heads and all value heads
    norm = (_whole((hidden,), shards), _whole((hidden,), shards))
    return (
        *norm,
        Parameter((qkv, hidden), summed=copied * hidden),
        Parameter((qkv,), summed=copied),
        Parameter((hidden, hidden // tp)),
        _whole((hidden,), shards),
        *norm,
        Parameter((4 * hidden // tp, hidden)),
        Parameter((4 * hidden // tp,)),
        Parameter((hidden, 4 * hidden // tp)),
        _whole((hidden,), shards),
    )
