"""The recognised content of one rank's trace."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.intervals import EMPTY
from pptrace.model.device import DeviceWork
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import CALLS, COMPUTE_KINDS, HOST_ORDER, Int64, empty_table
from pptrace.model.traces import TraceInfo
from pptrace.recognise.ops.from_marks import warnings_of_marks
from pptrace.recognise.recording.rank import RankRecording
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps
from pptrace.slices import rows_among


class RecognisedRank(Struct, frozen=True):
    """Contents of the trace of one rank, on its own clock.

    The ``rank`` column of the tables is -1: which rank it is may be known only later. ``framework`` is whose labels the ops
    come from, "" without ops. ``calls`` is communication that neither marks nor ready tables tell (schema
    :data:`~pptrace.model.tables.CALLS`), ``host`` what the thread of its pipeline did where no label tells the ops
    (schema :data:`~pptrace.model.tables.HOST_ORDER`), ``is_paired`` whether autograd's numbers tell which forward each backward
    of ops without stages belongs to. ``warnings`` are lines about this rank that do not name it. ``host_work`` is the set of
    times at which the host computed, of a rank without device events and without labelled forwards and backwards.
    ``by_gaps`` and ``run_sizes`` as in :class:`~pptrace.recognise.ops.label_steps.RankTables`. ``recording`` is what recording
    did to the rank. ``capturing`` are the numbers of steps in which a CUDA graph was captured, ``repeats`` the steps of a rank
    without any from what repeats, also where ranges that the script numbers are steps: ``step_ranges`` names the first and the
    last of these.
    """

    info: TraceInfo
    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: DeviceWork
    warnings: tuple[str, ...] = ()
    calls: pd.DataFrame = field(default_factory=lambda: empty_table(CALLS))
    host_work: Int64 = field(default_factory=lambda: EMPTY)
    by_gaps: bool = False
    host: pd.DataFrame = field(default_factory=lambda: empty_table(HOST_ORDER))
    is_paired: bool = False
    recording: RankRecording = field(default_factory=RankRecording)
    capturing: tuple[int, ...] = ()
    repeats: RepeatedSteps = field(default_factory=RepeatedSteps)
    step_ranges: str = ""
    run_sizes: Mapping[int, int] = {}

    @property
    def number(self) -> int:
        assert self.info.rank is not None
        return self.info.rank

    def with_info(self, info: TraceInfo) -> RecognisedRank:
        return replace(self, info=info)

    def with_more(self, later: RecognisedRank) -> RecognisedRank:
        """Add the tables of another trace of the same rank; facts that both have are those of this one."""
        info = replace(
            self.info,
            num_events=self.info.num_events + later.info.num_events,
            metadata={**later.info.metadata, **self.info.metadata},
            warnings=(*self.info.warnings, *later.info.warnings),
        )
        return replace(
            self,
            info=info,
            ops=concat_tables([self.ops, later.ops]),
            comms=concat_tables([self.comms, later.comms]),
            memory=concat_tables([self.memory, later.memory]),
            warnings=(*self.warnings, *later.warnings),
            run_sizes={**later.run_sizes, **self.run_sizes},
        )

    def without_inferred(self) -> RecognisedRank:
        """Drop the ops and messages inferred from the rank's own order."""
        is_inferred = (self.ops["source"] == "inferred") & rows_among(self.ops["kind"], COMPUTE_KINDS)
        if not is_inferred.any():
            return self
        return replace(
            self,
            ops=self.ops[~is_inferred],
            comms=self.comms[self.comms["axis"] != "pp"],
            warnings=warnings_of_marks(self.warnings),
        )
