"""The profiler that ``pptrace run`` starts: what the script may notice of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

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
