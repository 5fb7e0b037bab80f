"""Real text that every machine has: the help topics of CPython (``pydoc_data.topics``), as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pydoc_data import topics
from typing import TypeVar

import torch
from torch import Tensor

from instrument.seeds import mix
from pptrace.errors import PptraceError, UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of one pipeline; ``tokens`` and ``targets`` are int64 (microbatches, microbatch size, sequence).

    Without microbatches where a rank has no stage that reads them. ``lengths`` are the tokens of each sequence of a microbatch,
    behind which is padding; None: all have the whole length. ``source`` are the tokens that an encoder reads, (microbatches,
    microbatch size, source); None: there is none. ``documents`` are the tokens of those that the sequences of a microbatch are
    packed of, which every stage knows; None: of one each.
    """

    tokens: Tensor
    targets: Tensor
    lengths: Sequence[int] | None = None
    source: Tensor | None = None
    documents: Sequence[tuple[int, ...]] | None = None

    def to(self, device: torch.device) -> Batch:
        tokens, targets, *source = (of.to(device, non_blocking=True) for of in self.tensors)
        return replace(self, tokens=tokens, targets=targets, source=source[0] if source else None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tokens, self.targets) if self.source is None else (self.tokens, self.targets, self.source)

    def inputs_of(self, microbatch: int) -> Tensor:
        """The tokens that the first stage reads: an encoder's, or where there is none the model's."""
        return self.tokens_of(microbatch) if self.source is None else self.source[microbatch]

    def tokens_of(self, microbatch: int) -> Tensor:
        """(microbatch size, tokens of its sequences)."""
        return self._part(self.tokens, microbatch, "tokens, which the first stage reads")

    def targets_of(self, microbatch: int) -> Tensor:
        """(microbatch size, tokens of its sequences)."""
        return self._part(self.targets, microbatch, "targets, which the last stage reads")

    def _part(self, of: Tensor, microbatch: int, what: str) -> Tensor:
        if not len(of):
            raise PptraceError(f"this rank's batch has no {what}; make it for the stages that the rank runs")
        return of[microbatch] if self.lengths is None else of[microbatch, :, : self.lengths[microbatch]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths that sequences have in tokens, of one microbatch alike: multiples of ``multiple`` from ``shortest`` to ``longest``,
    drawn evenly.
    """

    shortest: int
    longest: int
    multiple: int = 1
    seed: int = 0

    def of(self, step: int, microbatch: int) -> int:
        """The length in a microbatch of all pipelines, which are numbered one after the other."""
        number = (self.longest - self.shortest) // self.multiple + 1
        return self.shortest + self.multiple * (mix(self.seed, step, microbatch) % number)


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents that sequences of ``sequence`` tokens are packed of, the same of all in a microbatch: of ``shortest`` to as many
    tokens, drawn evenly; the last is cut where the sequence ends.
    """

    shortest: int
    sequence: int
    seed: int = 0

    def of(self, step: int, microbatch: int) -> tuple[int, ...]:
        """The tokens of each document in a microbatch of all pipelines, which are numbered one after the other."""
        lengths: list[int] = []
        while (left := self.sequence - sum(lengths)) > 0:
            drawn = mix(self.seed, step, microbatch, len(lengths)) % (self.sequence - self.shortest + 1)
            lengths.append(min(self.shortest + drawn, left))
        return tuple(lengths)

    @property
    def most(self) -> int:
        """The most documents of a sequence."""
        return -(-self.sequence // self.shortest)


class TextData:
    """Batches drawn from the text; the same (step, dp rank) always gives the same batch.

    The batches of all replicas in a step, one after the other, are the batch of a single pipeline with as many microbatches:
    training on n replicas can be compared with training in one process. ``source`` tokens before those of a sequence are what an
    encoder reads.
    """

    def __init__(
        self,
        num_microbatches: int,
        microbatch_size: int,
        sequence: int,
        seed: int = 0,
        lengths: Lengths | None = None,
        source: int = 0,
        documents: Documents | None = None,
    ) -> None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self._bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if min(num_microbatches, microbatch_size, sequence) < 1 or source + sequence >= len(self._bytes):
            raise UsageError(
                f"{num_microbatches} microbatches of {microbatch_size} × {source + sequence} bytes cannot be drawn from a text "
                f"of {len(self._bytes)} bytes; expected at least 1 of each and a sequence shorter than the text"
            )
        self._shape = (num_microbatches, microbatch_size)
        self._sequence = sequence
        self.source_length = source
        self._seed = seed
        self._lengths = lengths
        self._documents = documents

    @property
    def length_of(self) -> Callable[[int, int], int] | None:
        """(step, microbatch of all pipelines) → tokens of its sequences; None where all have as many."""
        return None if self._lengths is None else self._lengths.of

    def lengths(self, step: int, dp_rank: int) -> tuple[int, ...] | None:
        """The tokens of a sequence of each microbatch of one pipeline in one step; None where all have as many."""
        return None if self._lengths is None else self._of_pipeline(self._lengths.of, step, dp_rank)

    def documents(self, step: int, dp_rank: int) -> tuple[tuple[int, ...], ...] | None:
        """The tokens of each document of each microbatch of one pipeline in one step; None where sequences are not packed.

        Every rank draws them alike and none sends them, as every stage of Megatron-LM reads those of its own copy of the data.
        """
        return None if self._documents is None else self._of_pipeline(self._documents.of, step, dp_rank)

    def attended(self, step: int, dp_rank: int) -> Sequence[int]:
        """The tokens of every run, in one pipeline and step, within which attention works: sequences, or their documents."""
        if (documents := self.documents(step, dp_rank)) is not None:
            return [length for of_microbatch in documents for length in of_microbatch]
        return self.lengths(step, dp_rank) or [self._sequence] * self._shape[0]

    def _of_pipeline(self, of: Callable[[int, int], T], step: int, dp_rank: int) -> tuple[T, ...]:
        first, number = dp_rank * self._shape[0], self._shape[0]
        return tuple(of(step, microbatch) for microbatch in range(first, first + number))

    def batch(self, step: int, dp_rank: int) -> Batch:
        """The batch of one pipeline in one step; each target is the byte after its token."""
        num_microbatches, microbatch_size = self._shape
        generator = torch.Generator().manual_seed(mix(self._seed, step))
        source, whole = self.source_length, self.source_length + self._sequence
        of_each = () if self._documents is None else (self._documents.most,)
        # Those of the replicas before this one as well
        drawn = ((dp_rank + 1) * num_microbatches, microbatch_size, *of_each)
        starts = torch.randint(len(self._bytes) - whole, drawn, generator=generator)[-num_microbatches:]
        documents = self.documents(step, dp_rank)
        if documents is not None:
            at = torch.stack([_packed(*of) for of in zip(starts, documents, strict=True)])
            return Batch(self._bytes[at].long(), self._bytes[at + 1].long(), documents=documents)
        window = self._bytes[starts.unsqueeze(-1) + torch.arange(whole + 1)].long()
        tokens, targets = window[..., source:-1].contiguous(), window[..., source + 1 :].contiguous()
        return Batch(
            tokens, targets, self.lengths(step, dp_rank), window[..., :source].contiguous() if source else None
        )


def _packed(starts: Tensor, documents: Sequence[int]) -> Tensor:
    """Places in the text of a microbatch's tokens (microbatch size, sequence), of documents that begin at ``starts``."""
    offsets = torch.cat([torch.arange(length) for length in documents])
    return starts[:, : len(documents)].repeat_interleave(torch.tensor(documents), 1) + offsets
