"""Connections that a transport opens before its first message, with the calls that it would make on NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist

from instrument.mesh import fit_shape, make_mesh
from instrument.pipeline.transport import Mode, make_transport
from instrument.route import Route
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build

Batches = list[list[tuple[str, int]]]


def connections(schedule: str, mode: Mode, backend: str) -> Batches:
    """The (call, peer) of each batch that this rank posts when its transport is made, in a group that names this backend."""
    mesh = make_mesh(fit_shape(dist.get_world_size()), "cpu", "gloo", mirrored=schedule == "dualpipe")
    plan = lower(build(schedule, mesh.shape.pp, 2 * mesh.shape.pp))
    batches: Batches = []
    post = dist.batch_isend_irecv

    def noted(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
        batches.append([(operation.op.__name__, operation.group_peer) for operation in operations])
        return post(list(operations))

    with patch.object(dist, "get_backend", lambda group: backend), patch.object(dist, "batch_isend_irecv", noted):
        make_transport(mesh, mode, Route.DIRECT, plan, torch.device("cpu"))
    return batches
