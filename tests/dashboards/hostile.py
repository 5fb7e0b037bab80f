"""A run whose every name is markup, or thousands of letters: of kernels, ranges, groups, hosts, scripts, errors, its folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.dashboards.synthetic import write_run

MARKUP = (
    '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script><b>bold</b>'
    "<a href='javascript:window.attacked=1'>x</a><iframe srcdoc='<script>parent.attacked=1</script>'></iframe>"
)
LONG = "n" * 3000
FOLDER = "<img src=x onerror=window.attacked=1>"
_CATEGORIES = ("cpu_op", "kernel", "user_annotation", "gpu_user_annotation", "python_function", MARKUP)


def write_hostile(folder: Path) -> Path:
    """Write a run directory of two ranks and two steps, whose ops are recognised and whose names are all markup."""
    run = folder / FOLDER
    run.mkdir()
    write_run(run, "1f1b", pp=2, num_microbatches=4, num_steps=2)
    for rank in range(2):
        path = run / f"rank{rank}.json.gz"
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["pptrace"]["host"] = trace["pptrace"]["plan"]["name"] = MARKUP
        group = {"pg_name": MARKUP, "pg_desc": MARKUP, "ranks": [0, 1]}
        trace["distributedInfo"] = {"backend": MARKUP, "rank": rank, "world_size": 2, "pg_config": [group]}
        trace["traceEvents"] += _events(trace["traceEvents"])
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    _spoil_run_file(run / "run.json")
    return run


def _events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    start, end = min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events)
    times = [start + (end - start) * share / 6 for share in range(6)]
    made = [
        {"cat": category, "name": MARKUP + LONG, "tid": 7 if category == "kernel" else 1, "ts": ts, "dur": 3000.0}
        for category in _CATEGORIES
        for ts in times
    ]
    facts = {
        "Process Group Description": MARKUP,
        "Process Group Name": MARKUP,
        "Collective name": MARKUP,
        "Group size": 2,
    }
    made.append(
        {"cat": "user_annotation", "name": f"nccl:{MARKUP}", "tid": 1, "ts": start, "dur": 900.0, "args": facts}
    )
    return [{"ph": "X", "pid": 1, "args": {"stream": 7, "device": 0, MARKUP: MARKUP}} | event for event in made]


def _spoil_run_file(path: Path) -> None:
    run = json.loads(path.read_text())
    names = ("script", "started_at", "status", "profiler", "host", "note")
    run |= dict.fromkeys(names, MARKUP) | {"command": [MARKUP], "environment": {MARKUP: MARKUP}}
    run |= {"script": LONG, "host": LONG}
    run["hang"] = {"verdict": MARKUP, "detail": MARKUP, "ranks": [1], "edges": []}
    for entry in run["ranks"]:
        entry |= {"error": MARKUP + LONG, "note": MARKUP, "status": MARKUP}
    path.write_text(json.dumps(run))
