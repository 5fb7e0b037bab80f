"""Calls of a run that flight-recorder dumps complete, and what they warn of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from pptrace.ingest.flight_recorder.dump import read_dumps
from pptrace.ingest.flight_recorder.reader import DUMP_PRODUCER, NO_CALLS
from pptrace.recognise.calls.from_flight_recorder import with_dumps
from pptrace.recognise.recognised_rank import RecognisedRank


def complete_calls(
    ranks: Sequence[RecognisedRank], dumps: Sequence[Path], *, has_hung: bool
) -> tuple[tuple[RecognisedRank, ...], tuple[str, ...]]:
    """The ranks with what the dumps in some files say of their calls; with warnings, also of files that cannot be read.

    Of a run that ``has_hung``, the verdict says which calls are incomplete, and the ranks' own warnings of these are dropped.
    """
    read, unreadable = read_dumps(dumps)
    named, warnings = with_dumps(ranks, read)
    completed = []
    for rank in named:
        if has_hung and rank.info.producer.startswith(DUMP_PRODUCER):
            lines = tuple(line for line in rank.info.warnings if line == NO_CALLS)
            rank = rank.with_info(replace(rank.info, warnings=lines))
        completed.append(rank)
    return tuple(completed), (*unreadable, *warnings)
