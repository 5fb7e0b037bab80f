"""The catalogue of schedules as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pptrace.api.summary import text_table
from pptrace.schedule.registry import SCHEDULES, Schedule, get

_COLUMNS = ("name", "what it is", "ideal bubble ratio", "chunks in flight on rank r", "source")


class Catalogue(Mapping[str, Schedule]):
    """Every schedule by its name: what ``pptrace schedule list`` shows.

        >>> import pptrace
        >>> pptrace.schedules["interleaved-1f1b"].bubble
        '(p−1)/(v·m)'
        >>> pptrace.schedules["gpipe"].build(pp=2, microbatches=4)
        <Plan 'gpipe': pp=2, num_microbatches=4, num_chunks=1>

    A name that it lacks is an :class:`~pptrace.errors.UnknownScheduleError`, which is a PptraceError and a KeyError.
    """

    def __getitem__(self, name: str) -> Schedule:
        return get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(SCHEDULES)

    def __len__(self) -> int:
        return len(SCHEDULES)

    def __repr__(self) -> str:
        return f"<pptrace.schedules: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        rows = [
            (entry.name, entry.summary, entry.bubble_text, entry.in_flight_text, entry.source)
            for entry in SCHEDULES.values()
        ]
        return text_table(_COLUMNS, rows) + "p ranks, m microbatches, v chunks per rank, N microbatch group size"


schedules = Catalogue()
