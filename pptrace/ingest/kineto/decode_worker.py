"""A process that decodes blocks of a Kineto file for another one: see :mod:`pptrace.ingest.kineto.decode_pool`.

argument          the file descriptor of the memory that both share, cut into slots
standard input    one line per block: its slot, its length in bytes
standard output   READY, then DONE for each block decoded, in order; after the end of the input a pickled Helped.
                  REFUSED, and nothing after it, where a block is not a list of events
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
class Helped:
    """What a helper read."""

    collected: Collected = field(default_factory=Collected)
    damage: Damage = field(default_factory=Damage)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader is interrupted too, and closes the input
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.disable()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever else is printed is no answer
    slots = mmap.mmap(int(sys.argv[1]), NUM_SLOTS * SLOT_BYTES, access=mmap.ACCESS_READ)
    answers.write(READY)
    helped = Helped()
    for line in sys.stdin.buffer:
        slot, length = map(int, line.split())
        start = slot * SLOT_BYTES
        read = decode_block(b"".join((b"[", slots[start : start + length], b"]")))
        if read is None:
            answers.write(REFUSED)
            return
        helped.collected.add(read.events)
        helped.damage.lost_events += read.lost
        helped.damage.repaired += read.repaired
        answers.write(DONE)
    with os.fdopen(answers.fileno(), "wb", closefd=False) as buffered:
        pickle.dump(helped, buffered, pickle.HIGHEST_PROTOCOL)
