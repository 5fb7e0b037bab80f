"""Our layer with experts against megatron-core's own ``MoELayer`` on the same ranks: outputs and all gradients, float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.instrument.expert.cases.megatron import Case, compare
from tests.support.pool import Pool

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
CASES = [
    Case(ep=2),
    Case(ep=2, top_k=1, pre_softmax=True),
    Case(ep=2, top_k=4, aux=0.3, z=0.2),
    Case(ep=2, tp=2, aux=0.3, z=0.2),
    Case(ep=1, tp=2, top_k=3, pre_softmax=True, aux=0.3),
    Case(ep=1, tp=2, etp=2),
    Case(ep=1, tp=2, etp=2, padded=True),
    Case(ep=2, groups=2),
    Case(ep=2, gathered=True, aux=0.3),
    Case(ep=1, tp=2, etp=2, gathered=True),
    Case(ep=2, factor=0.5),
    Case(ep=2, factor=1.0, padded=True, top_k=3, pre_softmax=True),
    Case(ep=2, sigmoid=True, scale=2.5, top_k=3),
    Case(ep=2, shared=8),
    Case(ep=2, tp=2, shared=8, z=0.2),
]


@needs_megatron
def test_outputs_and_gradients_are_those_of_megatron_cores_layer() -> None:
    with Pool(size=2) as pool:
        for errors in pool.run(compare, CASES, timeout_s=300):
            for case, of_case in zip(CASES, errors, strict=True):
                assert max(of_case) < 1e-12, (case, of_case)
