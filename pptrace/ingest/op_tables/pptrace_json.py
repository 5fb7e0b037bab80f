"""Read ops in pptrace's JSON: ``pptrace simulate … --json FILE --ops`` and ``pptrace analyze … --json FILE --ops``.

simulation = { "schema": "pptrace.simulation/1", "ranks": [{ "rank", "ops": [op, …][, "messages": [end, …]] }, …], … }
report     = { "schema": "pptrace.report/1", "steps": [{ "step", "ranks": [{ "rank", "ops": [op, …] }, …] }, …], … }
op         = { "kind", "stage", "chunk", "microbatch", "phase", "start_ns", "end_ns"[, "parts": [op, op]] }
end        = { "kind", "direction", "stage", "microbatch", "peer", "start_ns", "end_ns", "match" }

The ``parts`` of an op are the halves of an overlapped pair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from pptrace.errors import ScheduleError, TraceError
from pptrace.ingest.common.byte_source import unreadable
from pptrace.regular import read_regular
from pptrace.schedule.registry import SCHEDULES
from pptrace.schedule.text import from_rows
from pptrace.schedule.validate import validate

_SCHEMA = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"pptrace\.(?:simulation|report)/1"')


def sniff_pptrace_json(start: bytes) -> bool:
    return _SCHEMA.match(start) is not None


def read_pptrace_json(path: Path) -> tuple[list[pd.DataFrame], dict[str, Any]]:
    """Read (tables of ops and messages with the columns of :mod:`pptrace.ingest.op_tables.rows`, facts of all ranks).

    Raises:
        TraceError: the file is damaged or was written without ops.
    """
    try:
        document = json.loads(read_regular(path))
    except OSError as err:
        raise unreadable(path, err) from err
    except (ValueError, RecursionError) as err:
        raise TraceError(f"{path}: damaged JSON ({err}); expected a complete file of pptrace; write it again") from err
    rows = list(_rows(document))
    if not rows:
        raise TraceError(
            f"{path}: a {document['schema']} without ops; expected them in it; write it with --ops as well"
        )
    messages = list(_messages(document))
    return [pd.DataFrame(part) for part in (rows, messages) if part], _plan(document)


def _plan(document: dict[str, Any]) -> dict[str, Any]:
    """The plan of a simulation whose order its ops alone do not name: a searched one, or one by hand; else {}.

    That of a report is the order of its ops where the run had such a plan and followed it. Ops that are no whole plan, as in a
    file that was edited, tell none, as do whole steps of several orders.
    """
    named = document.get("schedule")
    if not _is_simulation(document):
        if not isinstance(named, dict) or named.get("source") != "metadata" or named.get("mismatches"):
            return {}
        named = named.get("name")
    name = named if isinstance(named, str) and named in SCHEDULES else "custom"
    if name in SCHEDULES and not SCHEDULES[name].searches:
        return {}
    orders: list[list[list[str]]] = []
    for step in _steps(document):
        if (rows := _order(step)) not in orders:
            orders.append(rows)
    whole = [rows for rows in orders if _is_whole(rows, name)]
    return {"plan": {"name": name, "rows": whole[0]}} if len(whole) == 1 else {}


def _order(step: dict[str, Any]) -> list[list[str]]:
    """The ops of each rank of a pipeline, in its order; of several pipelines, those of the first one."""
    ranks: dict[str, list[str]] = {}
    for rank in _objects(step.get("ranks")):
        number = str(rank.get("pp_rank", rank.get("rank")))
        ranks.setdefault(number, [_pair(op) or _cell(op) for op in _objects(rank.get("ops"))])
    return [ranks.get(str(number), []) for number in range(len(ranks))]


def _is_whole(rows: list[list[str]], name: str) -> bool:
    try:
        validate(from_rows(rows, name))
    except ScheduleError:
        return False
    return True


def _is_simulation(document: dict[str, Any]) -> bool:
    return str(document["schema"]).startswith("pptrace.simulation")


def _steps(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document] if _is_simulation(document) else _objects(document.get("steps"))


def _cell(op: dict[str, Any]) -> str:
    return f"{op.get('stage')}{op.get('kind')}{op.get('microbatch')}"


def _rows(document: Any) -> Iterator[dict[str, Any]]:
    is_simulation = _is_simulation(document)
    for step in _steps(document):
        for rank in _objects(step.get("ranks")):
            for op in _objects(rank.get("ops")):
                shared = {"rank": rank.get("rank"), "step": 0 if is_simulation else step.get("step")}
                yield {**shared, **op, "pair": _pair(op), "source": "simulated" if is_simulation else "label"}


def _messages(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rank in _objects(document.get("ranks")) if _is_simulation(document) else ():
        for end in _objects(rank.get("messages")):
            yield {"rank": rank.get("rank"), "step": 0, "axis": "pp", **end}


def _pair(op: dict[str, Any]) -> str:
    """The text of an overlapped pair, from its halves; "" for other ops."""
    halves = list(map(_cell, _objects(op.get("parts"))))
    return f"({';'.join(halves)})OVERLAP_F_B" if halves else ""


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
