"""The audit of recordings that were damaged on purpose: each kind is found, counted and placed, and nothing is silently wrong.

The kinds are those that public threads report (``tests/support/damages.py``).
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dashboards import app
from dashboards.pages import overview
from dashboards.store import Store
from pptrace.analysis.audit import MISSING_RANGES, SHIFTED_TIMES, UNMATCHED_MESSAGES
from pptrace.analysis.report import AuditEntry, Report
from pptrace.model.damage import Damage
from pptrace.model.device import UNKNOWN_CLOCK
from pptrace.report.recording import damage_in
from pptrace.workflow.load import load
from tests.support.damages import (
    FEW,
    KINDS,
    MANY,
    OF_DEVICE,
    OF_RUN,
    RANK,
    SHIFTS,
    Change,
    Events,
    damaged,
    empty,
    lost,
    of,
    with_clock_off,
)
from tests.support.extent import ALL, by_turns
from tests.support.programs import ROOT, SAMPLES, pptrace_here

SAMPLE, STEP = SAMPLES / "gpu_1f1b_p2_tp2", 3
WITHOUT_STEPS = {Damage.WORK_BEFORE_RECORDING, Damage.NO_DEVICE_EVENTS}
WITHOUT_STEPS |= {Damage.FAR_TIMES, Damage.UNSET_TIMES, Damage.IMPOSSIBLE_TIMES}


def audit_of(report: Report) -> dict[str, AuditEntry]:
    return {entry.kind: entry for entry in report.recording.audit}


def computes(report: Report) -> list[int | None]:
    (step,) = report.steps
    return [rank.compute_ns for rank in step.ranks]


def report_with(path: Path, folder: Path, change: Change, ranks: Sequence[int] = (RANK,)) -> Report:
    """A sample in which the traces of some ranks are changed."""
    return load([damaged(path, folder, change, ranks)], cache=False, as_recorded=True).report


@cache
def recorded(sample: str) -> Report:
    """A sample as it is."""
    return load([SAMPLES / sample], cache=False, as_recorded=True).report


@pytest.fixture(scope="module")
def whole() -> Report:
    return recorded(SAMPLE.name)


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Damage], Report]:
    """The sample with a kind of damage, read once for all tests that look at it."""

    @cache
    def read_once(kind: Damage) -> Report:
        return report_with(SAMPLE, tmp_path_factory.mktemp(kind), KINDS[kind][0])

    return read_once


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_damage_is_found_counted_and_placed(
    kind: Damage, whole: Report, report_of: Callable[[Damage], Report]
) -> None:
    count = KINDS[kind][1]
    assert kind not in audit_of(whole)
    entry = audit_of(report_of(kind))[kind]
    assert entry.ranks == (RANK,)
    assert entry.count == count or (count is None and entry.count > MANY)
    assert entry.steps == (() if kind in WITHOUT_STEPS else (STEP,))
    assert entry.affects
    assert entry.cure


@pytest.mark.parametrize("kind", KINDS)
def test_what_damage_does_to_computing_is_nothing_or_null(
    kind: Damage, whole: Report, report_of: Callable[[Damage], Report]
) -> None:
    report = report_of(kind)
    if not report.steps:
        return
    after, before = computes(report), computes(whole)
    others = [index for index in range(len(before)) if index != RANK]
    for index in others:  # within the window of the ranks that are known, which may be narrower
        assert after[index] == pytest.approx(before[index], rel=0.1)
    if after[RANK] is not None and kind not in (Damage.EMPTY_KERNELS, Damage.NO_CORRELATION):
        assert after[RANK] == pytest.approx(before[RANK], rel=0.05)


def in_whole_microseconds(events: Events, empty: str) -> Events:
    """As torch 1 writes it; kernels of a name are too short to have a length there."""
    for event in of(events, "kernel"):
        event["dur"] = 0 if event["name"] == empty else max(2, int(event["dur"]))
    return events


def test_kernels_shorter_than_the_resolution_of_a_recording_are_no_damage(tmp_path: Path) -> None:
    trace = json.loads(gzip.decompress((SAMPLE / f"rank{RANK}.json.gz").read_bytes()))
    counts = Counter(event["name"] for event in of(trace["traceEvents"], "kernel"))
    name = min((name for name in counts if counts[name] > MANY), key=counts.__getitem__)
    for folder in ("rounded", "lost"):
        (tmp_path / folder).mkdir()
    rounded = report_with(SAMPLE, tmp_path / "rounded", partial(in_whole_microseconds, empty=name))
    assert Damage.EMPTY_KERNELS not in audit_of(rounded)
    ends_lost = report_with(SAMPLE, tmp_path / "lost", lambda events: empty(in_whole_microseconds(events, empty=name)))
    others = audit_of(ends_lost)[Damage.EMPTY_KERNELS].count
    assert 0 < others <= MANY


LOST = [
    *(("lost_buffer", Damage.LOST_KERNELS), ("lost_launches", Damage.LOST_KERNELS)),
    ("no_device_records", Damage.NO_DEVICE_EVENTS),
]


@pytest.mark.parametrize(
    ("lost", "sample"), by_turns(LOST, ["gpu_1f1b_p4", "gpu_nccl_torch_1f1b_p4", "gpu_nccl_graphs_1f1b_p2"])
)
def test_kernels_that_were_lost_together_with_their_launches_are_missed(
    lost: tuple[str, Damage], sample: str, tmp_path: Path
) -> None:
    change, kind = lost
    before = recorded(sample)
    report = report_with(SAMPLES / sample, tmp_path, OF_DEVICE[change])
    assert kind not in audit_of(before)
    assert audit_of(report)[kind].ranks == (RANK,)
    known = 0
    for step, whole in zip(report.steps, before.steps, strict=True):
        now, then = step.ranks[RANK].compute_ns, whole.ranks[RANK].compute_ns
        known += now is not None
        assert now is None or now == pytest.approx(then, rel=0.05)
    assert known < len(report.steps)


@pytest.mark.parametrize(("change", "sample"), by_turns(list(OF_RUN), ["gpu_1f1b_p4", "gpu_1f1b_p2_tp2"]))
def test_records_that_only_one_rank_lacks_are_named_and_make_figures_null(
    change: str, sample: str, tmp_path: Path
) -> None:
    before = recorded(sample)
    report = report_with(SAMPLES / sample, tmp_path, OF_RUN[change])
    kinds = {entry.kind for entry in damage_in(report.recording) if RANK in entry.ranks}
    assert kinds & {MISSING_RANGES, UNMATCHED_MESSAGES, Damage.EARLY_ENDS}
    assert not damage_in(before.recording)
    assert (report.clock.method, report.clock.offsets_ns) == (before.clock.method, before.clock.offsets_ns)
    for step, whole in zip(report.steps, before.steps, strict=True):
        assert step.length_ns in (None, whole.length_ns)
        bubbles = {rank.rank: rank.bubble_ns for rank in whole.ranks}
        for rank in step.ranks:
            assert rank.bubble_ns is None or rank.bubble_ns == pytest.approx(bubbles[rank.rank], rel=0.01)
        assert any(rank.bubble_ns is None for rank in step.ranks)


@pytest.mark.parametrize(("shift", "sample"), by_turns(list(SHIFTS), ["gpu_nccl_1f1b_p4", "gpu_zbv_p2"]))
def test_a_rank_whose_times_are_all_shifted_is_named_and_put_back(shift: str, sample: str, tmp_path: Path) -> None:
    before = recorded(sample)
    report = report_with(SAMPLES / sample, tmp_path, SHIFTS[shift])
    (entry,) = damage_in(report.recording)
    assert (entry.kind, entry.ranks) == (SHIFTED_TIMES, (RANK,))
    off_ns = report.clock.uncertainty_ns
    assert report.steps[0].length_ns == pytest.approx(before.steps[0].length_ns, abs=off_ns)
    for rank, whole in zip(report.steps[0].ranks, before.steps[0].ranks, strict=True):
        assert rank.compute_ns == whole.compute_ns
        assert rank.bubble_ns == pytest.approx(whole.bubble_ns, abs=3 * off_ns)


@pytest.mark.parametrize(
    ("sample", "is_known", "off_us", "ranks"),
    [
        (sample, is_known, off_us, ranks)
        for sample, is_known in (("gpu_nccl_experts_pp2_ep2", True), ("gpu_nccl_1f1b_p4", False))
        for off_us, ranks in product((-2_000, 2_000), ((RANK,), (0, RANK)))
        if ALL or (off_us < 0) == (is_known == (len(ranks) > 1))  # every two of the three together
    ],
)
def test_a_device_whose_clock_is_off_is_named_and_makes_no_figure_wrong(
    sample: str, is_known: bool, off_us: int, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    before = recorded(sample)
    report = report_with(SAMPLES / sample, tmp_path, partial(with_clock_off, microseconds=off_us), ranks)
    (entry,) = damage_in(report.recording)
    assert entry.kind == (Damage.KERNELS_BEFORE_LAUNCH if off_us < 0 else Damage.KERNELS_AFTER_WAIT)
    assert entry.ranks == ranks
    for info in report.inputs:
        lines = [line for line in info.warnings if "device" in line]
        assert bool(lines) == (info.rank in ranks)
        assert all(("shifted back" if is_known else "are left out") in line for line in lines)
    lacking = [line for line in report.warnings if line.startswith("no device events")]
    assert [UNKNOWN_CLOCK in line and "record with" not in line for line in lacking] == [True] * (not is_known)
    for step, whole in zip(report.steps, before.steps, strict=True):
        for rank, expected in zip(step.ranks, whole.ranks, strict=True):
            for name in ("compute_ns", "exposed_comm_ns", "bubble_ns"):
                found = getattr(rank, name)
                assert (found is None) <= (not is_known)
                assert found is None or found == pytest.approx(getattr(expected, name), rel=0.05, abs=100_000)
            if rank.rank in ranks and not is_known:
                assert rank.compute_ns is None


def test_a_rank_without_labelled_ops_at_the_ends_of_the_plan_leaves_no_step_and_bubble_of_its_pipeline(
    tmp_path: Path,
) -> None:
    report = report_with(SAMPLES / "gpu_1f1b_p4", tmp_path, OF_RUN["without_ranges"], ranks=(0,))
    (step,) = report.steps
    assert step.span_ns is None
    assert [rank.bubble_ns for rank in step.ranks] == [None] * 3
    unknown = "the length of step 3, and the bubbles of rank 0's pipeline, are not known"
    assert any(unknown in line for line in report.warnings)


def test_waits_whose_ranges_are_lost_make_the_exposed_communication_of_both_sides_null(tmp_path: Path) -> None:
    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events if not re.match("pp1:wait.*RECV", event.get("name", ""))]

    before = recorded("gpu_1f1b_p4")
    report = report_with(SAMPLES / "gpu_1f1b_p4", tmp_path, change)
    assert RANK in audit_of(report)[Damage.EARLY_ENDS].ranks
    assert report.clock.offsets_ns == before.clock.offsets_ns
    exposed = [rank.exposed_comm_ns for rank in report.steps[0].ranks]
    assert exposed[RANK] is None
    assert exposed[RANK - 1] is None
    whole = [rank.exposed_comm_ns for rank in before.steps[0].ranks]
    assert all(one in (None, other) for one, other in zip(exposed, whole, strict=True))


def test_a_rank_without_any_launch_is_damaged_and_null(tmp_path: Path) -> None:
    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            event
            for event in events
            if "Launch" not in event.get("name", "") or event.get("cat") not in ("cuda_runtime", "cuda_driver")
        ]

    report = report_with(SAMPLES / "gpu_nccl_1f1b_p4", tmp_path, change)
    kinds = {entry.kind for entry in damage_in(report.recording) if RANK in entry.ranks}
    assert kinds & {Damage.NO_CORRELATION, Damage.KERNELS_WITHOUT_LAUNCH}
    assert all(step.length_ns is None for step in report.steps)
    assert all(rank.compute_ns is None for step in report.steps for rank in step.ranks if rank.rank == RANK)


def test_events_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    folder = damaged(SAMPLE, tmp_path, lambda events: events)
    file = folder / f"rank{RANK}.json"
    parts = file.read_text().split('{"ph":"X","cat":"cpu_op"')
    file.write_text(
        '{"ph":"X","cat":"cpu_op"'.join(parts[:-FEW]) + '{"ph":"X","cat":?"cpu_op"'.join(["", *parts[-FEW:]])
    )
    entry = audit_of(load([folder], cache=False, as_recorded=True).report)["unreadable_events"]
    assert (entry.ranks, entry.count) == ((RANK,), FEW)


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    folder = damaged(SAMPLE, tmp_path, lambda events: events)
    text = (folder / f"rank{RANK}.json").read_bytes()
    (folder / f"rank{RANK}.json").write_bytes(text[: len(text) // 2])
    entry = audit_of(load([folder], cache=False, as_recorded=True).report)["cut_file"]
    assert (entry.ranks, entry.count) == ((RANK,), 1)


def test_a_recording_that_is_whole_has_no_damage_and_one_with_damage_says_so_everywhere(tmp_path: Path) -> None:
    assert "Nothing of the recording is damaged" in pptrace_here("doctor", str(SAMPLES / "1f1b_p4")).out
    folder = damaged(SAMPLE, tmp_path, lost)
    out = pptrace_here("doctor", str(folder)).out
    assert "Damaged: 1 kind of damage" in out
    assert f"lost kernels: {MANY} (rank {RANK}, step {STEP})" in out
    line = "the recording is damaged: lost kernels (20); pptrace doctor PATH says"
    assert line in pptrace_here("analyze", str(folder)).out
    ended = pptrace_here("doctor", str(folder), "--json", "-")
    assert [entry["kind"] for entry in json.loads(ended.out)["audit"]] == ["lost_kernels"]


def test_numbers_that_no_launch_has_are_none(tmp_path: Path) -> None:
    """All device work of a rank has the numbers of other launches than those in its trace."""

    def renumbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                event["args"]["correlation"] += 1_000_000
        return events

    report = report_with(SAMPLES / "gpu_nccl_1f1b_p4", tmp_path, renumbered)
    assert audit_of(report)["no_correlation"].ranks == (RANK,)
    (step,) = report.steps
    assert (step.span_ns, {rank.rank: rank.compute_ns for rank in step.ranks}[RANK]) == (None, None)


def test_a_run_that_hung_is_audited_too_and_tables_of_ops_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "hung"
    folder.mkdir()
    shutil.copy(SAMPLES / "hang_p4" / "run.json", folder)
    damaged(SAMPLES / "hang_p4", folder, KINDS[Damage.REPEATED_OPERATORS][0])
    report = load([folder], cache=False).report
    assert (report.recording.figures, report.recording.reason) == ("recorded", "the run hung")
    assert {kind: entry.ranks for kind, entry in audit_of(report).items()} == {"repeated_operators": (RANK,)}
    assert pptrace_here("analyze", str(SAMPLES / "hang_p4"), "--csv", str(tmp_path)).code == 0
    assert "not audited: tables of ops" in pptrace_here("doctor", str(tmp_path / "ops.csv")).out
    assert json.loads(pptrace_here("doctor", str(tmp_path / "ops.csv"), "--json", "-").out)["audit"] is None


def test_ranks_without_a_trace_are_a_part_of_the_audit(tmp_path: Path) -> None:
    folder = damaged(SAMPLE, tmp_path, lambda events: events)
    (folder / "rank3.json").unlink()
    assert audit_of(load([folder], cache=False, as_recorded=True).report)["missing_ranks"].count == 1


def test_the_docs_name_every_kind() -> None:
    text = (ROOT / "docs" / "inputs.md").read_text(encoding="utf-8")
    assert not [kind for kind in Damage if f"`{kind}`" not in text]
    others = {Damage.UNREADABLE_EVENTS, Damage.CUT_FILE, Damage.EARLY_ENDS}
    assert set(KINDS) | others == set(Damage)
    assert all(f"`{kind}`" in text for kind in (UNMATCHED_MESSAGES, MISSING_RANGES))


def test_the_machine_has_no_audit_to_write() -> None:
    ended = pptrace_here("doctor", "--json", "-")
    assert ended.code == 2
    assert "--json: give the traces that are to be audited" in ended.err


def test_the_dashboard_has_a_badge_above_every_page_and_a_line_on_the_first(tmp_path: Path) -> None:
    loaded = Store([damaged(SAMPLE, tmp_path, lost)]).get()
    shown = str(app._facts(loaded))
    assert "damaged: lost kernels" in shown
    assert f"lost kernels: {MANY} (rank {RANK}, step {STEP})" in shown
    assert "The recording is damaged: lost kernels (20)" in str(overview._recording(loaded.analysis.report))


def test_steps_of_lost_kernels_are_those_that_launched_them_where_the_host_ran_ahead(tmp_path: Path) -> None:
    launched: set[int] = set()

    def without_last(events: Events) -> Events:
        """Without 100 of the last kernels."""
        last = {kernel["args"]["correlation"] for kernel in of(events, "kernel")[-150:-50]}
        ranges = [event for event in of(events, "user_annotation") if event["name"].startswith("pp1:STEP")]
        for call in (*of(events, "cuda_runtime"), *of(events, "cuda_driver")):
            if call["args"].get("correlation") in last:
                around = [one for one in ranges if one["ts"] <= call["ts"] <= one["ts"] + one["dur"]]
                launched.update(int(one["name"].split("step=")[1]) for one in around)
        return [e for e in events if e.get("cat") != "kernel" or e["args"]["correlation"] not in last]

    folder = damaged(SAMPLES / "gpu_nccl_torch_1f1b_p4", tmp_path, without_last)
    entry = audit_of(load([folder], cache=False, as_recorded=True).report)[Damage.LOST_KERNELS]
    assert (entry.count, entry.steps) == (100, tuple(sorted(launched)))
