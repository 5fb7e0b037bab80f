"""Recompute and gradients of weights in backwards, from operators: on paper, and of torch's own checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from pptrace.intervals import intersect, length, union
from pptrace.model.device import BackwardParts
from pptrace.workflow.load import load
from tests.support.kineto import event_row, write_rows

NODE = "autograd::engine::evaluate_function: "


def event(name: str, start: float, end: float, sequence: int | None = None, category: str = "cpu_op") -> dict[str, Any]:
    args = {} if sequence is None else {"Sequence number": sequence, "Fwd thread id": 1}
    return event_row(category, name, start, end - start, **args)


def parts_of(events: list[dict[str, Any]], folder: Path) -> BackwardParts:
    path = write_rows(folder / "rank0.json", events, distributedInfo={"rank": 0})
    return load([path], cache=False).data.work[0].backward


def microseconds(intervals: Any) -> list[list[float]]:
    return [[start / 1e3 - 1000, end / 1e3 - 1000] for start, end in intervals.tolist()]


STEP = event("ProfilerStep#1", 1000, 1400, category="user_annotation")
LINEAR = [
    event(f"{NODE}AddmmBackward0", 1200, 1260, 3),
    event("AddmmBackward0", 1201, 1250, 3),
    event("aten::mm", 1205, 1220),
    event("aten::mm", 1222, 1240),
    event(f"{NODE}torch::autograd::AccumulateGrad", 1270, 1280),
]
AGAIN = [
    event(f"{NODE}GeluBackward0", 1300, 1390, 2),
    event("aten::view", 1305, 1306),
    event("aten::layer_norm", 1310, 1320, 9),
    event("aten::linear", 1321, 1350, 10),
    event("aten::addmm", 1322, 1349, 10),
    event("aten::gelu_backward", 1360, 1380),
]


def test_on_paper_a_node_has_the_gradient_of_its_weights_second_and_a_recompute_first(tmp_path: Path) -> None:
    parts = parts_of([STEP, *LINEAR, *AGAIN], tmp_path)
    assert (parts.no_recompute, parts.no_weights) == ("", "")
    assert microseconds(parts.weights) == [[222, 240], [270, 280]]
    assert microseconds(parts.recompute) == [[305, 350]]


def test_operators_of_a_backward_that_looks_like_a_forward_are_none(tmp_path: Path) -> None:
    """Without a sequence number they ran with gradients off: a backward of a program's own may call anything."""
    quiet = [one | {"args": {}} if one["name"].startswith("aten") else one for one in AGAIN]
    parts = parts_of([STEP, *LINEAR, *quiet], tmp_path)
    assert parts.no_recompute == ""
    assert not len(parts.recompute)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_function_in_a_node_runs_again_only_where_operators_had_gradients_on(
    recomputes: bool, tmp_path: Path
) -> None:
    """A Function always has a number. Without operators that have one it is of the backward: a gather's is a scatter."""
    node = [
        event(f"{NODE}_GatherBackward", 1300, 1390, 2),
        event("_Scatter", 1310, 1360, 9),
        event("aten::copy_", 1320, 1350),
    ]
    view = [event("aten::view", 1305, 1306, 9)] * recomputes
    parts = parts_of([STEP, *LINEAR, node[0], *view, *node[1:]], tmp_path)
    assert parts.no_recompute == ""
    assert microseconds(parts.recompute) == [[305, 360]] * recomputes


@pytest.mark.parametrize("products", [1, 3])
def test_products_that_stand_alone_or_are_many_tell_no_weights(products: int, tmp_path: Path) -> None:
    several = [event("aten::mm", 1205 + 10 * nth, 1210 + 10 * nth) for nth in range(products)]
    parts = parts_of([STEP, *LINEAR[:2], *several, *LINEAR[4:]], tmp_path)
    assert parts.no_recompute == ""
    assert parts.no_weights.startswith("which of its matrix products are of weights is not known")


