"""Hangs of run directories, as their launcher saw them."""

from __future__ import annotations

from pathlib import Path

from instrument.launch.record import write_json
from pptrace.workflow.find_hang import find_hang


def test_the_ranks_of_a_run_without_dumps_are_those_that_its_launcher_lists(tmp_path: Path) -> None:
    write_json(
        tmp_path / "run.json",
        {"schema": "pptrace.run/1", "status": "failed", "ranks": [{"rank": 1}, "?", {"rank": 0}, {}]},
    )
    found = find_hang([tmp_path])
    assert (found.hang, found.ranks, found.unreadable) == (None, (0, 1), ())
    assert "the run ended as 'failed', and no rank was seen to hang" in found.reason
