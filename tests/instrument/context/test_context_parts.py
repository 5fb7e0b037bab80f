"""The parts of context parallelism that need no processes: shards, squares, kernels and the merge."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.context.attention import check_context
from instrument.context.kernels import CpuFlash, CudaFlash, Exact, Kernel, kernel_for
from instrument.context.ring import merge
from instrument.context.shard import ContextShape, Layout, positions, shard_sequence
from instrument.context.squares import RingPlan
from pptrace.errors import UsageError

shapes = st.builds(ContextShape, st.integers(1, 5), st.integers(1, 4), st.sampled_from(Layout))


def test_balanced_ranks_hold_a_chunk_from_either_end() -> None:
    held = [positions(ContextShape(4), 16, rank).tolist() for rank in range(4)]
    assert held == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_ulysses_ranks_hold_consecutive_pieces_of_what_their_ring_rank_holds() -> None:
    held = [positions(ContextShape(2, 2), 16, rank).tolist() for rank in range(4)]
    assert held == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    held = [positions(ContextShape(2, 3), 12, rank).tolist() for rank in range(3)]
    assert held == [[0, 1], [2, 9], [10, 11]]


def test_contiguous_and_ulysses_ranks_hold_runs_in_order() -> None:
    for shape in (ContextShape(4, 1, Layout.CONTIGUOUS), ContextShape(1, 4), ContextShape(2, 2, Layout.CONTIGUOUS)):
        assert [positions(shape, 8, rank).tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_groups_have_neighbours_in_ulysses_and_strides_in_the_ring() -> None:
    shape = ContextShape(ring=2, ulysses=3)
    assert shape.ulysses_groups() == [[0, 1, 2], [3, 4, 5]]
    assert shape.ring_groups() == [[0, 3], [1, 4], [2, 5]]
    assert [shape.ring_rank(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]


@given(shapes, st.integers(1, 3), st.integers(0, 2))
def test_shards_have_each_position_once_at_its_place(shape: ContextShape, times: int, dim: int) -> None:
    size = [2, 3, 4]
    size[dim] = times * shape.divisor
    whole = torch.arange(torch.Size(size).numel()).view(size)
    shards = [shard_sequence(whole, shape, rank, dim) for rank in range(shape.size)]
    assert {shard.shape[dim] for shard in shards} == {size[dim] // shape.size}
    places = torch.cat([positions(shape, size[dim], rank) for rank in range(shape.size)])
    assert torch.equal(torch.cat(shards, dim).index_select(dim, torch.argsort(places)), whole)


@pytest.mark.parametrize(
    ("shape", "sequence", "rule"),
    [
        (ContextShape(2, 2), 12, "not divisible by 2·cp = 8 (cp=4, balanced); choose a multiple of 8"),
        (ContextShape(3, 1, Layout.CONTIGUOUS), 8, "not divisible by cp = 3 (cp=3, contiguous)"),
        (ContextShape(2), 0, "not divisible by 2·cp = 4"),
    ],
)
def test_sequences_that_cannot_be_cut_are_told_in_one_line(shape: ContextShape, sequence: int, rule: str) -> None:
    with pytest.raises(UsageError) as refused:
        shard_sequence(torch.zeros(1, sequence), shape, 0)
    assert str(refused.value).startswith(f"sequence length {sequence} is {rule}")
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="sequence length"):
        check_context(shape, sequence, 4, 4)


def test_empty_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="ulysses is 0"):
        ContextShape(2, 0)


@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.sampled_from(Layout), st.booleans())
def test_squares_cover_every_visible_score_once(
    ring: int, length: int, causal: bool, layout: Layout, split: bool
) -> None:
    length *= 2 if layout is Layout.BALANCED else 1
    shape = ContextShape(ring, 1, layout)
    sequence = ring * length
    seen = torch.zeros(sequence, sequence, dtype=torch.int64)
    for rank in range(ring):
        plan = RingPlan(ring, rank, length, causal, layout)
        steps = [(0, square) for square in ((*plan.local_early, *plan.local_late) if split else (plan.local,))]
        steps += [(step, square) for step in range(1, ring) if (square := plan.remote(step)) is not None]
        for step, square in steps:
            queries = positions(shape, sequence, rank)[square.queries]
            keys = positions(shape, sequence, plan.source(step))[square.keys]
            part = torch.ones(len(queries), len(keys), dtype=torch.int64)
            part = part.tril() if square.masked else part
            assert part.sum() > 0
            seen[queries[:, None], keys] += part
    wanted = torch.ones_like(seen)
    assert torch.equal(seen, wanted.tril() if causal else wanted)


@given(st.integers(1, 8), st.data())
@settings(max_examples=50, deadline=None)
def test_parts_of_a_row_merge_to_the_whole_in_any_order(num_keys: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    scale = data.draw(st.sampled_from([1.0, 30.0, 1000.0]))  # far beyond what exp can hold
    q, k, v = (torch.randn(2, 3, rows, 4, dtype=torch.float64, generator=generator) for rows in (5, num_keys, num_keys))
    q, k = q * scale, k
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=num_keys, max_size=num_keys)))
    parts = [Exact().forward(q, k[:, :, owner == part], v[:, :, owner == part], False) for part in owner.unique()]
    order = data.draw(st.permutations(parts))
    out, lse = order[0]
    for part in order[1:]:
        merge(out, lse, *part)
    whole_out, whole_lse = Exact().forward(q, k, v, False)
    torch.testing.assert_close(out, whole_out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def agree(kernel: Kernel, device: str, dtype: torch.dtype, tolerance: float, head_dim: int = 16) -> None:
    """Outputs and gradients of a kernel are those of the definition in float64."""
    for kv_heads, masked in product((4, 2, 1), (True, False)):
        keys = 6 if masked else 10
        sizes = ((4, 6), (kv_heads, keys), (kv_heads, keys), (4, 6))
        q, k, v, grad = (torch.randn(2, heads, rows, head_dim, dtype=dtype, device=device) for heads, rows in sizes)
        out, lse = kernel.forward(q, k, v, masked)
        result = (out, lse, *kernel.backward(grad, q, k, v, out, lse, masked))
        q, k, v, grad = (tensor.double() for tensor in (q, k, v, grad))
        out, lse = Exact().forward(q, k, v, masked)
        wanted = (out, lse, *Exact().backward(grad, q, k, v, out, lse, masked))
        for ours, other in zip(result, wanted, strict=True):
            torch.testing.assert_close(ours.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("kernel", [CpuFlash(), Exact()])
def test_kernels_compute_the_definition(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    agree(kernel, "cpu", dtype, tolerance)


def test_the_definition_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 6, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    wanted.backward(grad)
    out, lse = Exact().forward(*(leaf.detach() for leaf in leaves), True)
    result = Exact().backward(grad, *(leaf.detach() for leaf in leaves), out, lse, True)
    for ours, other in zip((out, *result), (wanted, *(leaf.grad for leaf in leaves)), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_cuda_kernel_computes_the_definition(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    agree(CudaFlash(), "cuda", dtype, 5e-2, head_dim=64)
    q = torch.empty(1, 1, 1, 64, device="cuda", dtype=dtype)
    assert isinstance(kernel_for(q), CudaFlash)
    assert isinstance(kernel_for(q.float()), Exact)
    assert isinstance(kernel_for(q[..., :20]), Exact)
