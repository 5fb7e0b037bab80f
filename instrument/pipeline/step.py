"""The program that one pipeline rank runs in every step, and the state of a running step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from instrument.backward_split.split import WeightQueue, attach
from instrument.data.text import Batch
from instrument.pipeline.boundary import Boundary
from instrument.pipeline.instruction import Instruction
from instrument.pipeline.microbatch_buffers import MicrobatchBuffers, Tensors
from instrument.pipeline.p2p import Arrival, Communicator
from instrument.recorder import Recorder
from instrument.sequence.dropout import MicrobatchKey
from pptrace.schedule.actions import Cell, Kind
from pptrace.schedule.plan import Plan

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, targets) of one microbatch → scalar."""


@dataclass(frozen=True)
class RankProgram:
    """One pipeline rank's part of a plan, with all that its handlers need to run it.

    Args:
        plan: lowered; validated by the caller where it does not come from a builder.
        pp_rank: this rank's index in the pipeline.
        stages: stage → module, for every stage that the plan puts on this rank.
        loss_function: of the last stage.
        communicator: sends and receives for this rank.
        recomputed: microbatches whose forward saves its input alone (``stage(x, recompute=True)``).
        pass_microbatch_key: every forward gets its step and microbatch (``stage(x, microbatch_key=…)``), as it does where its
            batch is packed of documents.
        reads_tokens: stages with the decoder's embedding, of a model with an encoder (``stage(x, decoder_tokens=…)``).
        boundary: messages that are no outputs as they are.
        in_pieces: the halves of overlapped pairs alternate in pieces, where the stages can (:mod:`instrument.expert.pieces`).
    """

    plan: Plan
    pp_rank: int
    stages: Mapping[int, nn.Module]
    loss_function: LossFunction
    communicator: Communicator
    recorder: Recorder
    recomputed: frozenset[Cell] = frozenset()
    pass_microbatch_key: bool = False
    in_pieces: bool = False
    reads_tokens: frozenset[int] = frozenset()
    boundary: Boundary | None = None

    @cached_property
    def queues(self) -> Mapping[int, WeightQueue]:
        """Stage → queue of its deferred weight gradients; empty where the plan never splits the backward.

        Layers without a queue are those of torch, so that the other plans keep the fused backward.
        """
        return {stage: attach(module) for stage, module in self.stages.items()} if self.plan.splits_backward else {}

    def forward_kwargs(self, step: int, cell: Cell, batch: Batch) -> dict[str, object]:
        """Keyword arguments of a stage's forward."""
        kwargs: dict[str, object] = {"recompute": True} if cell in self.recomputed else {}
        documents = None if batch.documents is None else batch.documents[cell.microbatch]
        if self.pass_microbatch_key or documents is not None:
            kwargs["microbatch_key"] = MicrobatchKey(step, cell.microbatch, documents)
        if cell.stage in self.reads_tokens:
            kwargs["decoder_tokens"] = batch.tokens_of(cell.microbatch)
        return kwargs

    def received(self, stage: int, messages: Tensors) -> Tensors:
        """The inputs of a stage from the messages of the one before it, or from its outputs if that is on this rank."""
        preceding = self.plan.previous_stage(stage)
        if self.boundary is None or preceding is None or self.is_local(preceding):
            return messages
        return self.boundary.received(preceding, messages)

    def sent(self, stage: int, outputs: Tensors) -> Tensors:
        """The messages of a stage's outputs, or these if the next stage is on this rank."""
        if self.boundary is None or self.is_local(self.plan.next_stage(stage)):
            return outputs
        return self.boundary.sent(outputs)

    def is_local(self, stage: int | None) -> bool:
        """Return whether this rank runs a stage, so that neighbouring stages on it need no message."""
        return stage in self.stages

    def parameters(self) -> Iterable[nn.Parameter]:
        """Every parameter of this rank's stages once."""
        return nn.ModuleList(self.stages.values()).parameters()


@dataclass(frozen=True, slots=True, eq=False)
class StepRun:
    """State of a running step, for the handlers.

    ``losses`` grows by one scalar per microbatch of the last stage. ``arrivals`` are receives that have been posted and
    not yet waited for.
    """

    program: RankProgram
    step: int
    batch: Batch
    buffers: MicrobatchBuffers
    losses: list[Tensor] = field(default_factory=list)
    arrivals: dict[tuple[Kind, Cell], Arrival] = field(default_factory=dict)


Handler = Callable[[StepRun, Instruction], None]
