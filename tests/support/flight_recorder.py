"""Dumps of torch's flight recorder, made to order."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
WORLD = ("0", "default_pg")
BEGIN_NS = 1_700_000_000_000_000_000


def entry(name: str, seq: int, state: str, group: tuple[str, str] = WORLD, **more: Any) -> Entry:
    """A call of a group (name, description) that takes and gives 4 × 256 numbers; ``more`` are other fields."""
    return {
        **{
            "process_group": group,
            "pg_id": int(group[0]) if group[0].isdecimal() else -1,
            "collective_seq_id": seq,
            "p2p_seq_id": seq,
        },
        **{"profiling_name": name, "state": state, "time_created_ns": BEGIN_NS + 1000 * seq},
        **{"time_discovered_started_ns": None, "time_discovered_completed_ns": None},
        **{"duration_ms": 0.25 if state == "completed" else None},
        **{"input_sizes": [[4, 256]], "output_sizes": [[4, 256]]},
        **{"input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"]},
        **more,
    }


def write_dump(
    path: Path,
    entries: Sequence[Entry],
    groups: Mapping[str, Sequence[int]],
    version: str = "2.10",
    as_json: bool = False,
    status: Mapping[int, tuple[int, int]] | None = None,
) -> Path:
    """A dump; ``groups`` are the members by "name description", ``status`` the last call enqueued and completed by "pg_id"."""
    names = (key.split() for key in groups)
    config = {
        name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
        for (name, desc), ranks in zip(names, groups.values(), strict=True)
    }
    last = {
        str(number): {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
        for number, (enqueued, completed) in (status or {}).items()
    }
    records = [{"record_id": index, **each} for index, each in enumerate(entries)]
    document = {"version": version, "pg_config": config, "pg_status": last, "entries": records}
    path.write_bytes(json.dumps(document).encode() if as_json else pickle.dumps(document, 2))
    return path
