"""The JSON of reports, ``pptrace.report/1``, simulations, ``pptrace.simulation/1``, comparisons and predictions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from pptrace.analysis.report import Report
from pptrace.analysis.result import OpSummary, RankStep, StepReport
from pptrace.analysis.whole_run import Blame, CriticalPath
from pptrace.fields import field_names
from pptrace.schedule.actions import Action
from pptrace.simulator import IdleCause, MessageEnd, SimulatedRank, Simulation, idle_by_cause, messages_of

if TYPE_CHECKING:
    from pptrace.analysis.compare.result import Comparison
    from pptrace.analysis.whatif.result import WhatIf

REPORT_SCHEMA = "pptrace.report/1"
SIMULATION_SCHEMA = "pptrace.simulation/1"
WHATIF_SCHEMA = "pptrace.whatif/1"
COMPARISON_SCHEMA = "pptrace.compare/1"


def report_object(report: Report, with_ops: bool = False) -> dict[str, Any]:
    """The report as a JSON object; ``ops`` of each rank only on request."""
    value = report_in_parts(report, with_ops)
    plain: dict[str, Any] = _plain(value | {"steps": list(value["steps"])})
    return plain


def report_in_parts(report: Report, with_ops: bool = False) -> dict[str, Any]:
    """The same for :func:`parts_of`: ``steps`` is an iterator, and members of the report are as they are."""
    return {
        "schema": REPORT_SCHEMA,
        **_members(report),
        "steps": (_step(step, with_ops) for step in report.steps),
        "device": [
            {"rank": entry.rank, **_members(entry.breakdown)}
            | {name: getattr(entry, name) for name in ("comms", "host", "synchronisations", "on_host")}
            for entry in report.device
        ],
    }


def _step(step: StepReport, with_ops: bool) -> dict[str, Any]:
    return _members(step) | {
        "ranks": [_rank(rank, with_ops) for rank in step.ranks],
        "critical_path": _sums(step.critical_path, {"parts": "kind", "by_stage": "stage"}),
        "blame": _sums(step.blame, {"by_rank": "rank", "by_stage": "stage", "by_kind": "kind"}),
    }


def _sums(value: CriticalPath | Blame | None, keys: Mapping[str, str]) -> dict[str, Any] | None:
    """The members of ``value``; sums by a key as a list of objects, for each what its key is called."""
    if value is None:
        return None
    sums = {name: [{key: of, "ns": ns} for of, ns in getattr(value, name).items()] for name, key in keys.items()}
    return _members(value) | sums


def _plain(value: Any) -> Any:
    """A value in the types of JSON: members of a report by their names."""
    if isinstance(value, tuple | list):
        return [_plain(member) for member in value]
    if isinstance(value, Mapping) or field_names(type(value)):
        return {key: _plain(member) for key, member in _members(value).items()}
    return value


def _members(value: Any) -> dict[str, Any]:
    """The members of a Struct, dataclass or mapping, as they are."""
    names = field_names(type(value))
    if names:
        return {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")


def _rank(rank: RankStep, with_ops: bool) -> dict[str, Any]:
    row = _members(rank)
    del row["ops"]
    row["phases"] = row["phases"] or None
    if with_ops:
        row["ops"] = []
        for op in rank.ops:
            fields_of_op = {name: getattr(op, name) for name in _OP_FIELDS}
            row["ops"].append(fields_of_op | {"parts": op.parts} if op.parts else fields_of_op)
    return row


_OP_FIELDS = tuple(name for name in OpSummary.__struct_fields__ if name != "parts")


def comparison_object(comparison: Comparison) -> dict[str, Any]:
    """Comparison of two runs as a JSON object."""
    return {"schema": COMPARISON_SCHEMA, **_plain(comparison)}


def simulation_object(simulation: Simulation, with_ops: bool = False) -> dict[str, Any]:
    plan, messages = simulation.plan, _messages_of_ranks(simulation) if with_ops else {}
    return {
        "schema": SIMULATION_SCHEMA,
        "schedule": plan.name,
        "pp": plan.pp,
        "num_microbatches": plan.num_microbatches,
        "num_chunks": plan.num_chunks,
        "makespan_ns": simulation.makespan_ns,
        "bubble_ratio": simulation.bubble_ratio,
        "bubble_share": simulation.bubble_share,
        "ranks": [
            _simulated_rank(rank, idle, with_ops) | messages.get(rank.rank, {})
            for rank, idle in zip(simulation.ranks, idle_by_cause(simulation), strict=True)
        ],
    }


def _messages_of_ranks(simulation: Simulation) -> dict[int, dict[str, Any]]:
    """The ends of messages at each rank, in the order in which they were sent."""
    of_ranks: dict[int, list[dict[str, Any]]] = {rank.rank: [] for rank in simulation.ranks}
    for end in sorted(messages_of(simulation), key=attrgetter("start_ns", "match")):
        of_ranks[end.rank].append({name: getattr(end, name) for name in MessageEnd.__struct_fields__ if name != "rank"})
    return {rank: {"messages": ends} for rank, ends in of_ranks.items()}


def whatif_object(result: WhatIf) -> dict[str, Any]:
    """The predictions from a run as a JSON object."""
    return {"schema": WHATIF_SCHEMA, **_plain(result)}


def _simulated_rank(rank: SimulatedRank, idle: Mapping[IdleCause, int], with_ops: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "rank": rank.rank,
        "compute_ns": rank.compute_ns,
        "bubble_ns": rank.bubble_ns,
        "idle_ns": {str(cause): time for cause, time in idle.items()},
        "peak_inflight_microbatches": rank.peak_inflight_microbatches,
    }
    if with_ops:
        row["ops"] = []
        for timed in rank.timeline:
            action, times = timed.action, {"start_ns": timed.start, "end_ns": timed.end}
            op = _named(action) | {"phase": str(action.phase), **times}
            row["ops"].append(op | {"parts": [_named(part) for part in action.parts]} if action.parts else op)
    return row


def _named(action: Action) -> dict[str, Any]:
    return {"kind": str(action.kind), "stage": action.stage, "chunk": action.chunk, "microbatch": action.microbatch}


def dump(value: Mapping[str, Any]) -> str:
    """Strict JSON: NaN and infinity are errors, never written."""
    return "".join(parts_of(value))


def parts_of(value: Mapping[str, Any]) -> Iterator[str]:
    """The same text in parts, one for each member of a list that belongs to the object: of all steps at once it is long.

    Such a list may be an iterator, whose members are made when they are written.
    """
    before = "{"
    for name, member in value.items():
        head = f"{before}\n {json.dumps(name, ensure_ascii=False)}: "
        before = ","
        if not isinstance(member, Iterator | list | tuple):
            yield head + _indented(member, 1)
            continue
        opening = f"{head}["
        for each in member:
            yield f"{opening}\n  {_indented(each, 2)}"
            opening = ","
        yield f"{head}[]" if opening != "," else "\n ]"
    yield "\n}" if value else "{}"


def _indented(value: Any, depth: int) -> str:
    """Strict JSON of a value that stands at some depth of an object, as Python's ``json`` writes it, with its errors."""
    try:
        text: bytes = msgspec.json.encode(value, enc_hook=_members)
        packed = msgspec.msgpack.encode(value, enc_hook=_members)
        is_same = not (b"0.0000" in text or _EXPONENT.search(text) or _NOT_FINITE.search(packed))
    except (TypeError, ValueError, OverflowError):
        is_same = False
    if not is_same:  # msgspec writes something else
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_members).encode("utf-8", "surrogatepass")
    # With an indent it would be written in Python.
    indented: bytes = msgspec.json.format(text, indent=1)
    return indented.decode("utf-8", "surrogatepass").replace("\n", "\n" + " " * depth)


_EXPONENT = re.compile(rb"e(?=[-0-9])(?<=[0-9]e)")  # begins with its rarest byte, so that the search is fast
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""A float64 of MessagePack that is NaN or infinite, which msgspec's JSON has as null."""
