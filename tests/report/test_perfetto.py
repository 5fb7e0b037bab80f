"""The trace for ui.perfetto.dev."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from pptrace.report.perfetto import perfetto_object
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


@pytest.mark.parametrize("name", ["gpu_1f1b_p4", "dualpipe_p4", "mesh_pp2_tp2_cp2_dp2"])
def test_slices_of_a_thread_do_not_cross_and_arrows_join_those_of_their_message(name: str) -> None:
    """Perfetto draws none that begins in another one and ends after it."""
    events = perfetto_object(load([SAMPLES / name]))["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert threads.keys() <= named
    arrows = [event for event in events if event["ph"] in "sf"]
    assert arrows
    for arrow in arrows:
        around = [
            event
            for event in threads[arrow["pid"], arrow["tid"]]
            if event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"] + 1e-3
        ]
        assert {event["name"].split()[0] for event in around} >= {"send" if arrow["ph"] == "s" else "recv"}
