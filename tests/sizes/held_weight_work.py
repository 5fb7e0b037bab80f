"""Bytes that stages keep on real ranks for their W, after their I. Functions here are called in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.expert.dispatch import TokenDispatch
from instrument.expert.layer import ExpertLayer
from instrument.expert.pieces import Tape, run_through
from instrument.models.gpt import cross_entropy
from instrument.pipeline.memory import StorageWatch
from instrument.recorder import Recorder
from instrument.sequence.dropout import MicrobatchKey
from pptrace.sizes.expert_step import LayerRoutes
from tests.instrument.models.cases.mixes import HIDDEN, MICROBATCH_SIZE, SEQUENCE, Mix, mesh_of, parallel_of, runtime_of
from tests.sizes.held_layers import counted, settled


@dataclass(frozen=True, slots=True)
class HeldWork:
    """Bytes that are alive after the I of a stage of the plan on one rank; and of its layers with experts, in their order, the
    routes that this rank counts.
    """

    stage: int
    num_bytes: int
    routes: tuple[LayerRoutes, ...]


def hold_weight_work(mixes: Sequence[Mix], sequences: int = MICROBATCH_SIZE) -> list[list[HeldWork]]:
    """All stages of this rank, of each mix, of a microbatch of so many sequences."""
    return [_hold(mix, sequences) for mix in mixes]


def _hold(mix: Mix, sequences: int) -> list[HeldWork]:
    mesh = mesh_of(mix)
    runtime = runtime_of(mix, mesh, Recorder())
    parallel, found = parallel_of(runtime), []
    for number, stage in runtime.program.stages.items():
        routes: list[LayerRoutes] = []
        for block in stage.blocks.values():
            if isinstance(block.experts, ExpertLayer):
                _note(block.experts, routes)
        torch.manual_seed(mesh.dp_rank)
        tokens = torch.randint(256, (sequences, SEQUENCE // mix.cp))
        targets = torch.randint(256, tokens.shape)
        watch = StorageWatch(stage.parameters())
        watch.exempt((tokens, targets))
        with watch:
            x = tokens
            if stage.embedding is None:
                length = parallel.activation_length(SEQUENCE)
                x = torch.randn(sequences, length, HIDDEN, dtype=mix.config.dtype).requires_grad_()
            tape, key = Tape(), MicrobatchKey()
            output = (
                run_through(stage.in_pieces(x, tape, key))
                if runtime.program.in_pieces
                else stage(x, microbatch_key=key)
            )
            if stage.head is not None:
                output = cross_entropy(output, targets, parallel.region.group)
            edge, gradient = torch.autograd.graph.get_gradient_edge(output), torch.ones_like(output)
            del output
            with runtime.program.queues[number].collecting() as work:
                run_through(tape.backward([edge], [gradient]))
            del edge, gradient, tape, x
            found.append(HeldWork(number, settled(watch), tuple(routes)))
            while work:
                work.pop().run()
            assert settled(watch) == 0
    return found


def _note(layer: ExpertLayer, routes: list[LayerRoutes]) -> None:
    make = layer._dispatch

    def noted(routed: Tensor) -> TokenDispatch:
        dispatch = make(routed)
        routes.append(counted(dispatch))
        return dispatch

    layer._dispatch = noted
