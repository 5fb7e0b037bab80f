"""Figures of each step in W&B, TensorBoard and files of JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from pptrace.errors import PptraceError, UsageError
from pptrace.report.step_log import open_step_logs, step_values
from pptrace.workflow.live.follow import LiveRank, LiveStepFigures

_RANKS = (LiveRank(0, 11, 6_000_000, 1_000_000, 3_000_000), LiveRank(1, 11, 2_000_000, 3_000_000, 5_000_000))
_STEP = LiveStepFigures(7, 5_000_000_000, 12_000_000, True, None, 10_000_000, 0, _RANKS)


def test_shares_are_of_the_span_of_all_ranks() -> None:
    assert step_values(_STEP) == {
        "pptrace/step_ms": 12.0,
        "pptrace/slow_ranks": 0,
        "pptrace/span_ms": 10.0,
        "pptrace/compute_share": 0.4,
        "pptrace/bubble_share": 0.4,
        "pptrace/exposed_comm_share": 0.2,
        "pptrace/slowest_rank": 0,
    }


def test_what_is_not_known_has_no_value() -> None:
    unobserved = LiveStepFigures(8, 0, 12_000_000, False, None, None, None, (LiveRank(0, 11),))
    assert step_values(unobserved) == {"pptrace/step_ms": 12.0}
    partly = LiveStepFigures(8, 0, 12_000_000, True, None, 10_000_000, 0, (_RANKS[0], LiveRank(1, 11, 5)))
    assert not {name for name in step_values(partly) if "bubble" in name or "exposed" in name}


def test_a_line_is_written_at_once_and_once_for_each_step_of_a_run_whatever_is_in_the_file(tmp_path: Path) -> None:
    """The second run has the same step, at another time; a writer was killed in the middle of a line."""
    file = tmp_path / "steps.jsonl"
    file.write_text('[1]\n{"step": 3}\n{"step": 7, "time_s"')
    later = replace(_STEP, start_ns=2 * _STEP.start_ns)
    for step in (_STEP, _STEP, later, later):
        with open_step_logs([f"jsonl:{file}"], tmp_path) as write:
            write(step)
            assert file.read_text().endswith("}\n"), "a step can be read once it is written"
    expected = [{"step": 7, "time_s": time_s, **step_values(_STEP)} for time_s in (5.0, 10.0)]
    assert [json.loads(line) for line in file.read_text().splitlines()[3:]] == expected


def test_tensorboard_shows_the_steps_of_the_last_writer_from_its_first_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    @contextmanager
    def writer(folder: str, purge_step: int) -> Iterator[SimpleNamespace]:
        calls.append((folder, purge_step))
        yield SimpleNamespace(add_scalar=lambda *row: calls.append(row), flush=lambda: None)
        calls.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    with open_step_logs(["tensorboard:folder"], tmp_path) as write:
        write(_STEP)
        write(replace(_STEP, step=8))
    rows = [(name, value, step, 5.0) for step in (7, 8) for name, value in step_values(_STEP).items()]
    assert calls == [("folder", 7), *rows, "closed"]


def test_wandb_gets_a_run_of_the_name_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    @contextmanager
    def init(**given):
        calls.append(given)
        yield SimpleNamespace(log=lambda values, step: calls.append((step, values)))
        calls.append("finished")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with open_step_logs(["wandb:team/project"], tmp_path / "run-3") as write:
        write(_STEP)
    assert calls == [{"project": "team/project", "name": "run-3"}, (7, step_values(_STEP)), "finished"]


@pytest.mark.parametrize("text", ["wandb", "wandb:", "csv:file", ""])
def test_another_kind_is_refused_with_those_there_are(text: str, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="expected wandb:PROJECT, tensorboard:DIR or jsonl:FILE"),
        open_step_logs([text], tmp_path),
    ):
        pass


def test_a_missing_package_or_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(PptraceError, match="pip install wandb, or give jsonl:FILE"),
        open_step_logs(["wandb:p"], tmp_path),
    ):
        pass
    with (
        pytest.raises(PptraceError, match="cannot be written: No such file"),
        open_step_logs([f"jsonl:{tmp_path}/no/file"], tmp_path),
    ):
        pass
