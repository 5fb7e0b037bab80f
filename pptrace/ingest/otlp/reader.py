"""Read OpenTelemetry spans as JSON (:mod:`pptrace.ingest.otlp.spans`); one file can hold several ranks.

Each span becomes a host range. Attributes of iteration and microbatch become part of the range's name, which the label
catalogues parse: ``megatron.train.iteration [iteration=12]``.
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
from pptrace.ingest.common.json_texts import split_values
from pptrace.ingest.common.rank_names import rank_of_file_name
from pptrace.ingest.common.sort_events import sorted_events
from pptrace.ingest.otlp.process_facts import (
    distributed_of,
    one_clock_of,
    parallel_of,
    process_of,
    rank_of,
    run_id_of,
)
from pptrace.ingest.otlp.spans import Attributes, SpanColumns, attributes_of
from pptrace.model.tables import MEMORY, Int32, Int64, empty_table
from pptrace.model.traces import PARALLEL, Category, InputFormat, Trace

MEGATRON = "megatron-lm"
_PREFIX = "megatron."
_TRUNCATED = "nemo.span.truncated"
_SUFFIXES = {
    "iteration": ("megatron.iteration", "dl.iteration"),
    "microbatch": ("megatron.microbatch_id", "dl.microbatch_id"),
    "chunk": ("megatron.vp_stage", "megatron.model_chunk_id", "dl.virtual_pipeline_parallel.rank"),
    "microbatches": ("num_microbatches", "megatron.num_microbatches"),
}
"""Keys added to a range's name, and the attributes that hold their values."""
_PASS = re.compile(r"megatron\.(?:train\.iteration\.)?forward_backward \[microbatches=(\d{1,6})\]")
_FORWARD = "megatron.microbatch.forward"
_HOST_TIMES = (
    "OpenTelemetry spans are timed on the host: where a GPU runs the ops, they show when work was launched, "
    "not when it ran"
)


