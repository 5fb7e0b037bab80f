"""Decode blocks of a Kineto file in a worker process: see :mod:`pptrace.ingest.kineto.decode_pool`.

argument          file descriptor of the shared memory, which is divided into slots
standard input    one line per block: its slot, its length in bytes
standard output   READY, then DONE for each block decoded, in order; after the end of the input a pickled DecodedPart.
                  REFUSED, and nothing after it, for a block that is no list of events
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import sys
from dataclasses import dataclass, field

from pptrace.ingest.kineto.decoded_events import Collected, Damage
from pptrace.ingest.kineto.event_stream import decode_block

SLOT_BYTES = 512 * 1024
NUM_SLOTS = 4
READY, DONE, REFUSED = b"r", b".", b"x"


@dataclass(slots=True)
class DecodedPart:
    """The events decoded by one worker."""

    collected: Collected = field(default_factory=Collected)
    damage: Damage = field(default_factory=Damage)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader gets it too, and closes the input
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.disable()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # other output must not appear among the answers
    slots = mmap.mmap(int(sys.argv[1]), NUM_SLOTS * SLOT_BYTES, access=mmap.ACCESS_READ)
    answers.write(READY)
    part = DecodedPart()
    for line in sys.stdin.buffer:
        slot, length = map(int, line.split())
        start = slot * SLOT_BYTES
        read = decode_block(b"".join((b"[", slots[start : start + length], b"]")))
        if read is None:
            answers.write(REFUSED)
            return
        part.collected.add(read.events)
        part.damage.lost_events += read.num_lost
        part.damage.repaired += read.repaired
        answers.write(DONE)
    with os.fdopen(answers.fileno(), "wb", closefd=False) as buffered:
        pickle.dump(part, buffered, pickle.HIGHEST_PROTOCOL)
