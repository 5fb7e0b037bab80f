"""Bytes that a layer with experts keeps on real ranks. Functions here are called in worker processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.expert.dispatch import RowDispatch, TokenDispatch
from instrument.expert.pieces import Tape, run_through
from instrument.pipeline.memory import StorageWatch
from instrument.recorder import Recorder
from instrument.sequence.dropout import MicrobatchKey
from pptrace.sizes.expert_step import LayerRoutes
from tests.instrument.models.cases.mixes import HIDDEN, MICROBATCH_SIZE, SEQUENCE, Mix, mesh_of, parallel_of, runtime_of


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """Bytes that are alive after a layer's forward on one rank, without its output, and the routes that this rank counts."""

    num_bytes: int
    routes: LayerRoutes


def hold_layers(mixes: Sequence[Mix], sequences: int = MICROBATCH_SIZE) -> list[HeldLayer]:
    """The first layer of each mix, whose forward runs in pieces if its schedule has overlapped pairs."""
    return [_hold(mix, sequences) for mix in mixes]


def _hold(mix: Mix, sequences: int) -> HeldLayer:
    mesh = mesh_of(mix)
    runtime = runtime_of(mix, mesh, Recorder())
    stage = next(iter(runtime.program.stages.values()))
    block = next(iter(stage.blocks.values()))
    dispatches: list[LayerRoutes] = []
    make = block.experts._dispatch

    def noted(routed: Tensor) -> TokenDispatch:
        dispatch = make(routed)
        dispatches.append(counted(dispatch))
        return dispatch

    block.experts._dispatch = noted
    torch.manual_seed(mesh.dp_rank)
    length = parallel_of(runtime).activation_length(SEQUENCE)
    x = torch.randn(sequences, length, HIDDEN, dtype=mix.config.dtype).requires_grad_()
    tape, key, in_pieces = Tape(), MicrobatchKey(), runtime.program.in_pieces
    watch = StorageWatch(block.parameters())
    with watch:
        output = run_through(block.in_pieces(x * 1, tape, key, False)) if in_pieces else block(x * 1, key)
        alive = settled(watch) - output.untyped_storage().nbytes()
    return HeldLayer(alive, dispatches[0])


def counted(dispatch: TokenDispatch) -> LayerRoutes:
    """The routes of one forward, as a rank counts them."""
    rows = sum(dispatch.rows_of_expert)
    received = dispatch.exchange.received if isinstance(dispatch, RowDispatch) else None
    return LayerRoutes([int(dispatch.counts.sum())], [rows if received is None else sum(received)], [rows])


def settled(watch: StorageWatch) -> int:
    """The bytes that are alive when gloo's threads, which let go of a call's tensors after its wait, have done so."""
    lowest, num_equal = watch.live_bytes(), 0
    while lowest and num_equal < _EQUAL_READINGS:
        time.sleep(0.01)
        now = watch.live_bytes()
        num_equal = num_equal + 1 if now == lowest else 0
        lowest = now
    return lowest


_EQUAL_READINGS = 10
