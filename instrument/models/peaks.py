"""Peak FLOP/s of a device: the divisor of MFU.

Dense matrix products, no sparsity. float32 is what torch computes by default, without TF32: the vector units' peak.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

TERA = 1e12
_MATMUL_SIZE = 384
_MATMUL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak FLOP/s of one rank, and the source of the number."""

    flops_per_s: float
    source: str


GPUS: Mapping[tuple[str, ...], tuple[float | None, float, str]] = MappingProxyType(
    {
        ("GB200",): (2500, 80, "NVIDIA GB200 NVL72 datasheet, per GPU, without sparsity"),
        ("B200",): (2250, 75, "NVIDIA HGX B200 datasheet, per GPU, without sparsity"),
        ("H200", "NVL"): (835.5, 60, "NVIDIA H200 datasheet, NVL, without sparsity"),
        ("H200",): (989.5, 67, "NVIDIA H200 datasheet, SXM, without sparsity"),
        ("H100", "NVL"): (835.5, 60, "NVIDIA H100 datasheet, NVL, without sparsity"),
        ("H100", "PCIe"): (756, 51, "NVIDIA H100 datasheet, PCIe, without sparsity"),
        ("H100",): (989.4, 66.9, "NVIDIA H100 architecture whitepaper, SXM5, without sparsity"),
        ("A100",): (312, 19.5, "NVIDIA A100 datasheet, without sparsity"),
        ("L40S",): (362, 91.6, "NVIDIA L40S datasheet, without sparsity"),
        ("V100", "PCIE"): (None, 14, "NVIDIA V100 datasheet, PCIe (no bfloat16)"),
        ("V100", "SXM2"): (None, 15.7, "NVIDIA V100 datasheet, SXM2 (no bfloat16)"),
        ("MI300X",): (1307.4, 163.4, "AMD Instinct MI300X data sheet, without sparsity"),
        ("MI250X",): (191.5, 23.9, "AMD Instinct MI250X data sheet, of one of its two dies: each is a device"),
    }
)
"""The words that ``torch.cuda.get_device_name`` has all of → TFLOP/s of bfloat16 and of float32, and their source; the first
entry that fits counts.
"""


def gpu_peak(name: str, dtype: torch.dtype) -> Peak | None:
    """The peak of a GPU by its name; None where the table has neither it nor the dtype.

    A MIG slice is a part of a GPU, with a part of its peak: none of those is in the table.
    """
    words = frozenset(re.split(r"[^A-Za-z0-9]+", name))
    if "MIG" in words:
        return None
    for wanted, (bfloat16, float32, source) in GPUS.items():
        if words.issuperset(wanted):
            tera = {torch.bfloat16: bfloat16, torch.float32: float32}.get(dtype)
            return None if tera is None else Peak(tera * TERA, source)
    return None


def cpu_peak(dtype: torch.dtype, ranks_on_machine: int) -> Peak:
    """Measure the peak as the fastest of many short matrix products on this rank's threads, for a fifth of a second.

    Ranks that share cores share their peak: with more threads than cores a rank's peak is its share.
    """
    left = torch.rand(_MATMUL_SIZE, _MATMUL_SIZE).to(dtype)
    fastest = float("inf")
    ends = time.perf_counter() + _MATMUL_SECONDS
    while (started := time.perf_counter()) < ends:
        torch.mm(left, left)
        fastest = min(fastest, time.perf_counter() - started)
    share = min(1.0, (os.cpu_count() or 1) / (ranks_on_machine * torch.get_num_threads()))
    source = f"measured: {_MATMUL_SIZE}³ matmul on {torch.get_num_threads()} thread(s)"
    source += f", of which a rank has {share:.2f} of a core each" if share < 1 else ""
    return Peak(share * 2 * _MATMUL_SIZE**3 / fastest, source)


def device_peak(device: torch.device, dtype: torch.dtype, ranks_on_machine: int) -> Peak | None:
    """The peak of this rank's device; None where it is unknown.

    Ranks that share a GPU share its peak, as they do a CPU's cores.
    """
    if device.type == "cpu":
        return cpu_peak(dtype, ranks_on_machine)
    peak = gpu_peak(torch.cuda.get_device_name(device), dtype)
    per_gpu = -(-ranks_on_machine // torch.cuda.device_count())
    if peak is None or per_gpu == 1:
        return peak
    return Peak(peak.flops_per_s / per_gpu, f"{peak.source}, shared by {per_gpu} ranks")
