"""Which rank each process of an Nsight Systems export is, when its session began, and who wrote it.

An export tells more than that: environments, the list of processes, home directories, host names. Of all that only the number
of the rank leaves this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pptrace.ingest.common.exact_numbers import LIMIT_NS
from pptrace.ingest.common.rank_names import rank_of_labels, rank_of_value
from pptrace.ingest.nsight.sqlite import Database
from pptrace.marks import METADATA_TABLE

_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_VARIABLE = re.compile(rf'(?:^|[\0\n\s])({"|".join(_VARIABLES)})="?(\d{{1,9}})"?(?=$|[\0\n\s])')
_VERSION = re.compile(r"\d+(?:\.\d+){1,4}")
_NAMED_THREAD = (39, 72)  # event types NvtxThread and NvtxtMetaThread
_TID_BITS = 24
_ABSOLUTE_NS = 10**18  # no session lasts thirty years: such times are of the wall clock already


@dataclass(frozen=True, slots=True)
class Session:
    """``start_ns`` is UTC, None where the export does not tell; ``monotonic_ns`` the host's own clock then, or None."""

    start_ns: int | None
    monotonic_ns: int | None


def session_of(db: Database) -> Session:
    """When the session began, to which all times of its export are relative."""
    table = "TARGET_INFO_SESSION_START_TIME"
    start = _first_int(db.all_rows(table, ("utcEpochNs",)))
    return Session(
        start if start is not None and 0 < start < LIMIT_NS else None,
        _first_int(db.all_rows(table, ("systemClockNs",))),
    )


def base_ns(db: Database, session: Session, first_ns: int) -> tuple[int, list[str]]:
    """What is to be added to the export's times, of which ``first_ns`` is one; and a line where that is not known."""
    if _exported(db).get("EXPORT_PARAM_TIME_NORMALIZE") == "true" or first_ns > _ABSOLUTE_NS:
        return 0, []  # nsys export --ts-normalize
    if session.start_ns is None:
        return 0, ["nothing in it says when the recording began: its times are relative to that"]
    return session.start_ns, []


def producer_of(db: Database) -> str:
    """Such as ``nsys 2026.2.1.210 (schema 3.25.0)``; versions only."""
    facts = _exported(db)
    version = _VERSION.fullmatch(facts.get("EXPORT_PRODUCT_VERSION", ""))
    schema = _VERSION.fullmatch(facts.get("EXPORT_SCHEMA_VERSION", ""))
    return f"nsys{f' {version[0]}' if version else ''}{f' (schema {schema[0]})' if schema else ''}"


def own_facts(db: Database) -> Mapping[int, Mapping[str, Any]]:
    """By pid the facts that ``pptrace run`` put into the export of a run of its own."""
    found: dict[int, Mapping[str, Any]] = {}
    for pid, text in db.all_rows(METADATA_TABLE, ("pid", "facts")):
        try:
            facts = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            continue
        if isinstance(facts, dict) and type(pid) is int:
            found[pid] = facts
    return found


def ranks_of(db: Database, pids: Sequence[int]) -> Mapping[int, int]:
    """Rank by pid, where the export tells: MPI's own word, names of threads and processes, or the environment.

    A rank that two processes claim is nobody's.
    """
    found = {pid: rank for pid in pids if (rank := _told_rank(db, pid)) is not None}
    if len(pids) == 1 and not found and (rank := _environment_rank(db)) is not None:
        found = {pids[0]: rank}
    claims = list(found.values())
    return {pid: rank for pid, rank in found.items() if claims.count(rank) == 1}


def _told_rank(db: Database, pid: int) -> int | None:
    ranks = {rank_of_value(rank) for tid, rank in db.all_rows("MPI_RANKS", ("globalTid", "rank")) if _pid(tid) == pid}
    if len(ranks) == 1 and (rank := ranks.pop()) is not None:
        return rank
    return rank_of_labels(_labels(db, pid))


def _labels(db: Database, pid: int) -> Iterator[str]:
    """What the threads and the process are called."""
    threads = [name for name, tid in db.all_rows("ThreadNames", ("nameId", "globalTid")) if _pid(tid) == pid]
    yield from db.strings(list({name for name in threads if type(name) is int})).values()
    for owner, name in db.all_rows("PROCESSES", ("globalPid", "name")):
        if _pid(owner) == pid and isinstance(name, str):
            yield name.rpartition("/")[2]
    if db.has("NVTX_EVENTS", "eventType"):
        where = f"WHERE eventType IN {_NAMED_THREAD}"
        for tid, text in db.all_rows("NVTX_EVENTS", ("globalTid", "text"), where):
            if _pid(tid) == pid and isinstance(text, str):
                yield text


def _environment_rank(db: Database) -> int | None:
    """The rank in the environment of the program that was profiled; only where it is the one process of the export."""
    texts = [
        value
        for name, value in db.all_rows("META_DATA_CAPTURE", ("name", "value"))
        if isinstance(name, str) and isinstance(value, str) and name.endswith("ENVIRONMENT_VARIABLE")
    ]
    if not texts:  # older exports keep it as one of their strings
        texts = [value for (value,) in db.all_rows("StringIds", ("value",), "WHERE instr(value, 'RANK=')") if value]
    ranks: dict[str, set[int]] = {}
    for text in texts:
        for match in _VARIABLE.finditer(text):
            ranks.setdefault(match[1], set()).add(int(match[2]))
    told = next((ranks[name] for name in _VARIABLES if name in ranks), set())
    return told.pop() if len(told) == 1 else None


def _exported(db: Database) -> Mapping[str, str]:
    """What the exporter wrote about itself, in the table of either generation."""
    rows = [row for table in ("META_DATA_EXPORT", "EXPORT_META_DATA") for row in db.all_rows(table, ("name", "value"))]
    return {name: value for name, value in rows if isinstance(name, str) and isinstance(value, str)}


def _pid(serialized: object) -> int | None:
    return serialized >> _TID_BITS & 0xFFFFFF if type(serialized) is int else None


def _first_int(rows: Sequence[tuple[Any, ...]]) -> int | None:
    return next((row[0] for row in rows if type(row[0]) is int), None)
