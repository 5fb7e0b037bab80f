"""Layer times: measured once for all ranks, kept in a file, and refused where they are another model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrument.models import layer_times
from instrument.models.gpt import GptConfig
from instrument.models.layer_times import measure_layer_times, read_layer_times, share_layer_times, write_layer_times
from instrument.pipeline.balance import LayerTimes
from instrument.recorder import Recorder
from pptrace.errors import UsageError
from tests.instrument.pool import Pool

CONFIG = GptConfig(layers=3, hidden=8, heads=2, sequence=6)
TIMES = LayerTimes(10, (20, 21, 22), 30)
CPU = torch.device("cpu")


def test_every_part_is_measured_and_layers_are_alike() -> None:
    times = measure_layer_times(CONFIG, 2, CPU)
    assert len(times.layers_ns) == 3
    assert len(set(times.layers_ns)) == 1
    assert min(times.embedding_ns, times.layers_ns[0], times.head_ns) > 0


def share_other_times() -> LayerTimes:
    """What this rank knows after sharing, if each rank's own measurement were another."""
    mine = 100 * (1 + dist.get_rank())
    layer_times.measure_layer_times = lambda *_: LayerTimes(mine, (mine + 1,) * 3, mine + 2)
    try:
        return share_layer_times(CONFIG, 2, CPU, Recorder())
    finally:
        layer_times.measure_layer_times = measure_layer_times


def test_all_ranks_know_what_rank_zero_measured(pool: Pool) -> None:
    assert pool.run(share_other_times) == [LayerTimes(100, (101,) * 3, 102)] * 4


def test_times_come_back_from_their_file(tmp_path: Path) -> None:
    write_layer_times(tmp_path / "times.json", TIMES, CONFIG, 2)
    assert read_layer_times(tmp_path / "times.json", CONFIG, 2) == TIMES


def test_times_of_another_model_are_refused(tmp_path: Path) -> None:
    write_layer_times(tmp_path / "times.json", TIMES, CONFIG, 2)
    with pytest.raises(UsageError, match="measure anew"):
        read_layer_times(tmp_path / "times.json", CONFIG, 3)
    with pytest.raises(UsageError, match="measure anew"):
        read_layer_times(tmp_path / "times.json", GptConfig(layers=3, hidden=16, heads=2, sequence=6), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_ns": "fast"}, "embedding_ns is 'fast'; expected a whole number of ns"),
        ({"head_ns": -1}, "head_ns is -1"),
        ({"layers_ns": [1, 2]}, r"layers_ns is \[1, 2\]; expected a list of 3 times"),
        ({"layers_ns": [1, 2, None]}, "layers_ns is None"),
    ],
)
def test_a_damaged_file_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_layer_times(path, TIMES, CONFIG, 2)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        read_layer_times(path, CONFIG, 2)


def test_a_file_that_is_none_of_layer_times_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    with pytest.raises(UsageError, match="--save-layer-times writes such a file"):
        read_layer_times(path, CONFIG, 2)
    path.write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        read_layer_times(path, CONFIG, 2)
    path.write_text("[]")
    with pytest.raises(UsageError, match="holds no JSON object"):
        read_layer_times(path, CONFIG, 2)
    with pytest.raises(UsageError, match="cannot be written"):
        write_layer_times(tmp_path / "nowhere" / "times.json", TIMES, CONFIG, 2)
