"""Traces of gloo's collectives, made here by torch itself: each call once, and the clock of one host."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pptrace.clock import ClockMethod
from pptrace.clock.bounds import lower_bounds
from pptrace.ingest import open_inputs
from pptrace.recognise.calls.find_calls import find_calls
from pptrace.recognise.messages.match import has_posting_time_only
from pptrace.workflow.analyse import Analysis
from tests.frameworks.collective_calls import SIZE, call_all_profiled, train_with_barriers
from tests.support.analysed import analyse
from tests.support.pool import Pool
from tests.support.read import read_traces

NUM_RANKS = 3
SIZES = {
    **{kind: {1.0} for kind in ("all_reduce", "broadcast", "reduce", "send", "recv")},
    **{kind: {2.0, 3.0} for kind in ("all_gather", "reduce_scatter", "all_to_all")},
}
"""Sizes that shapes give, of groups of two and three; lists of tensors that are gathered or scattered do not."""


@pytest.mark.parametrize("record_shapes", [False, True])
def test_every_call_is_one_row_that_ends_when_its_work_is_done(pool: Pool, tmp_path: Path, record_shapes: bool) -> None:
    called = pool.run(call_all_profiled, record_shapes, str(tmp_path), world=NUM_RANKS)
    traces = read_traces(open_inputs([tmp_path]), 1).traces
    for trace, counts in zip(sorted(traces, key=lambda trace: trace.rank or 0), called, strict=True):
        calls = find_calls(trace.events)
        assert Counter(calls["kind"]) == counts
        assert not has_posting_time_only(calls.assign(rank=trace.rank)).any()
        assert calls["end_ns"].max() <= works_of(tmp_path / f"rank{trace.rank}.json").max() + 1
        assert (calls["start_ns"] <= calls["posted_ns"]).all()
        assert (calls["posted_ns"] <= calls["asked_ns"]).all()
        assert (calls["asked_ns"] <= calls["end_ns"]).all()
        in_half = (trace.rank or 0) < 2
        expected = SIZES if in_half else {kind: sizes & {1.0, 3.0} for kind, sizes in SIZES.items()}
        assert sizes_by_kind(calls) == (expected if record_shapes else {})


def sizes_by_kind(calls: pd.DataFrame) -> dict[str, set[int]]:
    """The bytes of each kind that are known, in numbers of one tensor's."""
    known = calls[calls["bytes"] >= 0]
    return {str(kind): set((rows["bytes"] / (4 * SIZE)).tolist()) for kind, rows in known.groupby("kind")}


def works_of(path: Path) -> pd.Series[int]:
    """The ends of everything that gloo or its operators did, ns."""
    document = json.loads(path.read_text())
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    rows = [event for event in events if event["name"].startswith(("gloo:", "c10d::"))]
    ends = [round((event["ts"] + event["dur"]) * 1000) + document["baseTimeNanoseconds"] for event in rows]
    return pd.Series(ends) + 1000  # digits of a float


def read(folder: Path) -> Analysis:
    return analyse(read_traces(open_inputs([folder]), 1).traces)


def test_ranks_of_one_host_are_on_its_clock_and_those_of_one_that_was_put_wrong_are_found_again(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "true").mkdir()
    pool.run(train_with_barriers, str(tmp_path / "true"), world=NUM_RANKS)
    right = read(tmp_path / "true")
    assert right.report.clock.method == ClockMethod.SAME_HOST
    assert set(right.report.clock.offsets_ns.values()) == {0}
    assert right.report.clock.uncertainty_ns == 50_000
    matched = right.data.comms[right.data.comms["match"] >= 0]
    assert len(matched) == len(right.data.comms) == NUM_RANKS * 12 * 5
    assert lower_bounds(matched, range(NUM_RANKS)).max() <= 0, "no message speaks against the host's clock"
    rng = np.random.default_rng(7)
    for number in range(2):
        wrong = rng.integers(-12_000_000_000, 12_000_000_000, NUM_RANKS)
        rates = rng.uniform(-50e-6, 50e-6, NUM_RANKS)
        folder = tmp_path / f"wrong{number}"
        folder.mkdir()
        for rank in range(NUM_RANKS):
            shift_file(tmp_path / "true" / f"rank{rank}.json", folder, int(wrong[rank]), float(rates[rank]))
        result = read(folder)
        clock = result.report.clock
        assert clock.method == ClockMethod.BOUNDS
        key = ["rank", "kind", "peer", "nth"]
        for name in ("start_ns", "end_ns"):
            both = with_numbers(right.data.comms).merge(
                with_numbers(result.data.comms), on=key, suffixes=("", "_found")
            )
            moved = both[f"{name}_found"] - both[name]
            first = moved[both["rank"] == 0]
            drift = first.max() - first.min()  # the common clock is that of rank 0, which is wrong as well
            assert (moved - first.mean()).abs().max() <= clock.uncertainty_ns + drift


def with_numbers(comms: pd.DataFrame) -> pd.DataFrame:
    ordered = comms.sort_values("start_ns", kind="stable")
    return ordered.assign(nth=ordered.groupby(["rank", "kind", "peer"]).cumcount())


def shift_file(path: Path, folder: Path, offset_ns: int, rate: float) -> None:
    """Write the trace as a clock would have recorded it that is wrong by an offset and runs fast."""
    document = json.loads(path.read_text())
    begin = min(event["ts"] for event in document["traceEvents"] if event.get("ph") == "X")
    for event in document["traceEvents"]:
        if event.get("ph") == "X":
            event["ts"] = round(event["ts"] + (event["ts"] - begin) * rate, 3)
    document["baseTimeNanoseconds"] += offset_ns
    (folder / path.name).write_text(json.dumps(document))
