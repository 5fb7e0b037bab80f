"""The profiler that ``pptrace run`` starts: what the script may notice of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from instrument.launch.recording import profiler as module
from instrument.launch.recording.profiler import TraceProfiler


def test_a_script_whose_warnings_are_errors_hears_nothing_of_the_profilers_cycles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch up to 2.11 warns at every first cycle that it clears the events of the cycle before."""

    def begin() -> None:
        warnings.warn("Warning: Profiler clears events at the end of each cycle.", UserWarning, stacklevel=2)

    imitation = SimpleNamespace(start=begin, stop=lambda: None, prepare_trace=begin)
    monkeypatch.setattr(module.TraceProfiler, "_new_profile", lambda self: imitation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TraceProfiler(tmp_path / "trace.json.gz").prepare()
        with pytest.raises(UserWarning):
            begin()


@pytest.mark.parametrize(
    ("cuda", "chosen", "tears"),
    [
        ("13.0", None, True),
        ("12.6", None, True),
        ("12.4", None, False),
        (None, None, False),
        ("13.0", "0", False),
        ("12.4", "1", True),
    ],
)
def test_cupti_is_torn_down_where_that_is_safe_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, chosen: str | None, tears: bool
) -> None:
    """And the settings in the trace say so, which are written before it is."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", chosen)
    assert TraceProfiler(tmp_path / "trace.json.gz").settings["cupti_teardown"] == tears


def test_a_trace_for_which_the_disk_has_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what Kineto writes first: the record of the rank needs the room."""

    def export(path: str) -> None:
        Path(f"{path}.tmp").write_text("half of a trace")  # and no error, as Kineto does

    imitation = SimpleNamespace(
        add_metadata_json=lambda *_: None, stop_trace=lambda: None, export_chrome_trace=export, profiler=None
    )
    monkeypatch.setattr(module.TraceProfiler, "_new_profile", lambda self: imitation)
    recorder = TraceProfiler(tmp_path / "trace.json.gz")
    monkeypatch.setattr(recorder, "_profile", imitation, raising=False)
    with pytest.raises(OSError, match="is there room left"):
        recorder.stop({})
    assert not list(tmp_path.iterdir())
