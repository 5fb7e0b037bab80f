"""Layer times: measured once for all ranks, kept in a file, and refused where they are another model's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from instrument.context.shard import ContextShape
from instrument.mesh import fit_shape, make_mesh
from instrument.models import layer_times
from instrument.models.gpt_config import GptConfig
from instrument.models.layer_times import measure_layer_times, read_layer_times, share_layer_times, write_layer_times
from instrument.models.parallel import ParallelOptions, make_parallel
from instrument.models.rank_form import RankForm
from instrument.pipeline.balance import LayerTimes
from instrument.recorder import Recorder
from pptrace.errors import UsageError
from pptrace.marks import Axis, Collective
from tests.support.pool import Pool

CONFIG = GptConfig(layers=3, hidden=8, heads=2, sequence=8)
FORM = RankForm(CONFIG, 2)
TIMES = LayerTimes(10, (20, 21, 22), 30)
CPU = torch.device("cpu")


def test_every_part_is_measured_and_layers_are_alike() -> None:
    times = measure_layer_times(CONFIG, 2, CPU)
    assert len(times.layers_ns) == 3
    assert len(set(times.layers_ns)) == 1
    assert min(times.embedding_ns, times.layers_ns[0], times.head_ns) > 0


def share_other_times() -> LayerTimes:
    """Share the times, if each rank's own measurement were another."""
    rank_time = 100 * (1 + dist.get_rank())
    mesh = make_mesh(fit_shape(4, pp=4), "cpu", "gloo")
    layer_times.measure_layer_times = lambda *_: LayerTimes(rank_time, (rank_time + 1,) * 3, rank_time + 2)
    try:
        return share_layer_times(CONFIG, 2, CPU, mesh, make_parallel(mesh, ParallelOptions(), Recorder()))
    finally:
        layer_times.measure_layer_times = measure_layer_times


def test_all_ranks_know_what_rank_zero_measured(pool: Pool) -> None:
    assert pool.run(share_other_times) == [LayerTimes(100, (101,) * 3, 102)] * 4


def measure_shares(sizes: dict[str, int], options: ParallelOptions) -> tuple[LayerTimes, tuple[int, ...], set[str]]:
    """The times on a mesh; the elements that this rank's layers have had, if it measured; and the communication it marked."""
    mesh = make_mesh(fit_shape(4, **sizes), "cpu", "gloo")
    recorder, seen = MarkedRecorder(), set[int]()
    original = layer_times.Block

    class Watched(original):
        def forward(self, x: Tensor) -> Tensor:
            seen.update((x.shape[1], self.mlp_in.weight.shape[0], self.qkv.weight.shape[0]))
            return super().forward(x)

    layer_times.Block = Watched
    try:
        times = share_layer_times(CONFIG, 2, CPU, mesh, make_parallel(mesh, options, recorder))
    finally:
        layer_times.Block = original
    return times, tuple(sorted(seen)), recorder.kinds


class MarkedRecorder(Recorder):
    """Remembers the axes of all communication."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()

    def collective(self, kind: Collective, axis: Axis, *rest: Any, **named: Any) -> Any:
        self.kinds.add(f"{axis}")
        return super().collective(kind, axis, *rest, **named)

    def exchange(self, links: Any, axis: Axis, *rest: Any) -> Any:
        self.kinds.add(f"{axis}")
        return super().exchange(links, axis, *rest)


@pytest.mark.parametrize(
    ("sizes", "options", "shares", "axes", "measuring"),
    [
        ({"pp": 4}, ParallelOptions(), (8, 24, 32), {"world"}, 1),
        ({"pp": 2, "tp": 2}, ParallelOptions(), (8, 12, 16), {"tp", "world"}, 2),
        ({"pp": 1, "cp": 2}, ParallelOptions(), (4, 24, 32), {"cp", "world"}, 2),
        ({"pp": 1, "tp": 2, "cp": 2}, ParallelOptions(True, True), (2, 12, 16), {"tp", "cp", "world"}, 4),
    ],
)
def test_a_rank_measures_its_share_together_with_those_that_have_the_others(
    pool: Pool, sizes: dict[str, int], options: ParallelOptions, shares: tuple[int, ...], axes: set[str], measuring: int
) -> None:
    rows = pool.run(measure_shares, sizes, options, timeout_s=300)
    assert len({times for times, _, _ in rows}) == 1
    assert all(min(times.embedding_ns, times.layers_ns[0], times.head_ns) > 0 for times, _, _ in rows)
    for rank, (_, seen, kinds) in enumerate(rows):
        assert seen == (shares if rank < measuring else ()), rank
        assert kinds == (axes if rank < measuring else {"world"}), rank


def test_times_come_back_from_their_file(tmp_path: Path) -> None:
    write_layer_times(tmp_path / "times.json", TIMES, FORM)
    assert read_layer_times(tmp_path / "times.json", FORM) == TIMES


@pytest.mark.parametrize(
    ("form", "overlap", "message"),
    [
        (RankForm(CONFIG, 3), False, "microbatch_size is 2 where this run has 3; measure anew"),
        (RankForm(replace(CONFIG, hidden=16), 2), False, "hidden is 8 where this run has 16; measure anew"),
        (RankForm(replace(CONFIG, kv_heads=1), 2), False, "kv_heads is 2 where this run has 1; measure anew"),
        (
            RankForm(CONFIG, 2, tp=2, sequence=True),
            False,
            "tp is 1 where this run has 2, sequence_parallel is False where",
        ),
        (RankForm(CONFIG, 2, context=ContextShape(1, 2)), False, "cp is 1 where this run has 2, ulysses is 1 where"),
        (FORM, True, "overlap is False where this run has True"),
    ],
)
def test_times_of_another_model_or_share_are_refused(
    form: RankForm, overlap: bool, message: str, tmp_path: Path
) -> None:
    write_layer_times(tmp_path / "times.json", TIMES, FORM)
    with pytest.raises(UsageError, match=message):
        read_layer_times(tmp_path / "times.json", form, overlap)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_ns": "fast"}, "embedding_ns is 'fast'; expected a whole number of ns"),
        ({"head_ns": -1}, "head_ns is -1"),
        ({"layers_ns": [1, 2]}, r"layers_ns is \[1, 2\]; expected a list of 3 times"),
        ({"layers_ns": [1, 2, None]}, "layers_ns is None"),
        ({"model": 3}, "model is 3; measure anew"),
    ],
)
def test_a_damaged_file_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_layer_times(path, TIMES, FORM)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        read_layer_times(path, FORM)


def test_a_file_that_is_none_of_layer_times_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    with pytest.raises(UsageError, match="--save-layer-times writes such a file"):
        read_layer_times(path, FORM)
    path.write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        read_layer_times(path, FORM)
    path.write_text("[]")
    with pytest.raises(UsageError, match="holds no JSON object"):
        read_layer_times(path, FORM)
    with pytest.raises(UsageError, match="cannot be written"):
        write_layer_times(tmp_path / "nowhere" / "times.json", TIMES, FORM)
