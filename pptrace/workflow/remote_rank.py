"""A recognised rank whose communication, device work and memory stay on the worker that read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd

from pptrace.errors import PptraceError
from pptrace.ingest.job.read_job import FileResult
from pptrace.model.device import DeviceWork
from pptrace.model.device_idle import only_reason
from pptrace.model.tables import HOST_ORDER, empty_table
from pptrace.model.traces import InputFormat, TraceInfo
from pptrace.recognise.ops.host_compute import HostWork
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.recording.graph import RankGraph

Part = tuple[Any, int]
"""A future of what a file holds (:data:`FileResult`), and which of its ranks is meant; on a worker, the result itself."""

_OF_OTHERS = (InputFormat.OTLP, InputFormat.NCCL_INSPECTOR)
"""Formats whose ranks are recognised by what others recorded."""


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """Rank as this program holds it: its header, its ops, and one row of communication for each kind of row there is.

    ``lean`` has no rows of calls and of host activity, and one at most of device work and memory: whether there is any.
    ``is_plain``: its marks or tables tell all ops and communication, so that nothing is inferred from other ranks. ``parts`` are
    where the whole of it is, in several files where it is in several tables.
    """

    lean: RecognisedRank
    is_plain: bool
    parts: tuple[Part, ...] = ()

    @property
    def info(self) -> TraceInfo:
        return self.lean.info

    @property
    def ops(self) -> pd.DataFrame:
        return self.lean.ops

    @property
    def number(self) -> int:
        return self.lean.number

    def with_info(self, info: TraceInfo) -> RemoteRank:
        return replace(self, lean=self.lean.with_info(info))

    def without_ops(self) -> RemoteRank:
        """The rank with nothing that grows with its trace; where the whole of it is stays known."""
        return replace(self, lean=replace(self.lean, ops=self.lean.ops.head(0)))

    def with_more(self, later: RemoteRank) -> RemoteRank:
        lean = self.lean.with_more(later.lean)
        return RemoteRank(lean, self.is_plain and later.is_plain, (*self.parts, *later.parts))


def lean_ranks(result: FileResult[RecognisedRank]) -> FileResult[RemoteRank]:
    """Reduce the ranks of a file to what goes to the program; runs on the worker that has read it."""
    if isinstance(result, PptraceError):
        return result
    ranks = []
    for rank in result:
        is_plain = not (len(rank.calls) or len(rank.host) or rank.by_gaps or rank.is_paired)
        lean = replace(
            rank,
            comms=distinct_rows(rank.comms),
            memory=rank.memory.head(1),
            work=_one_event(rank.work),
            calls=rank.calls.head(0),
            host_work=HostWork(),
            host=empty_table(HOST_ORDER),
            recording=replace(rank.recording, graph=RankGraph()),
        )
        ranks.append(RemoteRank(lean, is_plain and rank.info.format not in _OF_OTHERS))
    return tuple(ranks)


def _one_event(work: DeviceWork) -> DeviceWork:
    """One event: the last one that no call launched, where there are such (:func:`~pptrace.analysis.lost_steps.lost_steps`)."""
    unlaunched = np.flatnonzero(work.launch_ns < 0)
    row = unlaunched[-1:] if len(unlaunched) else np.arange(len(work))[:1]
    return DeviceWork(
        work.start_ns[row],
        work.end_ns[row],
        work.stream[row],
        work.launch_ns[row],
        work.is_compute[row],
        work.is_communication[row],
        work.missing_device_events,
        only_reason(work.idle),
        work.lost,
    )


def distinct_rows(comms: pd.DataFrame) -> pd.DataFrame:
    """The first row of each kind of communication: what decides on the mesh and on what labels leave open, but not how often."""
    kinds = comms[["kind", "axis", "group_size", "direction", "peer", "clock"]].assign(
        **{name: comms[name] < 0 for name in ("stage", "microbatch")}
    )
    return comms[~kinds.duplicated()].reset_index(drop=True)


def whole_rank(parts: Sequence[Part]) -> RecognisedRank:
    """The rank of these parts, on a worker or where they were fetched; its header is that of the file."""
    ranks: list[RecognisedRank] = [result[index] for result, index in parts]
    return reduce(RecognisedRank.with_more, ranks)
