"""The peak of a device: by its name, or measured on a CPU."""

from __future__ import annotations

import pytest
import torch

from instrument.models.peaks import cpu_peak, gpu_peak


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float32, 66.9),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
    ],
)
def test_well_known_gpus_are_in_the_table(name: str, dtype: torch.dtype, tera: float) -> None:
    peak = gpu_peak(name, dtype)
    assert peak.flops_per_s == pytest.approx(tera * 1e12)
    assert peak.source


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA GeForce GTX 1080", torch.float32),
        ("NVIDIA A10", torch.bfloat16),  # not an A100
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16),
        ("Tesla V100-SXM2-32GB", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3", torch.float64),
    ],
)
def test_what_is_not_in_the_table_has_no_peak(name: str, dtype: torch.dtype) -> None:
    assert gpu_peak(name, dtype) is None


def test_ranks_that_share_a_core_share_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    alone, crowded = cpu_peak(torch.float32, 2), cpu_peak(torch.float32, 200)
    assert alone.flops_per_s > 2 * crowded.flops_per_s > 0  # 100 times, on a machine that has nothing else to do
    assert alone.source == "measured: 384³ matmul on 1 thread(s)"
    assert crowded.source.endswith("of which a rank has 0.01 of a core each")
