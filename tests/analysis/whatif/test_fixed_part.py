"""The part of ops that they take however much they do, from stages with other numbers of layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.fixed_part import Floats, measured_fixed_part
from pptrace.analysis.whatif.stage_costs import NOTHING_ASSUMED, Assumed
from pptrace.analysis.whatif.study import Study, study_run
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.simulator import Costs, simulate
from tests.analysis.whatif.test_whatif import MS, analysed

FIXED, LAYER, EMBEDDING, HEAD = (1.5, 2.5), (2, 4), (0.5, 1), (3, 6)
"""Fixed parts of an F and a B, what they take, for a layer, for the embedding and for the head, ms."""
SPLIT = (3, 6, 4, 3)


def costs_of(split: Sequence[int], size: float = 1.0, parts: tuple[float, float] = FIXED) -> Costs:
    """Costs of stages with these layers; of a B half is W's, and each half has all of the fixed part by itself."""
    stages = {}
    for stage, layers in enumerate(split):
        work = [
            (LAYER[kind] * layers + EMBEDDING[kind] * (stage == 0) + HEAD[kind] * (stage == len(split) - 1)) * size
            for kind in range(2)
        ]
        of_kinds = {Kind.F: parts[0] + work[0], Kind.B: parts[1] + work[1]}
        of_kinds |= dict.fromkeys((Kind.I, Kind.W), parts[1] + work[1] / 2)
        stages |= {(kind, stage): round(ms * MS) for kind, ms in of_kinds.items()}
    return Costs(stages=stages)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study_of(tmp_path_factory.mktemp("run"), "gpipe")


def study_of(folder: Path, name: str, assumed: Assumed = NOTHING_ASSUMED) -> Study:
    analysis = analysed(build(name, 4, 8), costs_of(SPLIT), folder)
    return study_run(analysis.report, analysis.costs, analysis.schedule, SPLIT, assumed=assumed)


@pytest.mark.parametrize("split", [(4, 4, 4, 4), (5, 4, 4, 3), (1, 6, 8, 1)])
def test_a_split_is_predicted_as_the_simulator_has_it(study: Study, split: tuple[int, ...]) -> None:
    scenario = study.scenario(Change(split=split), "split")
    assert scenario.span_ns == simulate(build("gpipe", 4, 8), costs_of(split)).makespan_ns
    assert "1.5 ms of an F, 2.5 ms of a B are taken to stay however much an op does" in scenario.note


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zbv", "zb-h1", "dualpipe"])
def test_so_are_chunks_and_split_backwards(study: Study, name: str) -> None:
    plan = build(name, 4, 8)
    split = (2,) * 8 if plan.chain_length == 8 else SPLIT
    costs = costs_of(split)
    if plan.num_chains == 2:
        costs = Costs(stages={**costs.stages, **{(kind, 4 + at): ns for (kind, at), ns in costs.stages.items()}})
    scenario = study.scenario(Change(schedule=name), name)
    assert scenario.span_ns == simulate(plan, costs).makespan_ns


def test_gradients_that_were_measured_by_themselves_have_parts_of_their_own(tmp_path: Path) -> None:
    found = study_of(tmp_path, "zb-h1")
    assert found.costs.fixed.tolist() == pytest.approx([ms * MS for ms in (FIXED[0], FIXED[1], FIXED[1])])
    scenario = found.scenario(Change(split=(5, 4, 4, 3)), "split")
    assert scenario.span_ns == simulate(build("zb-h1", 4, 8), costs_of((5, 4, 4, 3))).makespan_ns
    assert "1.5 ms of an F, 2.5 ms of an I, 2.5 ms of a W" in scenario.note


def test_the_interval_has_what_comes_out_if_all_of_an_op_is_its_layers(study: Study, tmp_path: Path) -> None:
    change = Change(schedule="interleaved-1f1b")
    usual = study.scenario(change, "chunks")
    without = study_of(tmp_path, "gpipe", Assumed(fixed=0.0)).scenario(change, "chunks")
    assert usual.low_ns <= without.low_ns < without.span_ns < usual.span_ns
    assert "--fixed-share" in without.note


def works(split: Sequence[int], fixed: float, factors: Sequence[float] = (), noise: float = 0.0) -> Floats:
    """Ops of five steps of eight microbatches, ns: layers of 100 with the fixed part; of stages so many times that."""
    stages = (fixed + 100 * np.array(split)) * (factors or np.ones(len(split)))
    rng = np.random.default_rng(1)
    return np.repeat(
        (stages[:, np.newaxis] * (1 + noise * rng.standard_normal((5, len(split), 8))))[..., np.newaxis], 2, 3
    )


TWO_KINDS = [works((3, 6, 4, 3), fixed)[..., :1] for fixed in (30, 200)]
TELLS_NOTHING = {
    "layers not known": (None, works((3, 6, 4, 3), 30)),
    "as many between the ends": ((4, 3, 3, 6), works((4, 3, 3, 6), 30)),
    "one between the ends": ((4, 2, 4), works((4, 2, 4), 30)),
    "hardly other numbers": ((5, 7, 5, 5), works((5, 7, 5, 5), 100)),
    "none": ((3, 6, 4, 3), works((3, 6, 4, 3), 0)),
    "too large": ((3, 6, 4, 3), works((3, 6, 4, 3), 200)),
    "too large of one kind": ((3, 6, 4, 3), np.concatenate(TWO_KINDS, axis=3)),
    "a slow stage": ((3, 6, 4, 3), works((3, 6, 4, 3), 0, (1, 1, 1.05, 1))),
    "another one": ((3, 6, 4, 3), works((3, 6, 4, 3), 0, (1, 1.1, 1, 1))),
    "a very slow stage": ((6, 6, 4, 6), works((6, 6, 4, 6), 0, (1, 1, 1.5, 1))),
    "a stage that is hardly slower": ((6, 6, 4, 6), works((6, 6, 4, 6), 0, (1, 1, 1.02, 1))),
    "noise": ((3, 6, 4, 3), works((3, 6, 4, 3), 1, noise=0.2)),
}


@pytest.mark.parametrize(("layers", "work"), TELLS_NOTHING.values(), ids=TELLS_NOTHING)
def test_none_is_measured_where_stages_do_not_tell(layers: tuple[int, ...] | None, work: Floats) -> None:
    assert measured_fixed_part(work, layers).tolist() == [0, 0]


def test_of_many_stages_and_steps_some_tell_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    split = (3, 6, 4, 3)
    monkeypatch.setattr("pptrace.analysis.whatif.fixed_part._MOST_CELLS", 15)
    seen: list[tuple[int, ...]] = []
    median = np.median
    monkeypatch.setattr(
        np, "median", lambda values, *given, **named: seen.append(values.shape) or median(values, *given, **named)
    )
    assert measured_fixed_part(works(split, 30), split) == pytest.approx([30, 30])
    assert max(shape[0] for shape in seen if len(shape) == 2) <= 15


@pytest.mark.parametrize(("microbatches", "size"), [(16, 0.5), (4, 2.0)])
def test_so_are_microbatches_of_another_size(study: Study, microbatches: int, size: float) -> None:
    scenario = study.scenario(Change(microbatches=microbatches, microbatch_size=size), "sizes")
    assert scenario.span_ns == simulate(build("gpipe", 4, microbatches), costs_of(SPLIT, size)).makespan_ns
