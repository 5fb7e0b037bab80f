"""Reader of OpenTelemetry spans as JSON (:mod:`pptrace.ingest.otlp.spans`), of which one file can hold several ranks.

Each span becomes a range of the host. What a span's attributes say of a training step becomes part of the range's name, since
that is what catalogues read: ``megatron.train.iteration [iteration=12]``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import json_texts
from pptrace.ingest.common.rank_names import rank_of_file_name
from pptrace.ingest.common.sort_events import sorted_events
from pptrace.ingest.otlp.process_facts import (
    PARALLEL,
    distributed_of,
    one_clock_of,
    parallel_of,
    process_of,
    rank_of,
    run_of,
)
from pptrace.ingest.otlp.spans import Attributes, SpanColumns, attributes_of
from pptrace.model.tables import COMM_ARGS, MEMORY, Category, InputFormat, Int32, Int64, Trace, empty_table

MEGATRON = "megatron-lm"
_PREFIX = "megatron."
_OTLP = re.compile(rb'"(?:resourceSpans|scopeSpans|startTimeUnixNano)"\s*:')
_PRINTED = re.compile(rb'"context"\s*:\s*\{[^{}]*"trace_id"\s*:')
_TRUNCATED = "nemo.span.truncated"
_SUFFIXES = {
    "iteration": ("megatron.iteration", "dl.iteration"),
    "microbatch": ("megatron.microbatch_id", "dl.microbatch_id"),
    "chunk": ("megatron.vp_stage", "megatron.model_chunk_id", "dl.virtual_pipeline_parallel.rank"),
    "microbatches": ("num_microbatches", "megatron.num_microbatches"),
}
"""What becomes part of a range's name, and the attributes that tell it."""
_PASS = re.compile(r"megatron\.(?:train\.iteration\.)?forward_backward \[microbatches=(\d{1,6})\]")
_FORWARD = "megatron.microbatch.forward"
_HOST_TIMES = (
    "OpenTelemetry spans are timed on the host: where a GPU runs the ops, they show when work was launched, "
    "not when it ran"
)


def sniff_otlp(start: bytes) -> bool:
    """Whether a file that begins with these (decompressed) bytes holds OpenTelemetry spans."""
    return _OTLP.search(start) is not None or _PRINTED.search(start) is not None


def read_otlp(path: Path) -> tuple[Trace, ...]:
    """A trace for each rank, or for each process that says no rank.

    Raises:
        TraceError: the file cannot be read or holds no span.
    """
    columns = SpanColumns(lambda name: name.startswith(_PREFIX))
    with ByteSource(path) as source:
        for text in json_texts(source):
            columns.add(text)
        damage = source.damage
    if not columns.name:
        raise TraceError(
            f"{path}: no OpenTelemetry span that can be read; expected OTLP as JSON (resourceSpans) or printed spans; "
            "export them again"
        )
    spans = _Spans.of(columns)
    resources = [attributes_of(text) for text in columns.resources]
    runs, left_out = _last_runs(spans, resources)
    traces = [
        _trace(path, process, [resources[place] for place in process.resources])
        for process in _processes(spans.only(runs), resources, path)
    ]
    first, *others = traces
    return replace(first, warnings=(*_damage(columns, damage), *left_out, *first.warnings)), *others


@dataclass(frozen=True, slots=True)
class _Spans:
    """The columns of spans; ``names`` are what ranges are called."""

    names: tuple[str, ...]
    name: Int32
    start_ns: Int64
    end_ns: Int64
    resource: Int32

    @classmethod
    def of(cls, columns: SpanColumns) -> _Spans:
        """Each span once, however often it was exported, and without those that were never ended."""
        name, start, end, resource = columns.arrays()
        names = dict(columns.names)
        known = list(names)
        kept = np.ones(len(name), dtype=np.bool_)
        for place, told in columns.told.items():
            kept[place] = told.get(_TRUNCATED) is not True
            own = known[name[place]]
            name[place] = names.setdefault(own + _suffix(told), len(names))
        order = np.lexsort((name, end, start, resource))
        same = np.ones(len(order), dtype=np.bool_)
        for column in (name, end, start, resource):
            same[1:] &= column[order][1:] == column[order][:-1]
        same[:1] = False
        kept[order[same]] = False
        return cls(tuple(names), name[kept], start[kept], end[kept], resource[kept])

    def only(self, resources: Collection[int]) -> _Spans:
        kept = np.isin(self.resource, list(resources))
        return _Spans(self.names, self.name[kept], self.start_ns[kept], self.end_ns[kept], self.resource[kept])


def _suffix(told: Attributes) -> str:
    words = (
        f"{word}={told[name]}" for word, names in _SUFFIXES.items() for name in names if type(told.get(name)) is int
    )
    text = ",".join(words)
    return f" [{text}]" if text else ""


