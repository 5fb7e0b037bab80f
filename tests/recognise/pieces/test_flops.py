"""FLOPs of operators by their shapes, against torch's own counter."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pptrace.ingest.kineto.event_columns import UNKNOWN, ShapeArgs, flops_of
from pptrace.model.device import CLASSES, WorkClass
from pptrace.recognise.rank import recognise_rank
from tests.support.programs import SAMPLES
from tests.support.read import read_kineto

SHAPE = (2, 4, 16, 8)


class Net(nn.Module):
    """Every kind of product that a model has: linear layers, batches, attention, convolutions and their transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)
        self.convolution = nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=1)
        self.transposed = nn.ConvTranspose2d(8, 4, 3, stride=2)
        self.grouped = nn.Conv1d(8, 16, 3, padding=2)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        q, k, v = self.up(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.baddbmm(torch.zeros(8, 16, 16), mixed.reshape(8, 16, 8), mixed.reshape(8, 8, 16))
        picture = self.transposed(self.convolution(image))
        line = self.grouped(picture.flatten(2).narrow(2, 0, 20).repeat(1, 2, 1))
        return self.down(mixed.transpose(1, 2).reshape(2, 16, 32)).sum() + scores.sum() + line.sum()


def recorded(path: Path, backend: SDPBackend) -> tuple[int, Path]:
    """(FLOPs as torch counts them, a trace of the same)."""
    net, x = Net(), torch.randn(2, 16, 32, requires_grad=True)
    image = torch.randn(2, 4, 9, 9, requires_grad=True)
    with sdpa_kernel(backend):
        with FlopCounterMode(display=False) as counter:
            net(x, image).backward()
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
            net(x, image).backward()
    profiler.export_chrome_trace(str(path))
    return counter.get_total_flops(), path


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_flops_of_a_trace_are_those_that_torch_counts(tmp_path: Path, backend: SDPBackend) -> None:
    counted, path = recorded(tmp_path / "rank0.json", backend)
    if backend is SDPBackend.FLASH_ATTENTION:  # whose operators on CPUs torch's counter does not know
        counted += sdpa_flop_count(SHAPE, SHAPE, SHAPE) + sdpa_backward_flop_count(SHAPE, SHAPE, SHAPE, SHAPE)
    pieces = recognise_rank(read_kineto(path)).work.pieces
    assert int(pieces.flops.sum()) == counted
    classes = {CLASSES[code] for code in pieces.work[pieces.flops > 0].tolist()}
    assert classes == {WorkClass.MATMUL} | ({WorkClass.ATTENTION} if backend is SDPBackend.FLASH_ATTENTION else set())


def test_products_without_shapes_are_unknown_and_all_else_multiplies_nothing(tmp_path: Path) -> None:
    _, path = recorded(tmp_path / "rank0.json", SDPBackend.FLASH_ATTENTION)
    content = json.loads(path.read_bytes())
    for event in content["traceEvents"]:
        if event.get("name") != "aten::bmm":
            event.get("args", {}).pop("Input Dims", None)
    path.write_text(json.dumps(content))
    pieces = recognise_rank(read_kineto(path)).work.pieces
    unknown = {CLASSES[code] for code in pieces.work[pieces.flops < 0].tolist()}
    assert unknown == {WorkClass.MATMUL, WorkClass.ATTENTION}
    assert (pieces.flops > 0).any()


@pytest.mark.parametrize(
    ("name", "dims"),
    [("aten::mm", "[[2, 3], [4, 5]]"), ("aten::mm", "[[], [4, 5]]"), ("aten::mm", "7"), ("aten::convolution", "[[1]]")],
)
def test_shapes_that_do_not_fit_tell_nothing(name: str, dims: str) -> None:
    assert flops_of(name, ShapeArgs(dims=dims.encode())) == UNKNOWN


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_kernels_without_a_length_before_all_others_are_in_no_piece(tmp_path: Path, share: float) -> None:
    content = json.loads(gzip.decompress((SAMPLES / "gpu_1f1b_p4" / "rank0.json.gz").read_bytes()))
    kernels = sorted((e for e in content["traceEvents"] if e.get("cat") == "kernel"), key=lambda event: event["ts"])
    for kernel in kernels[: int(share * len(kernels))]:
        kernel["dur"] = 0
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(content))
    whole = recognise_rank(read_kineto(SAMPLES / "gpu_1f1b_p4" / "rank0.json.gz")).work.pieces
    pieces = recognise_rank(read_kineto(path)).work.pieces
    assert len(pieces.flops) <= (1 - share) * len(whole.flops) + 1
    assert pieces.flops.tolist() == whole.flops[len(whole.flops) - len(pieces.flops) :].tolist()
