"""One rank's trace → what is found in it. Its events, which are many, are not needed afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from pptrace.ingest.otlp_facts import DEVICE
from pptrace.recognise.collectives import find_calls
from pptrace.recognise.devices import DeviceWork, device_work
from pptrace.recognise.from_labels import tables_from_labels
from pptrace.recognise.from_marks import tables_from_marks
from pptrace.recognise.from_tables import tables_from_trace
from pptrace.recognise.host_compute import HostWork, host_work
from pptrace.recognise.host_order import HOST_ORDER, find_host_order
from pptrace.recognise.mark_ranges import marked_ranges
from pptrace.recognise.marked_calls import GROUPS_KEY, calls_with_marks, described
from pptrace.recognise.rank_tables import RankTables
from pptrace.recognise.schedule import COMPUTE_KINDS
from pptrace.tables import CALLS, COMMS, OPS, InputFormat, Trace, TraceInfo, empty_table, stacked


@dataclass(frozen=True, slots=True)
class RankFound:
    """What the trace of one rank holds, on its own clock.

    The ``rank`` column of the tables is -1: which rank it is may be known only later. ``framework`` is whose labels the ops
    come from, "" without ops. ``calls`` is communication that neither marks nor ready tables tell (schema
    :data:`~pptrace.tables.CALLS`), ``host`` what the thread of its pipeline did where no label tells the ops
    (schema :data:`~pptrace.recognise.host_order.HOST_ORDER`), ``is_paired`` whether autograd's numbers tell which forward each
    backward of ops without stages belongs to. ``warnings`` are lines about this rank that do not name it.
    ``host_work`` is when the host computed, of a rank without device events and without forwards and backwards. ``by_gaps`` as
    in :class:`~pptrace.recognise.rank_tables.RankTables`.
    """

    info: TraceInfo
    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: DeviceWork
    warnings: tuple[str, ...] = ()
    calls: pd.DataFrame = field(default_factory=lambda: empty_table(CALLS))
    host_work: HostWork = field(default_factory=HostWork)
    by_gaps: bool = False
    host: pd.DataFrame = field(default_factory=lambda: empty_table(HOST_ORDER))
    is_paired: bool = False

    @property
    def number(self) -> int:
        assert self.info.rank is not None
        return self.info.rank

    def with_info(self, info: TraceInfo) -> RankFound:
        return replace(self, info=info)

    def with_more(self, later: RankFound) -> RankFound:
        """This rank with the tables of another trace of it as well; what both say of themselves, this one says."""
        info = replace(
            self.info,
            num_events=self.info.num_events + later.info.num_events,
            metadata={**later.info.metadata, **self.info.metadata},
            warnings=(*self.info.warnings, *later.info.warnings),
        )
        return replace(
            self,
            info=info,
            ops=stacked([self.ops, later.ops]),
            comms=stacked([self.comms, later.comms]),
            memory=stacked([self.memory, later.memory]),
            warnings=(*self.warnings, *later.warnings),
        )


def agreeing(ranks: Sequence[RankFound]) -> list[RankFound]:
    """The ranks without ops that lie between messages, where ranks that should have run equally many do not agree.

    A message that was posted ahead of its op shifts what lies between the messages, on some ranks and not on others.
    """
    by_gaps = [found for found in ranks if found.by_gaps]
    lacking = {found.framework for found in ranks if not found.by_gaps} & {found.framework for found in by_gaps}
    counts = [Counter(zip(found.ops["step"].tolist(), found.ops["kind"].tolist(), strict=True)) for found in by_gaps]
    last = max((step for count in counts for step, _ in count), default=0)
    whole = [
        {key: number for key, number in count.items() if key[1] in ("F", "B") and (key[0] < last or last == 0)}
        for count in counts
    ]
    if not lacking and all(count == whole[0] for count in whole):
        return list(ranks)
    line = "not all ranks show the same number of ops between their labelled messages: ops are null"

    def without(found: RankFound) -> RankFound:
        return replace(
            found, ops=empty_table(OPS), comms=empty_table(COMMS), warnings=(*found.warnings, line), by_gaps=False
        )

    return [without(found) if found.by_gaps else found for found in ranks]


def recognise_rank(trace: Trace) -> RankFound:
    """Find the ops, the communication and the device work of one rank.

    Marks tell what they name; what they do not name is taken from labels, else from order, kernels and calls.
    """
    trace = _with_watched_job(trace)
    work = device_work(trace.events, str(trace.distributed.get("backend", "")))
    if trace.calls is not None:
        return _rank_found(trace, work, None, trace.calls)
    if trace.format is InputFormat.OTLP and (device := trace.distributed.get(DEVICE)):
        work = replace(work, unseen=str(device))
    tables = tables_from_trace(trace)
    if tables is not None:
        calls = empty_table(CALLS) if trace.ops is not None else find_calls(trace.events)
        return _rank_found(trace, work, tables, calls)
    marks = marked_ranges(trace.events)
    calls = find_calls(trace.events)
    if not marks:
        found = _rank_found(trace, work, tables_from_labels(trace, work, calls), calls)
        return replace(found, host=find_host_order(trace.events))
    calls = calls_with_marks(calls, marks, work, trace.metadata)
    marked = tables_from_marks(marks, work)
    if marked.framework:
        return _rank_found(trace, work, marked, calls)
    found = _rank_found(trace, work, marked.joined_with(tables_from_labels(trace, work, calls)), calls)
    return replace(found, host=find_host_order(trace.events))


def _with_watched_job(trace: Trace) -> Trace:
    """The trace with what hooks learnt of the job, where its profiler began before the job did and wrote nothing."""
    groups = trace.metadata.get(GROUPS_KEY)
    if not isinstance(groups, Mapping) or not groups or trace.distributed.get("pg_config"):
        return trace
    config = [
        {"pg_name": name, "pg_size": len(facts.get("ranks") or ()), **described(facts)}
        for name, facts in groups.items()
        if isinstance(facts, Mapping)
    ]
    job = {"world_size": trace.metadata.get("world_size"), "backend": trace.metadata.get("backend")}
    known = {name: value for name, value in job.items() if value is not None}
    return replace(trace, distributed={**known, "pg_config": config, **trace.distributed})


def _without_teardown(ops: pd.DataFrame, number: object) -> pd.DataFrame:
    """The ops without the range of a step that was only the end of the script."""
    is_teardown = (ops["kind"] == "STEP") & (ops["step"] == number) if isinstance(number, int) else None
    return ops if is_teardown is None else ops[~is_teardown].reset_index(drop=True)


def _rank_found(trace: Trace, work: DeviceWork, tables: RankTables | None, calls: pd.DataFrame) -> RankFound:
    tables = tables or RankTables(trace.framework, empty_table(OPS), empty_table(COMMS))
    tables = replace(tables, ops=_without_teardown(tables.ops, trace.metadata.get("teardown")))
    framework = str(trace.metadata.get("framework") or "") or tables.framework
    has_ops = bool(tables.ops["kind"].isin(COMPUTE_KINDS).any())
    host = HostWork() if has_ops or len(work) or work.unseen else host_work(trace.events)
    found = (tables.ops, tables.comms, trace.memory, work, tables.warnings, calls, host, tables.by_gaps)
    return RankFound(trace.info, framework, *found)