def read_otlp(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each rank, and for each process without one.

    Raises:
        TraceError: the file cannot be read or holds no span.
    """
    columns = SpanColumns(lambda name: name.startswith(_PREFIX))
    with ByteSource(path) as source:
        for text in split_values(source):
            columns.add(text)
        damage = source.damage
    if not columns.name:
        raise TraceError(
            f"{path}: no OpenTelemetry span that can be read; expected OTLP as JSON (resourceSpans) or printed spans; "
            "export them again"
        )
    spans = _SpanTable.of(columns)
    resources = [attributes_of(text) for text in columns.resources]
    runs, run_warnings = _last_runs(spans, resources)
    traces = [
        _trace(path, process, [resources[index] for index in process.resources])
        for process in _processes(spans.select(runs), resources, path)
    ]
    first, *others = traces
    return replace(first, warnings=(*_damage(columns, damage), *run_warnings, *first.warnings)), *others


@dataclass(frozen=True, slots=True)
class _SpanTable:
    """Columns of spans; ``names`` are the names of their ranges."""

    names: tuple[str, ...]
    name: Int32
    start_ns: Int64
    end_ns: Int64
    resource: Int32

    @classmethod
    def of(cls, columns: SpanColumns) -> _SpanTable:
        """Make the table, dropping duplicates from repeated exports and spans that were never ended."""
        name, start, end, resource = columns.arrays()
        names = dict(columns.names)
        names_in_order = list(names)
        is_kept = np.ones(len(name), dtype=np.bool_)
        for index, attributes in columns.attributes_of_span.items():
            is_kept[index] = attributes.get(_TRUNCATED) is not True
            plain_name = names_in_order[name[index]]
            name[index] = names.setdefault(plain_name + _suffix(attributes), len(names))
        order = np.lexsort((name, end, start, resource))
        is_duplicate = np.ones(len(order), dtype=np.bool_)
        for column in (name, end, start, resource):
            is_duplicate[1:] &= column[order][1:] == column[order][:-1]
        is_duplicate[:1] = False
        is_kept[order[is_duplicate]] = False
        return cls(tuple(names), name[is_kept], start[is_kept], end[is_kept], resource[is_kept])

    def select(self, resources: Collection[int]) -> _SpanTable:
        is_kept = np.isin(self.resource, list(resources))
        return _SpanTable(
            self.names, self.name[is_kept], self.start_ns[is_kept], self.end_ns[is_kept], self.resource[is_kept]
        )


def _suffix(attributes: Attributes) -> str:
    parts = (
        f"{key}={attributes[name]}"
        for key, names in _SUFFIXES.items()
        for name in names
        if type(attributes.get(name)) is int
    )
    text = ",".join(parts)
    return f" [{text}]" if text else ""


def _last_runs(spans: _SpanTable, resources: Sequence[Attributes]) -> tuple[frozenset[int], tuple[str, ...]]:
    """The resources of the run that began last, where several runs were appended to one file; with a warning."""
    used_resources = np.unique(spans.resource).tolist()
    runs = {index: run_id_of(resources[index]) for index in used_resources}
    start_by_run: dict[str, int] = {}
    for index in used_resources:
        first = int(spans.start_ns[spans.resource == index].min())
        start_by_run[runs[index]] = min(first, start_by_run.get(runs[index], first))
    if len(start_by_run) < 2:
        return frozenset(used_resources), ()
    last_run = max(start_by_run, key=start_by_run.__getitem__)
    run_name = last_run or "without an id"
    warning = f"contains {len(start_by_run)} runs: only the last one ({run_name}) was read; put the others into separate files"
    return frozenset(index for index in used_resources if runs[index] == last_run), (warning,)


@dataclass(frozen=True, slots=True)
class _Process:
    rank: int | None
    resources: tuple[int, ...]
    spans: _SpanTable


def _processes(spans: _SpanTable, resources: Sequence[Attributes], path: Path) -> list[_Process]:
    """Group the spans by rank, or by process without one. A checkpoint worker has its trainer's rank."""
    resources_of: dict[tuple[bool, Any], list[int]] = {}
    for index in np.unique(spans.resource).tolist():
        rank = rank_of(resources[index])
        resources_of.setdefault((rank is None, process_of(resources[index]) if rank is None else rank), []).append(
            index
        )
    is_single = len(resources_of) == 1
    return [
        _Process(
            (rank_of_file_name(path.name) if is_single else None) if has_no_rank else int(key),
            tuple(indices),
            spans.select(indices),
        )
        for (has_no_rank, key), indices in sorted(resources_of.items())
    ]


def _trace(path: Path, process: _Process, resources: Sequence[Attributes]) -> Trace:
    spans = process.spans
    is_megatron = any(spans.names[code].startswith(_PREFIX) for code in np.unique(spans.name).tolist())
    ordered = sorted_events(_Columns(spans), 0)
    facts = dict(parallel_of(resources[0]))
    if PARALLEL in facts:
        facts[PARALLEL] = {**facts[PARALLEL], "vpp": _num_chunks(spans)}
    notes = {"notes": [_HOST_TIMES]} if is_megatron else {}
    service = str(resources[0].get("service.name", ""))
    return Trace(
        path=str(path),
        format=InputFormat.OTLP,
        rank=process.rank,
        producer=f"OpenTelemetry ({service})" if service else "OpenTelemetry",
        events=ordered.without_comm_args,
        memory=empty_table(MEMORY),
        metadata={**facts, **notes, **one_clock_of(resources)},
        distributed=distributed_of(resources[0], process.rank),
        warnings=ordered.warnings,
        framework=MEGATRON if is_megatron else "",
    )


class _Columns:
    """Spans as columns of host events; they have no threads, so that each resource is one."""

    def __init__(self, spans: _SpanTable) -> None:
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


def _num_chunks(spans: _SpanTable) -> int | None:
    """Number of model chunks of a rank: forwards per pass over microbatches; None if unknown or not constant."""
    microbatches_by_code = {
        code: int(match[1]) for code, name in enumerate(spans.names) if (match := _PASS.fullmatch(name))
    }
    forwards = [code for code, name in enumerate(spans.names) if name.split(" ")[0] == _FORWARD]
    rows = np.flatnonzero(np.isin(spans.name, list(microbatches_by_code)))
    starts = np.sort(spans.start_ns[np.isin(spans.name, forwards)])
    num_inside = np.searchsorted(starts, spans.end_ns[rows]) - np.searchsorted(starts, spans.start_ns[rows])
    num_microbatches = np.array([microbatches_by_code[code] for code in spans.name[rows].tolist()], dtype=np.int64)
    ratios = {
        divmod(inside, expected)
        for inside, expected in zip(num_inside.tolist(), num_microbatches.tolist(), strict=True)
        if expected > 0
    }
    if len(ratios) != 1:
        return None
    ((chunks, remainder),) = ratios
    return int(chunks) if chunks > 0 and remainder == 0 else None


def _damage(columns: SpanColumns, damage: str) -> tuple[str, ...]:
    warnings = [f"{damage}: the data before that was read, so that the last steps may lack ops"] if damage else []
    if columns.num_damaged:
        count = f"{columns.num_damaged} values are" if columns.num_damaged > 1 else "1 value is"
        warnings.append(f"{count} truncated or damaged: only complete spans were read; figures may lack ops")
    if columns.num_lost:
        count = f"{columns.num_lost} spans" if columns.num_lost > 1 else "1 span"
        warnings.append(f"left out {count} without a name or with impossible times")
    return tuple(warnings)