def _last_runs(spans: _Spans, resources: Sequence[Attributes]) -> tuple[frozenset[int], tuple[str, ...]]:
    """The resources of the run that began last, where a file that is appended to holds several."""
    used = np.unique(spans.resource).tolist()
    runs = {place: run_of(resources[place]) for place in used}
    began: dict[str, int] = {}
    for place in used:
        first = int(spans.start_ns[spans.resource == place].min())
        began[runs[place]] = min(first, began.get(runs[place], first))
    if len(began) < 2:
        return frozenset(used), ()
    last = max(began, key=began.__getitem__)
    named = last or "without an id"
    line = f"holds spans of {len(began)} runs: read the last one ({named}); put the others into files of their own"
    return frozenset(place for place in used if runs[place] == last), (line,)


@dataclass(frozen=True, slots=True)
class _Process:
    rank: int | None
    resources: tuple[int, ...]
    spans: _Spans


def _processes(spans: _Spans, resources: Sequence[Attributes], path: Path) -> list[_Process]:
    """The spans of each rank; of each process, where it says no rank. A checkpoint worker has its trainer's rank."""
    members: dict[tuple[bool, Any], list[int]] = {}
    for place in np.unique(spans.resource).tolist():
        rank = rank_of(resources[place])
        members.setdefault((rank is None, process_of(resources[place]) if rank is None else rank), []).append(place)
    only = len(members) == 1
    return [
        _Process((rank_of_file_name(path.name) if only else None) if is_open else int(key), tuple(own), spans.only(own))
        for (is_open, key), own in sorted(members.items())
    ]


def _trace(path: Path, process: _Process, resources: Sequence[Attributes]) -> Trace:
    own = process.spans
    is_megatron = any(own.names[code].startswith(_PREFIX) for code in np.unique(own.name).tolist())
    ready = sorted_events(_Columns(own), 0)
    facts = dict(parallel_of(resources[0]))
    if PARALLEL in facts:
        facts[PARALLEL] = {**facts[PARALLEL], "vpp": _num_chunks(own)}
    notes = {"notes": [_HOST_TIMES]} if is_megatron else {}
    service = str(resources[0].get("service.name", ""))
    return Trace(
        path=str(path),
        format=InputFormat.OTLP,
        rank=process.rank,
        producer=f"OpenTelemetry ({service})" if service else "OpenTelemetry",
        events=ready.events(empty_table(COMM_ARGS)),
        memory=empty_table(MEMORY),
        metadata={**facts, **notes, **one_clock_of(resources)},
        distributed=distributed_of(resources[0], process.rank),
        warnings=ready.warnings,
        framework=MEGATRON if is_megatron else "",
    )


class _Columns:
    """Spans as the columns of host events: a process's spans, which tell no threads, lie on one for each resource."""

    def __init__(self, spans: _Spans) -> None:
        self._spans = spans
        none = np.full(len(spans.name), -1, dtype=np.int64)
        self._columns: tuple[npt.NDArray[Any], ...] = (
            np.full(len(none), Category.ANNOTATION, dtype=np.int8),
            spans.name,
            spans.start_ns.copy(),
            spans.end_ns - spans.start_ns,
            none.astype(np.int32),
            spans.resource.astype(np.int64),
            none,
        )

    def take(self, column: int) -> npt.NDArray[Any]:
        return self._columns[column]

    def names(self) -> Sequence[str]:
        return self._spans.names


def _num_chunks(spans: _Spans) -> int | None:
    """Model chunks of a rank: its forwards in each pass over its microbatches, whose number the pass's span tells."""
    given = {code: int(match[1]) for code, name in enumerate(spans.names) if (match := _PASS.fullmatch(name))}
    forwards = [code for code, name in enumerate(spans.names) if name.split(" ")[0] == _FORWARD]
    rows = np.flatnonzero(np.isin(spans.name, list(given)))
    starts = np.sort(spans.start_ns[np.isin(spans.name, forwards)])
    num_inside = np.searchsorted(starts, spans.end_ns[rows]) - np.searchsorted(starts, spans.start_ns[rows])
    wanted = np.array([given[code] for code in spans.name[rows].tolist()], dtype=np.int64)
    ratios = {
        divmod(inside, most) for inside, most in zip(num_inside.tolist(), wanted.tolist(), strict=True) if most > 0
    }
    if len(ratios) != 1:
        return None
    ((chunks, rest),) = ratios
    return int(chunks) if chunks > 0 and rest == 0 else None


def _damage(columns: SpanColumns, damage: str) -> tuple[str, ...]:
    lines = [f"{damage}: read what comes before"] if damage else []
    if columns.num_damaged:
        count = f"{columns.num_damaged} values are" if columns.num_damaged > 1 else "1 value is"
        lines.append(f"{count} cut off or damaged: read the spans that are whole; figures may lack ops")
    if columns.num_lost:
        count = f"{columns.num_lost} spans" if columns.num_lost > 1 else "1 span"
        lines.append(f"left out {count} without a name or with times that cannot be true")
    return tuple(lines)
