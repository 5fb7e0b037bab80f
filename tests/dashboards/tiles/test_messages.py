"""Times of messages for the simulated step: of those whose readers waited for them alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from pptrace.model.tables import COMMS
from pptrace.report.tiles.measured import OPS
from pptrace.report.tiles.timeline import SIMULATED, Timeline, message_times
from pptrace.workflow.load import load
from tests.support.extent import ALL
from tests.support.programs import SAMPLES

EARLY = (0, 900, 100, 1_000)
"""A message that its reader asked for long after its transfer had begun, and then saw complete: start, asked, transfer."""


def received(
    rows: Sequence[tuple[int, int, int, int]], step: int = 1, axis: str = "pp", match: int = 0
) -> pd.DataFrame:
    """Receives of a step that were ready, asked for, and transferred from and to, at these times."""
    times = dict(zip(("start_ns", "asked_ns", "transfer_start_ns", "transfer_end_ns"), np.array(rows).T, strict=True))
    table = pd.DataFrame(times | {"end_ns": times["transfer_end_ns"]})
    known = table.assign(step=step, kind="recv", axis=axis, match=match)
    return known.reindex(columns=list(COMMS), fill_value=0)


def test_messages_that_kept_no_reader_are_none_of_those_whose_median_counts() -> None:
    waited = [(0, 0, 100, 100 + took) for took in (20, 30, 70)]
    steps = [received([EARLY, EARLY, EARLY, EARLY, *waited]), received([(0, 0, 5, 45), (0, 0, 5, 55)], step=2)]
    others = [received([(0, 0, 100, 9_000)] * 9, axis="ep"), received([(0, 0, 100, 9_000)] * 9, match=-1)]
    assert message_times(pd.concat([*steps, *others])) == {1: 30, 2: 45}


def test_where_no_reader_waited_for_a_whole_message_what_they_waited_for_counts() -> None:
    reader_last = (300, 300, 300, 360)
    assert message_times(received([EARLY, EARLY, reader_last])) == {1: 100}
    assert message_times(received([(0, 2_000, 100, 1_000), reader_last])) == {1: 30}, (
        "one had come before it was asked for"
    )
    assert message_times(received([EARLY], match=-1)) == {}


@pytest.mark.parametrize("sample", ["1f1b_p4", "uneven_p4", "zbv_p4", *["dualpipe_p4", "interleaved-1f1b_p4"] * ALL])
def test_simulated_steps_of_the_samples_lack_the_host_and_the_jitter_of_the_measured_ones(sample: str) -> None:
    """Their messages have 256 bytes: what their transfers were recorded with is the time until the reader asked for them."""
    timeline = Timeline(load([SAMPLES / sample]))
    for window in timeline.windows:
        picture = timeline.picture(SIMULATED, window.step)
        tracks = picture[OPS].tracks
        span = int((tracks.start + tracks.length).max() - tracks.start.min())
        assert 0.65 * window.span_ns < span <= window.span_ns
