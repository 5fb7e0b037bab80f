"""A run that was analysed before and has not changed: what is read of it is what was analysed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from plotly.utils import PlotlyJSONEncoder

import dashboards.store
import pptrace.report.tiles.timeline
import pptrace.workflow.reopen
from dashboards.answers import Answers
from dashboards.pages import overview, steps
from dashboards.store import Store
from pptrace.analysis.result import OpSummary
from pptrace.ingest.job.disk_cache import key_of
from pptrace.report.tiles.cut import Range
from pptrace.report.tiles.kept import ENTRY, pack_bars, unpack_bars
from pptrace.report.tiles.pyramid import Level
from pptrace.report.tiles.timeline import MEASURED, bars_of, without_tables
from pptrace.report.tiles.tracks import NUM_CLASSES
from pptrace.report.to_json import dump, report_in_parts
from pptrace.workflow.load import load
from pptrace.workflow.reopen import ReopenedAnalysis, reopen
from tests.support.programs import SAMPLES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reopened") / "run"
    shutil.copytree(SAMPLES / "1f1b_p2", folder)
    return folder


@dataclass(frozen=True, slots=True)
class Kept:
    """All that was shown of a run when it was analysed, and the entries that were kept then."""

    folder: Path
    shown: list[Any]
    cache: Path

    def copy_entries(self, to: Path) -> None:
        shutil.copytree(self.cache, to, dirs_exist_ok=True)


def analysed(folder: Path, cache: Path) -> Kept:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPTRACE_CACHE_DIR", str(cache))
        patch.setattr(pptrace.workflow.reopen, "FEWEST_OPS", 0)
        return Kept(folder, list(shown(Store([folder]))), cache)


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return analysed(folder, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def dualpipe(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """A sample that has overlapped pairs and memory events."""
    return analysed(SAMPLES / "dualpipe_p4", tmp_path_factory.mktemp("dualpipe"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which analyses of runs of any size are kept."""
    monkeypatch.setenv("PPTRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pptrace.workflow.reopen, "FEWEST_OPS", 0)
    return tmp_path / "cache"


@pytest.fixture
def analyses(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The analyses that were made."""
    made: list[object] = []
    monkeypatch.setattr(
        pptrace.workflow.reopen, "load", lambda *given, **options: made.append(given) or load(*given, **options)
    )
    return made


def shown(store: Store) -> Iterator[Any]:
    """All that pages show without tables: the report with its ops, and tiles of the timeline at two zooms."""
    loaded = store.get()
    yield dump(report_in_parts(loaded.analysis.report, with_ops=True))
    for page in (overview, steps):
        yield json.dumps(page.body(loaded, loaded.steps[0].step), cls=PlotlyJSONEncoder)
    timeline = store.timeline(loaded.token)
    yield (timeline.bars.span_ns, timeline.layout, timeline.windows)
    for shift in (8, 22):
        for order in ("stage", "pipeline"):
            yield timeline.tile(MEASURED, 0, order, 0, Range(0, shift))
            yield timeline.group_tile(MEASURED, 0, order, Range(0, shift))
        yield timeline.memory_tile("stage", 0, Range(0, shift))
    yield Answers(store).why_no_prediction()
    for source in ("planned", "simulated"):
        yield timeline.tile(source, loaded.steps[0].step, "stage", 0, Range(0, 22))


def test_a_run_is_shown_the_same_without_a_second_analysis(dualpipe: Kept, analyses: list[object], cache: Path) -> None:
    dualpipe.copy_entries(cache)
    store = Store([dualpipe.folder])
    assert list(shown(store)) == dualpipe.shown
    assert len(analyses) == 0, "it is read"
    analysis = store.get().analysis
    assert isinstance(analysis, ReopenedAnalysis)
    expected = load([dualpipe.folder])
    assert analysis.num_ops == len(expected.data.ops)
    assert any(isinstance(op, OpSummary) and op.parts for op in analysis.report.steps[0].ranks[0].ops)
    assert analysis.with_report(expected.report).report is expected.report
    assert len(analyses) == 0
    assert analysis.data.comms.equals(expected.data.comms), "tables are made when they are asked for"
    assert (len(analysis.costs), analysis.facts.keys()) == (len(expected.costs), expected.facts.keys())
    assert len(analyses) == 1, "once"


def test_rows_between_ranks_with_experts_are_kept(analyses: list[object]) -> None:
    folder = SAMPLES / "experts_pp2_ep2"
    first, again = (reopen([folder]).analysis for _ in range(2))
    assert isinstance(again, ReopenedAnalysis)
    for analysis in (again, again.with_report(first.report), without_tables(again, again.report)):
        pd.testing.assert_frame_equal(analysis.expert_traffic.table(), first.expert_traffic.table())
        assert analysis.expert_traffic.groups == ((0, 1), (2, 3))
    assert len(analyses) == 1


def test_a_run_with_too_many_ops_for_its_tables_is_shown_the_same_without_a_second_analysis(
    dualpipe: Kept, analyses: list[object], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, with_tables = dualpipe.folder, dualpipe.shown.copy()
    why = with_tables.pop(-3)
    for module in (dashboards.store, pptrace.report.tiles.timeline):
        monkeypatch.setattr(module, "MOST_KEPT_OPS", 10)
    run = pptrace.workflow.reopen.run_store([folder])

    def shown_again(num_analyses: int) -> None:
        store = Store([folder])
        seen = list(shown(store))
        assert "so many ops that the dashboard keeps its report alone" in seen.pop(-3) != why
        assert seen == with_tables
        assert len(analyses) == num_analyses
        analysis = store.get().analysis
        assert analysis.data.ops.empty

    shown_again(1)
    shown_again(1)
    (cache / f"{key_of(run.key, ENTRY)}.npz").unlink()
    shown_again(2)


def another_entry(path: Path) -> None:
    """An entry of other values, as a version with the same key would write it; a text that is no JSON has no others."""
    with np.load(path) as entry:
        arrays = dict(entry)
    if arrays["facts"].tobytes().startswith(b"{"):
        np.savez(path, **{**arrays, "facts": np.frombuffer(b'{"report": {}, "bars": {}}', np.uint8)})


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-200]),
        lambda path: path.write_bytes(b"no archive"),
        another_entry,
    ],
)
def test_a_damaged_entry_is_no_entry(
    damage: Callable[[Path], None], small: Kept, analyses: list[object], cache: Path
) -> None:
    small.copy_entries(cache)
    kept = sorted(cache.glob("*.npz"))
    assert not any(str(small.folder).encode() in path.read_bytes() for path in kept), "it may name a home directory"
    assert len(kept) == 3, "report, timeline, and why nothing is predicted"
    for path in kept:
        damage(path)
    assert list(shown(Store([small.folder]))) == small.shown
    assert len(analyses) == 1


def test_another_file_or_option_is_another_run(folder: Path, analyses: list[object], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    first = reopen([copy]).analysis
    step = first.report.steps[-1].step
    assert [part.step for part in reopen([copy], step=step).analysis.report.steps] == [step]
    (copy / "rank0.json.gz").unlink()
    changed = reopen([copy]).analysis
    assert len(changed.report.inputs) == len(first.report.inputs) - 1
    assert len(analyses) == 3
    assert isinstance(reopen([copy]).analysis, ReopenedAnalysis)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are Unicode")
def test_a_run_in_a_directory_whose_name_is_no_unicode_is_analysed_each_time(
    folder: Path, analyses: list[object], tmp_path: Path
) -> None:
    copy = tmp_path / os.fsdecode(b"r\xffn")
    shutil.copytree(folder, copy)
    for _ in range(2):
        assert len(reopen([copy]).analysis.report.inputs) == 2
    assert len(analyses) == 2


def test_mipmaps_of_a_timeline_come_back_without_being_made_again(folder: Path) -> None:
    bars, busy = bars_of(load([folder])), np.arange(2 * NUM_CLASSES, dtype=np.float32).reshape(2, NUM_CLASSES)
    level = Level(3, np.array([0, 2]), np.array([0, 8]), np.ones(2, np.int32), np.array([0, 4], np.int32), busy)
    vars(bars.measured["ops"])["levels"] = (level,)
    tables = unpack_bars(pack_bars(bars)).measured
    (again,) = tables["ops"].levels
    assert again.shift == 3
    for name in ("ptr", "start", "count", "longest", "busy"):
        assert np.array_equal(getattr(again, name), getattr(level, name))
    assert tables["comms"].levels == ()
