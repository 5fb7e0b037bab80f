"""Training with probes, in the processes of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instrument.delays import Delays
from instrument.recorder import Recorder
from pptrace.schedule.probe import parse_probes
from tests.instrument.pipeline.cases.training import Case, mesh_of, runtime_of

STEPS = 4


def train_probed(case: Case, probes: Sequence[str]) -> tuple[list[str], list[str], object]:
    """Some steps of SGD.

    Returns:
        The losses and the parameters of this rank as hexadecimal numbers, and how long it was delayed.
    """
    torch.manual_seed(0)
    delays = Delays(parse_probes(probes), lambda: True)
    mesh = mesh_of(case)
    runtime = runtime_of(case, mesh, Recorder(lambda: True, delays.around if probes else None))
    optimizer = torch.optim.SGD(list(runtime.program.parameters()), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = runtime.run(case.batch(0, step), step).loss
        losses += [] if loss is None else [loss.item().hex()]
        optimizer.step()
        optimizer.zero_grad()
    numbers = [value.hex() for parameter in runtime.program.parameters() for value in parameter.flatten().tolist()]
    return losses, numbers, delays.facts()["delays_ns"]
