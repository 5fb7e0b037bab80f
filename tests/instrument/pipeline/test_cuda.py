"""The same exactness on GPUs: over NCCL, and through host memory where ranks share one."""

from __future__ import annotations

import pytest
import torch

from instrument.pipeline.transport import Mode
from tests.instrument.pipeline.cases.training import Case
from tests.instrument.pipeline.test_exact import check
from tests.support.pool import Pool

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no CUDA device")]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_ranks_that_share_a_gpu_are_exact_through_host_memory(pool: Pool, schedule: str, mode: Mode) -> None:
    check(pool, [Case(schedule, 4, m, layers=5, tied=True, mode=mode, backend="host-staged") for m in (1, 5)])
    check(pool, [Case(schedule, 2, 3, dp=2, mode=mode, backend="host-staged", negotiated=True)])


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_ranks_are_exact_over_nccl_also_where_they_share_a_gpu(pool: Pool, schedule: str, mode: Mode) -> None:
    check(pool, [Case(schedule, 2, m, layers=3, tied=True, mode=mode, backend="nccl") for m in (1, 4)])
    check(pool, [Case("interleaved-1f1b", 2, 4, chunks=2, mode=mode, backend="nccl")])