def test_a_backward_that_is_differentiated_tells_nothing(tmp_path: Path) -> None:
    parts = parts_of([STEP, *AGAIN], tmp_path)
    assert "differentiated" in parts.no_recompute


def test_without_nodes_both_are_unknown(tmp_path: Path) -> None:
    parts = parts_of([STEP, event("aten::linear", 1100, 1200, 4)], tmp_path)
    assert parts.no_recompute == "its trace has no operators of autograd, and no ranges of recompute"
    assert parts.no_weights == "its trace has no operators of autograd"


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoints_are_found_where_they_run_again(reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)]
    runs: list[int] = []

    def named(layer: nn.Module, x: Tensor) -> Tensor:
        runs.append(1)
        with record_function("again" if len(runs) > len(layers) else "first"):
            return layer(x)

    def step() -> None:
        runs.clear()
        x = torch.randn(64, 256, requires_grad=True)
        for layer in layers:
            x = checkpoint(named, layer, x, use_reentrant=reentrant)
        x.sum().backward()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    path = tmp_path / "rank0.json"
    profiled.export_chrome_trace(str(path))
    trace = json.loads(path.read_text()) | {"distributedInfo": {"rank": 0}}
    path.write_text(json.dumps(trace))
    parts = load([path], cache=False).data.work[0].backward
    base = trace["baseTimeNanoseconds"]
    truth = [one for one in trace["traceEvents"] if one.get("name") == "again" and one.get("cat") == "user_annotation"]
    assert len(truth) == len(layers)
    times = [(round(1e3 * one["ts"]) + base, round(1e3 * (one["ts"] + one["dur"])) + base) for one in truth]
    ranges = union([start for start, _ in times], [end for _, end in times])
    assert len(parts.recompute) == len(layers)
    assert length(intersect(parts.recompute, ranges)) >= 0.9 * length(parts.recompute)
    covered = [length(intersect(parts.recompute, union([start], [end]))) / (end - start) for start, end in times]
    assert (
        median(covered) >= 0.6
    )  # not the last operators, nor Python, nor the time in which another process has the core


class Twice(torch.autograd.Function):
    """A Function whose backward applies itself, as those of tensor parallelism apply each other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Twice.apply(gradients[0])


@pytest.mark.parametrize("again", [False, True])
def test_what_the_backward_of_a_function_applies_is_no_recompute(again: bool, tmp_path: Path) -> None:
    layers = [nn.Linear(64, 64) for _ in range(3)]

    def block(layer: nn.Module, x: Tensor) -> Tensor:
        return Twice.apply(layer(x).relu())

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        x = torch.randn(8, 64, requires_grad=True)
        for layer in layers:
            x = checkpoint(block, layer, x, use_reentrant=False) if again else block(layer, x)
        x.sum().backward()
    path = tmp_path / "rank0.json"
    profiled.export_chrome_trace(str(path))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"distributedInfo": {"rank": 0}}))
    parts = load([path], cache=False).data.work[0].backward
    assert parts.no_recompute == ""
    assert len(parts.recompute) == len(layers) * again


def launched(number: int, call: float, start: float, end: float) -> list[dict[str, Any]]:
    """A kernel, and the call that launches it."""
    kernel = event_row("kernel", "gemm", start, end - start, number, stream=7, device=0)
    return [event_row("cuda_runtime", "cudaLaunchKernel", call, 1, number), kernel]


def test_on_a_device_parts_are_the_kernels_that_they_launch(tmp_path: Path) -> None:
    kernels = [*launched(1, 1206, 1210, 1230), *launched(2, 1225, 1240, 1270), *launched(3, 1323, 1330, 1370)]
    parts = parts_of([STEP, *LINEAR, *AGAIN, *kernels], tmp_path)
    assert microseconds(parts.weights) == [[240, 270]]
    assert microseconds(parts.recompute) == [[330, 370]]
