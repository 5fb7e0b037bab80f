"""Small traces to order."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Op = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture
def data() -> Path:
    """Public real traces, where this checkout has them beside it."""
    if not DATA.is_dir():
        pytest.skip("the public real traces are not beside this checkout")
    return DATA


@pytest.fixture
def op() -> Op:
    """A complete host event; ``changes`` overwrite its fields, a value of ``...`` removes one."""

    def make(name: str = "aten::mm", ts: Any = 1000.5, dur: Any = 2.25, **changes: Any) -> dict[str, Any]:
        event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 10, "tid": 11, "ts": ts, "dur": dur, "args": {}}
        return {key: value for key, value in (event | changes).items() if value is not ...}

    return make


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a trace file: events (as dicts) under traceEvents with members around, or raw bytes; gzip by suffix."""

    def make(
        content: bytes | Sequence[Any],
        name: str = "trace.json",
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
        **layout: Any,
    ) -> Path:
        if isinstance(content, bytes):
            text = content
        else:
            text = json.dumps({**(before or {}), "traceEvents": list(content), **(after or {})}, **layout).encode()
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return make
