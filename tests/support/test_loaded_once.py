"""The same files are analysed once, changed ones again, and in rooms of reading always; and so are files of the same bytes."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import pytest

from pptrace.workflow.load import load
from pptrace.workflow.rank_store import recognise_trace
from tests.support import loaded_once
from tests.support.noisy_runs import NoisyRun
from tests.support.programs import SAMPLES


@pytest.mark.parametrize("room", ["report", "ingest"])
def test_what_did_not_change_is_analysed_once_in_some_rooms(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_once, "_in_room", False)
    loaded_once.keep_for(loaded_once.TESTS / room / "test_any.py")
    run = NoisyRun(pp=2, steps=3)
    path = run.write(tmp_path / "a.csv", 0)
    first = load([path])
    assert (load([path]) is first) is (room == "report")
    assert load([path], as_recorded=True) is not first
    assert load([path], on_progress=lambda progress: None) is not first
    run.write(path, 1)
    changed = load([path])
    assert changed.report.steps != first.report.steps
    (tmp_path / "comms.csv").write_text("rank,step,kind,axis,start_ns,end_ns\n0,0,all_reduce,dp,0,9\n")
    assert load([path]) is not changed, "other tables of its folder are read with it"


@pytest.mark.parametrize("room", ["report", "ingest"])
def test_a_copy_of_a_trace_is_recognised_once_in_some_rooms_and_is_named_as_itself(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_once, "_in_room", False)
    loaded_once.keep_for(loaded_once.TESTS / room / "test_any.py")
    for kept in ("_traces", "_ranks"):
        monkeypatch.setattr(loaded_once, kept, {})
    for kept in ("_kept", "_kept_samples"):
        monkeypatch.setattr(loaded_once, kept, lru_cache(loaded_once._load_kept))
    recognised = []
    monkeypatch.setattr(
        "pptrace.workflow.load.recognise_trace", lambda trace: recognised.append(trace.path) or recognise_trace(trace)
    )
    shutil.copytree(SAMPLES / "gpu_zbv_p2", tmp_path / "copy")
    first, copy = (load([path], as_recorded=True) for path in (SAMPLES / "gpu_zbv_p2", tmp_path / "copy"))
    assert len(recognised) == (2 if room == "report" else 4)
    assert copy.report.steps == first.report.steps
    assert [Path(each.path).parent for each in copy.report.inputs] == [tmp_path / "copy"] * 2
