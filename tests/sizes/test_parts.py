"""Predicted communication, part by part: parameters, buckets, batches, norms, the two directions of DualPipe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from instrument.mesh import MeshShape
from pptrace.schedule.registry import build
from pptrace.sizes.gpt_facts import Parameter, stage_parameters
from pptrace.sizes.step import StepVolume
from pptrace.sizes.transformer import (
    AttentionSizes,
    Calls,
    attention_again_volume,
    attention_volume,
    ring_volume,
    ulysses_volume,
)
from tests.support.gpt_runs import facts, step_of

H, VOCABULARY, SEQUENCE = 32, 256, 16
EMBEDDING, LAYER = VOCABULARY * H, 12 * H * H + 13 * H
HUGE = 2**40
REDUCE, GATHER, SCATTER = ("all_reduce", "all_gather", "reduce_scatter")


def numel(parameters: tuple[Parameter, ...]) -> int:
    return sum(parameter.numel for parameter in parameters)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_stage_holds_its_share_of_matrices_and_whole_norms_positions_and_output_biases(tp: int) -> None:
    model = facts(layers_per_stage=(2, 0, 1))
    first, middle, last = (stage_parameters(model, stage, tp) for stage in range(3))
    cut = 12 * H * H + 3 * H + 4 * H  # weights, and the biases of qkv and of the first layer of the MLP
    whole = 2 * 2 * H + 2 * H  # two norms, two output biases
    assert [[numel(layer) for layer in stage.layers] for stage in (first, middle, last)] == [
        [cut // tp + whole] * 2,
        [],
        [cut // tp + whole],
    ]
    assert (numel(first.before), numel(first.after)) == (EMBEDDING // tp + SEQUENCE * H, 0)
    assert (numel(last.before), numel(last.after)) == (0, EMBEDDING // tp + 2 * H)
    assert list(middle) == []
    assert [p.is_embedding for p in first] == [True] + [False] * (1 + 2 * 12)
    assert [p.is_embedding for p in last] == [False] * (12 + 2) + [True]


@pytest.mark.parametrize(
    ("kv_heads", "tp", "held", "copied"), [(4, 4, 1, 0), (2, 4, 1, 2), (2, 2, 1, 0), (1, 2, 1, 1), (2, 1, 2, 0)]
)
def test_kv_heads_that_tp_does_not_divide_are_copied_and_their_gradients_summed(
    kv_heads: int, tp: int, held: int, copied: int
) -> None:
    """Four heads of width 8; key and value heads each."""
    model = facts(kv_heads=kv_heads, layers_per_stage=(1,))
    (layer,) = stage_parameters(model, 0, tp).layers
    weight, bias = layer[2:4]
    assert (weight.shape, bias.shape) == (((4 // tp + 2 * held) * 8, H), ((4 // tp + 2 * held) * 8,))
    assert (weight.summed, bias.summed) == (2 * copied * 8 * H, 2 * copied * 8)
    assert sum(parameter.summed for parameter in layer) == weight.summed + bias.summed
    (rank, *_), (divided, *_) = (
        step_of(replace(model, kv_heads=heads), MeshShape(1, tp=tp)) for heads in (kv_heads, 4)
    )
    if tp > 1:
        more = rank["tp", REDUCE], divided["tp", REDUCE]
        assert more[0].count - more[1].count == (copied > 0)
        assert more[0].bytes - more[1].bytes == 2 * copied * 8 * (H + 1) * 4


def test_zero_2_scatters_every_unit_once_and_gathers_it_once_a_step() -> None:
    (plain, *_), (whole, *_) = (step_of(facts(zero=zero), MeshShape(1, dp=4)) for zero in (0, 2))
    gradients = plain["dp", REDUCE].bytes - 4
    assert whole["dp", SCATTER] == whole["dp", GATHER] == Calls(5, gradients)
    assert whole["dp", REDUCE] == Calls(1, 4), "the loss alone"


@pytest.mark.parametrize("zero", [2, 3])
def test_a_tied_embedding_that_one_rank_holds_is_one_parameter_of_the_units(zero: int) -> None:
    """Items of 16 bits are gathered, their gradients scattered in 32."""
    for dtype, item in (("float32", 4), ("bfloat16", 2), ("float64", 8)):
        tied, two = (
            step_of(facts(zero=zero, tied=is_tied, dtype=dtype), MeshShape(1, dp=2))[0] for is_tied in (True, False)
        )
        passes = 1 if zero == 2 else 2 * 4
        assert two["dp", SCATTER].bytes - tied["dp", SCATTER].bytes == EMBEDDING * max(4, item)
        assert two["dp", GATHER].bytes - tied["dp", GATHER].bytes == EMBEDDING * item * passes
    apart = facts(zero=zero, tied=True, layers_per_stage=(2, 2))
    for rank, more in zip(step_of(apart, MeshShape(pp=2, dp=2)), (SEQUENCE * H,) * 2 + (2 * H,) * 2, strict=True):
        assert rank["dp", SCATTER].bytes == (2 * LAYER + EMBEDDING + more) * 4
        assert rank["embd", REDUCE] == Calls(1, EMBEDDING // 2 * 4), "of the rows that this replica holds"


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_are_summed_first_leave_in_buckets_of_their_own(zero: int) -> None:
    """An embedding tied over two ranks, and with sequence parallelism norms, biases and positions; all else before."""
    for changes, shape, expected in (
        ({"tied": True}, MeshShape(pp=2, dp=2), [2, 2]),
        ({"tied": False}, MeshShape(pp=2, dp=2), [1, 1]),
        ({"sequence_parallel": True}, MeshShape(pp=2, dp=2, tp=2), [2, 2]),
        ({"sequence_parallel": True, "tied": True}, MeshShape(pp=2, dp=2), [2, 2]),
        ({"sequence_parallel": True}, MeshShape(pp=2, dp=2), [1, 1]),
    ):
        model = facts(zero=zero, layers_per_stage=(1, 1), bucket_bytes=HUGE, **changes)
        ranks = step_of(model, shape)
        half = len(ranks) // 2
        counts = [rank["dp", SCATTER if zero else REDUCE].count for rank in ranks]
        of_loss = [0] * half + [0 if zero else 1] * half
        assert np.subtract(counts, of_loss).tolist() == [expected[0]] * half + [expected[1]] * half


def filled(sizes: list[int], limit: int) -> list[int]:
    buckets = [0]
    for size in sizes:
        if buckets[-1] and buckets[-1] + size > limit:
            buckets.append(0)
        buckets[-1] += size
    return buckets


@pytest.mark.parametrize("limit", [64, 8192, 8192 + 63, 8192 + 64, 12_000])
def test_buckets_hold_as_many_parameters_as_fit_in_reverse_order(limit: int) -> None:
    """Of the last stage, whose last parameter is the head with 8192 numbers behind norms of 2 × 32."""
    model = facts(layers_per_stage=(1, 1), bucket_bytes=limit * 4)
    sizes = [parameter.numel for parameter in stage_parameters(model, 1, 1)]
    rank = step_of(model, MeshShape(pp=2, dp=2))[2]
    assert rank["dp", REDUCE] == Calls(len(filled(sizes[::-1], limit)) + 1, (sum(sizes) + 1) * 4)
    sharded = step_of(replace(model, zero=1), MeshShape(pp=2, dp=3))[3]
    padded = sum(-(-length // 3) * 3 for length in filled(sizes[::-1], limit))
    assert sharded["dp", SCATTER] == Calls(len(filled(sizes[::-1], limit)), padded * 4)
    assert filled(sizes, limit) != filled(sizes[::-1], limit)


@pytest.mark.parametrize(("pp", "reads"), [(1, [2]), (2, [1, 1]), (3, [1, 0, 1])])
def test_tokens_and_targets_go_from_the_first_rank_of_tp_to_the_others(pp: int, reads: list[int]) -> None:
    """8 bytes for each of 4 microbatches × 2 sequences × 16 positions."""
    ranks = step_of(facts(layers_per_stage=(1,) * pp), MeshShape(pp=pp, tp=2))
    assert [rank.get(("tp", "broadcast")) for rank in ranks[::2]] == [
        Calls(1, number * 8 * 4 * 2 * 16) if number else None for number in reads
    ]
    (on_v, other) = (
        StepVolume(facts(layers_per_stage=(1,) * 4), MeshShape(pp=2, tp=2), build("zbv", 2, 4)).of_rank(rank, 0)
        for rank in (0, 2)
    )
    assert on_v["tp", "broadcast"] == Calls(1, 2 * 8 * 4 * 2 * 16), "both ends of the model are on the first rank"
    assert ("tp", "broadcast") not in other


def test_a_norm_of_eight_bytes_is_summed_over_every_axis_that_has_parts_of_it() -> None:
    for zero, axes in ((0, {"tp", "pp"}), (1, {"tp", "pp", "dp"})):
        model = facts(layers_per_stage=(2, 2), zero=zero)
        plain, clipped = (
            step_of(replace(model, clip_grad=norm), MeshShape(pp=2, tp=2, dp=2))[5] for norm in (0.0, 1.0)
        )
        none = Calls(0, 0)
        more = {
            key: (calls.count - plain.get(key, none).count, calls.bytes - plain.get(key, none).bytes)
            for key, calls in clipped.items()
            if calls != plain.get(key)
        }
        assert more == {(axis, REDUCE): (1, 8) for axis in axes}


def test_with_post_validation_the_norm_goes_along_the_pipeline_and_comes_back_a_step_later() -> None:
    model = facts(clip_grad=1.0, optimizer_sync="post-validation", layers_per_stage=(1, 1, 1), steps=10)
    plan = build("1f1b", 3, 4)
    plain = StepVolume(replace(model, clip_grad=0.0), MeshShape(pp=3), plan)
    validated = StepVolume(model, MeshShape(pp=3), plan)
    for step, times in ((0, 0), (1, 1), (8, 1), (9, 2)):
        for rank, (to_next, to_previous) in enumerate(((1, 0), (1, 1), (0, 1))):
            more = {
                kind: Calls(
                    validated.of_rank(rank, step)["pp", kind].count - plain.of_rank(rank, step)["pp", kind].count,
                    validated.of_rank(rank, step)["pp", kind].bytes - plain.of_rank(rank, step)["pp", kind].bytes,
                )
                for kind in ("send", "recv")
            }
            sent, received = to_next + times * to_previous, to_previous + times * to_next
            assert more == {"send": Calls(sent, 8 * sent), "recv": Calls(received, 8 * received)}
            assert ("pp", REDUCE) not in validated.of_rank(rank, step)


@pytest.mark.parametrize(("dp", "cp", "axis"), [(4, 1, "dp"), (1, 4, "cp"), (2, 2, "dp-cp")])
def test_gradients_are_averaged_over_data_and_context_ranks_together(dp: int, cp: int, axis: str) -> None:
    model = facts(layers_per_stage=(1,), bucket_bytes=HUGE)
    numbers = LAYER + 2 * EMBEDDING + SEQUENCE * H + 2 * H
    for rank in step_of(model, MeshShape(1, dp=dp, cp=cp)):
        assert rank[axis, REDUCE] == Calls(2, (numbers + 1) * 4), "the gradients and the loss"
        assert {name for name, kind in rank if kind == REDUCE} == {axis}


def test_both_directions_of_dualpipe_add_their_gradients_and_average_their_loss_with_the_mirrored_rank() -> None:
    model = facts(layers_per_stage=(1, 1, 1, 1), bucket_bytes=HUGE)
    ranks = step_of(model, MeshShape(pp=4), "dualpipe", 8)
    ends = (
        2 * LAYER + 2 * EMBEDDING + SEQUENCE * H + 2 * H
    )  # the first stage of one direction and the last of the other
    for rank, numbers in zip(ranks, (ends, 2 * LAYER, 2 * LAYER, ends), strict=True):
        has_loss = numbers == ends
        assert rank["mirror", REDUCE] == Calls(1 + has_loss, (numbers + has_loss) * 4)
    tied = step_of(replace(model, tied=True), MeshShape(pp=4, dp=2), "dualpipe", 8)
    assert [("embd", REDUCE) in rank for rank in tied] == [False] * 8, "each end has both"
    for straight in step_of(facts(layers_per_stage=(1,) * 8), MeshShape(pp=4), "dualpipe-v", 8):
        assert ("mirror", REDUCE) not in straight


def test_neighbouring_stages_of_one_rank_send_each_other_nothing() -> None:
    """On a V of 2 × 2 stages the second rank turns around: 0 → 1 → 1 → 0."""
    activation = 2 * SEQUENCE * H * 4
    shape = StepVolume(facts(layers_per_stage=(1,) * 4), MeshShape(pp=2), build("zbv", 2, 4))
    for rank in (0, 1):
        assert shape.of_rank(rank, 0)["pp", "send"] == shape.of_rank(rank, 0)["pp", "recv"] == Calls(8, 8 * activation)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_forward_is_repeated_where_its_turn_in_the_window_of_microbatches_in_flight_is_beyond(name: str) -> None:
    """Rank r has up to 4 − r microbatches in flight (a W holds none): of each such window all but the first are repeated."""
    stages = facts(layers_per_stage=(1, 1, 1, 1))
    counts = [
        [rank["tp", REDUCE].count for rank in step_of(changed, MeshShape(pp=4, tp=2), name, 8)[::2]]
        for changed in (stages, replace(stages, recompute_microbatches_beyond=1))
    ]
    repeated = [sum(index % (4 - rank) >= 1 for index in range(8)) for rank in range(4)]
    assert [more - less for less, more in zip(*counts, strict=True)] == [2 * number for number in repeated]


def test_selective_recompute_repeats_the_exchanges_of_the_attention_once_for_each_layer_and_microbatch() -> None:
    plain, again, full = (
        step_of(facts(recompute=recompute, ulysses=2), MeshShape(1, cp=4))[0]
        for recompute in ("none", "selective", "full")
    )
    one = AttentionSizes(2, SEQUENCE, heads=4, kv_heads=4, head_dim=8, item_bytes=4, ring=2, ulysses=2)
    for repeated, volume in ((again, attention_again_volume(one)), (full, attention_volume(one).forward)):
        for key, calls in volume.items():
            assert repeated[key].count - plain[key].count == 4 * 4 * calls.count
            assert repeated[key].bytes - plain[key].bytes == 4 * 4 * calls.bytes


def test_kv_heads_travel_as_copies_where_there_are_fewer_than_ranks_of_ulysses() -> None:
    """8 heads, 2 KV heads of width 16, 64 positions of two sequences, 16-bit items."""
    sizes = AttentionSizes(2, 64, heads=8, kv_heads=2, head_dim=16, item_bytes=2)
    for ulysses, travelling in ((2, 2), (4, 4)):
        both = ulysses_volume(replace(sizes, ulysses=ulysses))
        each = 2 * (8 + travelling + travelling + 8) * 16 * 64 // ulysses * 2
        assert both.forward == both.backward == {("cp", "all_to_all"): Calls(2, each)}
        again = attention_again_volume(replace(sizes, ulysses=ulysses))
        assert again == {("cp", "all_to_all"): Calls(1, 2 * (8 + 2 * travelling) * 16 * 64 // ulysses * 2)}
    mixed = ring_volume(replace(sizes, ulysses=4, ring=2))
    step = 2 * (2 * 64 // 2) * 1 * 16  # numbers of k and v: positions of a rank, one head of width 16
    assert mixed.forward == {("cp", kind): Calls(1, step * 2) for kind in ("send", "recv")}
    assert mixed.backward == {("cp", kind): Calls(2, step * 2 + step * 4) for kind in ("send", "recv")}
    wide = ring_volume(replace(sizes, item_bytes=8, ring=2))
    assert wide.backward == {("cp", kind): Calls(2, 2 * 2 * (2 * 64 // 2) * 2 * 16 * 8) for kind in ("send", "recv")}


@pytest.mark.parametrize(("kv_heads", "tp", "held"), [(4, 1, 4), (4, 2, 2), (4, 4, 1), (2, 4, 1), (1, 2, 1)])
def test_the_kv_heads_of_a_rank_of_tp_travel_around_the_ring(kv_heads: int, tp: int, held: int) -> None:
    """Keys and values of 2 × 8 positions, of heads of width 8 in 32 bits: once in forward, twice in backward."""
    (rank, *_) = step_of(facts(kv_heads=kv_heads), MeshShape(1, cp=2, tp=tp))
    travels = 4 * 4 * 3  # layers, microbatches
    assert rank["cp", "send"] == rank["cp", "recv"] == Calls(travels, travels * 2 * (2 * 8) * held * 8 * 4)
