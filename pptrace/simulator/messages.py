"""Messages of a simulated step: both ends of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pptrace.schedule.needs import Output
from pptrace.simulator.costs import Costs
from pptrace.simulator.simulation import Simulation


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One end of a message, under way from ``start_ns`` to ``end_ns``.

    ``kind`` is send or recv, ``direction`` F or B, ``stage`` the one at this end, ``peer`` the pipeline rank at the other end,
    and ``match`` the number of the message, the same at both ends.
    """

    rank: int
    kind: str
    direction: str
    stage: int
    microbatch: int
    peer: int
    start_ns: int
    end_ns: int
    match: int


def messages_of(simulation: Simulation, costs: Costs) -> list[MessageEnd]:
    """Both ends of every message: it leaves when the action that makes it ends, and receives are posted ahead."""
    table = simulation.plan.table
    entries = np.flatnonzero(table.dep_is_message)
    sender, reader = table.dep[entries], table.dep_reader[entries]
    sent = simulation.replayed.end[sender]
    arrived = sent + np.broadcast_to(costs.latencies(table), table.num_messages)[table.dep_message[entries]]
    cell, output = np.divmod(table.dep_slot[entries], len(Output))
    stage, microbatch = np.divmod(cell, table.num_microbatches)
    is_forward = output == Output.FORWARD
    direction = np.where(is_forward, "F", "B")
    ends = []
    for kind, own, other, of_stage in (
        ("send", sender, reader, stage),
        ("recv", reader, sender, stage + np.where(is_forward, 1, -1)),
    ):
        columns = (table.rank[own], direction, of_stage, microbatch, table.rank[other], sent, arrived)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        ends += [
            MessageEnd(rank, kind, way, at, number, peer, start, end, match)
            for match, (rank, way, at, number, peer, start, end) in enumerate(rows)
        ]
    return ends
